"""The arena: pages that this writer holds in the index, and gives to its records without asking the index again.

free (index)  --refill, one transaction-->  arena  --carve, in memory-->  record being written  --commit-->  record

One refill serves many batches, so that a put costs one transaction, its commit. What the index holds for this writer
is the arena and what was carved from it: if the process dies, all of it is reclaimed.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from kvtier.nvme.extents import MAX_FRAGMENTS, Extent, merged

__all__ = ["Arena"]


class Arena:
    """Not thread-safe: the tier's lock covers it.

    Attributes:
        idle: pages in it.

    Invariant: runs are disjoint and never adjacent.
    """

    __slots__ = ("_ends", "_runs", "_starts", "idle")

    def __init__(self) -> None:
        self.idle = 0
        self._starts: list[int] = []
        self._runs: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def add(self, extents: Iterable[Extent]) -> None:
        """Put pages in, joined with their neighbours."""
        for page, pages in merged(extents):
            self.idle += pages
            end = page + pages
            if (before := self._ends.pop(page, None)) is not None:
                page = before  # noqa: PLW2901
                self._remove(before)
            if (after := self._runs.get(end)) is not None:
                self._remove(end)
                end += after
            self._insert(page, end)

    def _insert(self, page: int, end: int) -> None:
        insort(self._starts, page)
        self._runs[page] = end - page
        self._ends[end] = page

    def _remove(self, page: int) -> None:
        self._ends.pop(page + self._runs.pop(page), None)
        del self._starts[bisect_left(self._starts, page)]

    def carve_run(self, sizes: Sequence[int]) -> list[tuple[Extent, ...]]:
        """Take out all of the sizes (in pages) as one contiguous run; empty if there is none."""
        total = sum(sizes)
        if total > self.idle:
            return []
        start = next((page for page in self._starts if self._runs[page] >= total), None)
        if start is None:
            return []
        self._shorten(start, total)
        carved: list[tuple[Extent, ...]] = []
        for size in sizes:
            carved.append((Extent(start, size),))
            start += size
        return carved

    def carve(self, sizes: Sequence[int]) -> list[tuple[Extent, ...]]:
        """Take out, in order, as many of the leading sizes (in pages) as fit, each in one extent where possible.

        Returns:
            For each size that fits, its extents, `MAX_FRAGMENTS` at most.
        """
        taken: list[tuple[Extent, ...]] = []
        for size in sizes:
            extents = self._carve_one(size)
            if not extents:
                break
            taken.append(extents)
        return taken

    def _carve_one(self, size: int) -> tuple[Extent, ...]:
        """Take `size` pages out; empty if they do not fit."""
        chosen = next((page for page in self._starts if self._runs[page] >= size), None)
        if chosen is not None:
            self._shorten(chosen, size)
            return (Extent(chosen, size),)
        parts = sorted(self._starts, key=lambda page: -self._runs[page])[:MAX_FRAGMENTS]
        if sum(self._runs[page] for page in parts) < size:
            return ()
        extents: list[Extent] = []
        for page in parts:
            extents.append(Extent(page, min(self._runs[page], size)))
            size -= extents[-1].pages
            self._shorten(page, extents[-1].pages)
            if not size:
                break
        return tuple(extents)

    def _shorten(self, page: int, pages: int) -> None:
        """Take the first pages of a run out."""
        end = page + self._runs[page]
        self._remove(page)
        if page + pages < end:
            self._insert(page + pages, end)
        self.idle -= pages

    def drain(self, rest: int = 0) -> list[Extent]:
        """Take out all but about `rest` pages, the shortest runs first."""
        drained: list[Extent] = []
        for page in sorted(self._starts, key=lambda page: self._runs[page]):
            if self.idle <= rest:
                break
            drained.append(Extent(page, min(self._runs[page], self.idle - rest)))
            self._shorten(page, drained[-1].pages)
        return drained
