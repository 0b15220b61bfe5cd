"""What is saved when: every full block of a running request once, in chain order, as staging memory allows."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from kvtier.connector.futures import settled
from kvtier.cpu import StagingRegion
from kvtier.hooks import RequestView, Save, Step, StepSpan
from kvtier.keys import store_keys
from kvtier.layout import Span
from kvtier.store import PutResult, TieredStore
from kvtier.tiers import BlockRef

__all__ = ["SaveQueue"]


@dataclass(frozen=True, slots=True)
class _Job:
    """Blocks of one chain on their way device -> staging -> store."""

    refs: tuple[BlockRef, ...]
    spans: tuple[Span, ...]
    block_ids: frozenset[int]


class SaveQueue:
    """Plans saves, fences them against reuse of their device blocks, and puts what arrived into the store.

    A block waits for staging memory as long as its request runs, so a chain gets no holes while it grows;
    what still waits when the request ends is a dropped demotion, counted.
    """

    def __init__(self, store: TieredStore, ns: int, mask: bytes, block_size: int, staging: StagingRegion) -> None:
        self._store = store
        self._ns = ns
        self._mask = mask
        self._block_size = block_size
        self._staging = staging
        self._saved: dict[str, int] = {}  # request -> leading blocks that need no saving any more
        self._waiting: dict[str, int] = {}  # request -> full blocks that found no staging memory
        self._copying: dict[int, _Job] = {}
        self._putting: list[tuple[Future[PutResult], tuple[Span, ...]]] = []

    @property
    def busy(self) -> bool:
        """Whether copies or puts are under way."""
        return bool(self._copying or self._putting)

    def plan(self, step: Step, jobs: Iterator[int]) -> dict[int, tuple[Save, ...]]:
        """Save jobs for the blocks that are full once this step has run."""
        saves = {}
        for span in step.spans:
            job = self._job_for(span)
            if job is not None:
                number = next(jobs)
                self._copying[number] = job
                ids = span.block_ids[job.refs[0].depth :]
                saves[number] = tuple(map(Save, ids, job.spans))
        return saves

    def _job_for(self, span: StepSpan) -> _Job | None:
        request, full = span.request, span.stop // self._block_size
        first = self._saved.get(request.id)
        if first is None:
            first = len(self._store.match(self._keys(request, 0, full)).tiers)
        spans = self._staging.allocate(full - first) if full > first else []
        stop = first + len(spans)
        self._saved[request.id] = stop
        self._waiting[request.id] = full - stop
        if not spans:
            return None
        refs = self._refs(request, first, stop, exact=span.exact)
        return _Job(refs, tuple(spans), frozenset(span.block_ids[first:stop]))

    def _keys(self, request: RequestView, start: int, stop: int) -> list[bytes]:
        return store_keys(request.chain[start:stop], self._mask)

    def _refs(self, request: RequestView, start: int, stop: int, *, exact: bool) -> tuple[BlockRef, ...]:
        keys = self._keys(request, max(start - 1, 0), stop)
        parents = [None, *keys] if start == 0 else keys
        own = keys if start == 0 else keys[1:]
        return tuple(
            BlockRef(key, self._ns, start + at, parent, exact)
            for at, (key, parent) in enumerate(zip(own, parents, strict=False))
        )

    def fences(self, written: frozenset[int], planned: Mapping[int, object]) -> frozenset[int]:
        """Earlier save jobs that still read device blocks which this step may write."""
        return frozenset(
            number
            for number, job in self._copying.items()
            if number not in planned and not job.block_ids.isdisjoint(written)
        )

    def copied(self, number: int, good: int | None) -> None:
        """The worker is through with a job; `good` leading copies arrived, None for all."""
        job = self._copying.pop(number, None)
        if job is None:
            return
        kept = len(job.refs) if good is None else good
        buffers = [self._staging.view(span) for span in job.spans[:kept]]
        self._putting.append((self._store.put(list(zip(job.refs, buffers, strict=False))), job.spans))
        self._drop("copy_failed", len(job.refs) - kept)

    def collect(self) -> None:
        """Free the staging memory of finished puts."""
        going = []
        for future, spans in self._putting:
            if future.done():
                settled(future, None)
                self._staging.free(spans)
            else:
                going.append((future, spans))
        self._putting = going

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._saved.pop(request_id, None)
        self._drop("staging_full", self._waiting.pop(request_id, 0))

    def _drop(self, reason: str, blocks: int) -> None:
        if blocks:
            self._store.metrics.dropped_blocks.labels(self._store.host.name, reason).inc(blocks)
