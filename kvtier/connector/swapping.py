"""Swaps: what is kept of requests that gave up their device blocks, until they get some again.

blocks   [0 ............... first) [first ......... stop // block_size]
          in the store, by name     private: the partly filled last one, and all that is not exact
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvtier.connector.futures import settled
from kvtier.connector.parts import Parts
from kvtier.connector.saves import SaveQueue
from kvtier.hooks import NO_BLOCK, RequestView, Save
from kvtier.layout import Span
from kvtier.store import PrivateObject, TieredStore

__all__ = ["Swap", "Swaps"]

_Kept = tuple[PrivateObject, ...]


@dataclass(slots=True)
class Swap:
    """One request's KV up to token `stop`; from block `first` on it is private.

    exact: whether all of it was computed from exact KV. job: the copy of what is private, under way.
    """

    first: int
    stop: int
    exact: bool
    job: int | None = None
    spans: tuple[Span, ...] = ()
    keeping: "Future[_Kept] | None" = None
    announced: bool = False
    ended: bool = False

    @property
    def objects(self) -> _Kept:
        """What is kept privately, part by part; nothing where it was lost."""
        return () if self.keeping is None or not self.keeping.done() else settled(self.keeping, ())

    @property
    def arrived(self) -> bool:
        """Whether nothing private is on its way any more."""
        return self.job is None and (self.keeping is None or self.keeping.done())


class Swaps:
    """Takes requests out and keeps what they need to come back.

    Args:
        store: keeps it.
        parts: of a block.
        block_size: tokens per block.
        saves: has the staging memory, and saves what has a name.
    """

    def __init__(self, store: TieredStore, parts: Parts, block_size: int, saves: SaveQueue) -> None:
        self._store = store
        self._parts = parts
        self._block_size = block_size
        self._saves = saves
        self._swaps: dict[str, Swap] = {}
        self._by_job: dict[int, Swap] = {}
        self._leaving: dict[int, tuple[Save, ...]] = {}
        self._using: list[tuple[Future[_Kept], tuple[Span, ...]]] = []

    @property
    def busy(self) -> bool:
        """Whether requests are on their way out."""
        return bool(self._by_job or self._using) or any(not swap.announced for swap in self._swaps.values())

    def get(self, request_id: str) -> Swap | None:
        """What is kept of a request."""
        return self._swaps.get(request_id)

    def swap_out(
        self,
        request: RequestView,
        block_ids: Sequence[int],
        windowed_ids: Sequence[int],
        num_tokens: int,
        jobs: Iterator[int],
        *,
        exact: bool,
    ) -> bool:
        """See `SchedulerHook.swap_out`; False: there is no staging memory for what was not saved yet.

        Or something that is behind the window by now never was saved, or has no name to be saved under.
        """
        nameable = exact and self._store.keeps_exact()
        named = min(num_tokens // self._block_size, len(request.chain)) if nameable else 0
        saved = self._saves.saved(request, block_ids[:named], exact=exact)
        if saved < block_ids.count(NO_BLOCK) + windowed_ids.count(NO_BLOCK):
            return False
        spans = self._saves.allocate(len(block_ids) - saved)
        parts = len(self._parts)
        if len(spans) < (len(block_ids) - saved) * parts:
            self._saves.free(spans)
            return False
        own = (named - saved) * parts
        if own:
            full, windowed = block_ids[:named], windowed_ids[:named]
            self._leaving |= self._saves.leave(request, full, saved, spans[:own], jobs, windowed_ids=windowed)
        self._saves.settle(request.id)
        swap = self._swaps[request.id] = Swap(named, num_tokens, exact)
        if len(spans) > own:
            swap.job, swap.spans = next(jobs), tuple(spans[own:])
            self._by_job[swap.job] = swap
            self._leaving[swap.job] = self._parts.saves(block_ids[named:], windowed_ids[named:], swap.spans)
        return True

    def evacuations(self) -> dict[int, tuple[Save, ...]]:
        """The copies that this step must make before anything else."""
        leaving, self._leaving = self._leaving, {}
        return leaving

    def copied(self, job: int, good: int | None) -> bool:
        """A job has ended; False: it is none of these. `good`: leading blocks that arrived, None: all."""
        swap = self._by_job.pop(job, None)
        if swap is None:
            return False
        swap.job = None
        if good is not None or swap.ended:
            self._saves.free(swap.spans)
            return True
        swap.keeping = self._store.private.keep(self._saves.views(swap.spans))
        self._using.append((swap.keeping, swap.spans))
        return True

    def collect(self) -> list[str]:
        """Free the staging memory of what has arrived; the requests that have arrived as a whole since."""
        for keeping, spans in self._using:
            if keeping.done():
                self._saves.free(spans)
        self._using = [(keeping, spans) for keeping, spans in self._using if not keeping.done()]
        arrived = []
        for request_id, swap in self._swaps.items():
            if not swap.announced and swap.arrived and not self._saves.is_saving(request_id):
                swap.announced = True
                arrived.append(request_id)
        return arrived

    def spans(self, objects: Sequence[PrivateObject]) -> list[Span]:
        """Where private objects lie, as far as they are good."""
        return self._store.private.spans(objects)

    def end(self, request_id: str) -> None:
        """The request has come back, or will not: what was private is gone."""
        swap = self._swaps.pop(request_id, None)
        if swap is not None:
            swap.ended = True
            if swap.keeping is not None:
                swap.keeping.add_done_callback(partial(_forget, self._store))

    def close(self) -> None:
        """Nobody comes back."""
        for request_id in list(self._swaps):
            self.end(request_id)


def _forget(store: TieredStore, keeping: "Future[_Kept]") -> None:
    kept: _Kept = settled(keeping, ())
    store.private.drop(kept)
