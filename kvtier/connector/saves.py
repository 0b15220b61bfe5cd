"""What is saved when: every full block of a running request once, in chain order, as staging memory allows.

Blocks that leave the device, and that host holds no more, are saved once again before they are overwritten.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain

from kvtier.connector.duplicates import DeviceCopies, Leaving
from kvtier.connector.futures import settled
from kvtier.connector.hinting import block_hints
from kvtier.connector.parts import Parts
from kvtier.cpu import StagingRegion
from kvtier.hints import Hint
from kvtier.hooks import NO_BLOCK, RequestView, Save, Step, StepSpan
from kvtier.layout import Span
from kvtier.store import PutResult, TieredStore
from kvtier.tiers import BlockRef

__all__ = ["SaveQueue"]


@dataclass(frozen=True, slots=True)
class _Job:
    """Blocks on their way device -> staging -> store; refs, spans and hints are one per part.

    They are of one chain, a request's, or (`request_id` None) what leaves the device in one step.
    """

    request_id: str | None
    block_ids: tuple[int, ...]
    refs: tuple[BlockRef, ...]
    spans: tuple[Span, ...]
    hints: list[Hint] | None = None
    windowed_ids: tuple[int, ...] = ()


class SaveQueue:
    """Plans saves, fences them against reuse of their device blocks, and puts what arrived into the store.

    A block waits for staging memory as long as its request runs, so a chain gets no holes while it grows;
    what still waits when the request ends is a dropped demotion, counted.

    Args:
        store: takes the blocks.
        parts: of a block.
        block_size: tokens per block.
        staging: memory of the workers' saves, one region per part.
        copies: learns what the device holds.
    """

    def __init__(
        self,
        store: TieredStore,
        parts: Parts,
        block_size: int,
        staging: Sequence[StagingRegion],
        copies: DeviceCopies,
    ) -> None:
        self._store = store
        self._parts = parts
        self._block_size = block_size
        self._staging = tuple(staging)
        self._copies = copies
        self._saved: dict[str, int] = {}  # request -> leading blocks that need no saving any more
        self._waiting: dict[str, int] = {}  # request -> full blocks that found no staging memory
        self._copying: dict[int, _Job] = {}
        self._putting: list[tuple[Future[PutResult], _Job, int]] = []  # with the number of blocks that arrived
        self._open: Counter[str | None] = Counter()  # request -> its jobs
        self._void: set[int] = set()

    @property
    def busy(self) -> bool:
        """Whether copies or puts are under way."""
        return bool(self._copying or self._putting)

    @property
    def copying(self) -> bool:
        """Whether copies are under way."""
        return bool(self._copying)

    def count(self, request_id: str) -> int:
        """Leading blocks of a request that need no saving any more, as far as that was asked."""
        return self._saved.get(request_id, 0)

    def is_saving(self, request_id: str) -> bool:
        """Whether blocks of this request are on their way."""
        return request_id in self._open

    def plan(
        self, step: Step, jobs: Iterator[int], void: AbstractSet[str] = frozenset()
    ) -> dict[int, tuple[Save, ...]]:
        """Save jobs for the blocks that are full once this step has run; not of requests that may have to start over.

        Args:
            step: the step.
            jobs: their numbers.
            void: those requests; theirs are saved with a later step.
        """
        saves = {}
        for span in step.spans:
            job = None if span.request.id in void else self._job_for(span)
            if job is not None:
                self._copies.filled(job.block_ids, job.refs)
                saves[next(jobs)] = job
        return self._begin(saves)

    def evacuate(self, leaving: Sequence[Leaving], jobs: Iterator[int]) -> dict[int, tuple[Save, ...]]:
        """A save job for what leaves the device with this step; what finds no staging memory is dropped, counted."""
        spans = self.allocate(len(leaving)) if leaving else []
        fitting = len(spans) // len(self._parts)
        self._drop("staging_full", len(leaving) - fitting)
        if not fitting:
            return {}
        ids, refs = zip(*leaving[:fitting], strict=True)
        return self._begin({next(jobs): _Job(None, ids, tuple(chain.from_iterable(refs)), tuple(spans))})

    def _begin(self, jobs: Mapping[int, _Job]) -> dict[int, tuple[Save, ...]]:
        self._copying.update(jobs)
        self._open.update(job.request_id for job in jobs.values())
        return {number: self._parts.saves(job.block_ids, job.windowed_ids, job.spans) for number, job in jobs.items()}

    def _job_for(self, span: StepSpan) -> _Job | None:
        request, parts = span.request, len(self._parts)
        # Beyond the chain a span has drafts, which may be wrong, or what nobody else may use.
        full = min(span.stop // self._block_size, len(request.chain))
        first = self.saved(request, span.block_ids[:full], exact=span.exact)
        gone = span.block_ids.count(NO_BLOCK) + span.windowed_ids.count(NO_BLOCK)
        if first < gone:
            self._drop("behind_window", gone - first)
            first = gone
        spans = self.allocate(full - first) if full > first else []
        stop = first + len(spans) // parts
        self._saved[request.id] = stop
        self._waiting[request.id] = full - stop
        if not spans:
            return None
        refs = self._parts.refs(request.chain, first, stop, exact=span.exact)
        hints = block_hints(request, first, stop, parts)
        windowed = span.windowed_ids[first:stop]
        return _Job(request.id, span.block_ids[first:stop], tuple(refs), tuple(spans), hints, windowed)

    def saved(self, request: RequestView, block_ids: Sequence[int], *, exact: bool) -> int:
        """How many of a request's leading full blocks, which the device has in `block_ids`, need no saving any more."""
        first = self._saved.get(request.id)
        if first is None:
            keys, parts = self._parts.keys(request.chain[: len(block_ids)]), len(self._parts)
            first = self._store.wanted(keys, exact=exact, parts=parts)
            first += self._copies.leading(block_ids[first:], keys[first * parts :])
        return min(first, len(block_ids))

    def leave(
        self,
        request: RequestView,
        block_ids: Sequence[int],
        first: int,
        spans: Sequence[Span],
        jobs: Iterator[int],
        *,
        exact: bool = True,
        windowed_ids: Sequence[int] = (),
    ) -> dict[int, tuple[Save, ...]]:
        """A save job for full blocks of a request from `first` on, before its blocks are written over."""
        stop, parts = len(block_ids), len(self._parts)
        refs = self._parts.refs(request.chain, first, stop, exact=exact)
        hints = block_hints(request, first, stop, parts)
        own, windowed = tuple(block_ids[first:]), tuple(windowed_ids[first:])
        return self._begin({next(jobs): _Job(request.id, own, tuple(refs), tuple(spans), hints, windowed)})

    def leave_rest(
        self, request: RequestView, block_ids: Sequence[int], jobs: Iterator[int], *, exact: bool
    ) -> dict[int, tuple[Save, ...]]:
        """`leave`, of what was not saved of full blocks, as far as there is staging memory and they are there."""
        first = max(self.saved(request, block_ids, exact=exact), block_ids.count(NO_BLOCK))
        spans = self.allocate(len(block_ids) - first)
        stop = first + len(spans) // len(self._parts)
        self._saved[request.id], self._waiting[request.id] = stop, len(block_ids) - stop
        return self.leave(request, block_ids[:stop], first, spans, jobs, exact=exact) if spans else {}

    def void(self) -> None:
        """What is being copied now is not to be stored, and what was stored is not there any more."""
        self._void |= self._copying.keys()
        self._saved.clear()

    def views(self, spans: Sequence[Span]) -> list[memoryview]:
        """The staging memory of whole blocks."""
        return [self._staging[at % len(self._parts)].view(span) for at, span in enumerate(spans)]

    def free(self, spans: Sequence[Span]) -> None:
        """Give the staging memory of whole blocks back."""
        for part, region in enumerate(self._staging):
            region.free(spans[part :: len(self._parts)])

    def allocate(self, blocks: int) -> list[Span]:
        """Slots for all parts of up to so many blocks, block by block."""
        columns = [region.allocate(blocks) for region in self._staging]
        fitting = min(map(len, columns))
        for region, column in zip(self._staging, columns, strict=True):
            region.free(column[fitting:])
        return [span for row in zip(*(column[:fitting] for column in columns), strict=True) for span in row]

    def fences(self, step: Step, planned: Mapping[int, object]) -> frozenset[int]:
        """Earlier save jobs that still read device blocks which this step may write."""
        return frozenset(
            number
            for number, job in self._copying.items()
            if number not in planned
            and not (step.written.isdisjoint(job.block_ids) and step.windowed_written.isdisjoint(job.windowed_ids))
        )

    def copied(self, number: int, good: int | None) -> None:
        """The workers are through with a job; `good` leading blocks arrived, None for all."""
        job = self._copying.pop(number, None)
        if job is None:
            return
        parts = len(self._parts)
        if number in self._void:
            self._void.discard(number)
            good = 0
        blocks = len(job.block_ids) if good is None else good
        items = list(zip(job.refs, self.views(job.spans[: blocks * parts]), strict=False))
        hints = None if job.hints is None else job.hints[: len(items)]
        self._putting.append((self._store.put(items, hints, parts=parts), job, blocks))
        self._drop("copy_failed", len(job.block_ids) - blocks)

    def collect(self) -> None:
        """Free the staging memory of finished puts."""
        going = []
        for future, job, arrived in self._putting:
            if not future.done():
                going.append((future, job, arrived))
                continue
            if settled(future, None) is not None:
                # No block that did not arrive: after a step that failed it holds anything.
                self._copies.stored(job.block_ids[:arrived], job.refs)
            self.free(job.spans)
            self._open[job.request_id] -= 1
            self._open += Counter()
        self._putting = going

    def settle(self, request_id: str) -> None:
        """The request has nothing on the device any more, and no block that waits for staging memory."""
        self._saved.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._saved.pop(request_id, None)
        self._drop("staging_full", self._waiting.pop(request_id, 0))

    def _drop(self, reason: str, blocks: int) -> None:
        if blocks:
            self._store.metrics.dropped_blocks.labels(self._store.host.name, reason).inc(blocks)
