"""Extents: runs of 4 KiB pages in one flat address space, and the map of those that are free.

page number   0 1 2 ......... S-1 | S ........ 2S-1 | ...          S = pages per segment
file          seg-00000.kv        | seg-00001.kv    | ...

Runs may cross from one segment into the next; only the I/O layer knows where files end.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvtier.errors import CorruptObject

__all__ = ["MAX_FRAGMENTS", "PAGE", "Extent", "FreeMap", "merged", "pages_for"]

PAGE = 4096
MAX_FRAGMENTS = 3
"""Extents of one record: one where the space allows it, up to this many in a fragmented file."""

_PAGE = struct.Struct(">I")  # big-endian: the index sorts by bytes
_SCANNED = 4096


class Extent(NamedTuple):
    """`pages` pages from `page` on."""

    page: int
    pages: int

    @property
    def end(self) -> int:
        """The first page behind it."""
        return self.page + self.pages


def pages_for(nbytes: int) -> int:
    """How many pages hold so many bytes."""
    return -(-nbytes // PAGE)


def merged(extents: Iterable[Extent]) -> list[Extent]:
    """The same pages in as few extents as possible, in order."""
    runs: list[Extent] = []
    for extent in sorted(extents):
        if runs and runs[-1].end == extent.page:
            runs[-1] = Extent(runs[-1].page, runs[-1].pages + extent.pages)
        else:
            runs.append(extent)
    return runs


class FreeMap:
    """Free runs inside one index transaction: page -> pages, never adjacent to one another.

    Args:
        txn: an open transaction. db: the database `free`.
    """

    __slots__ = ("_db", "_txn")

    def __init__(self, txn: Any, db: Any) -> None:
        self._txn = txn
        self._db = db

    def runs(self, limit: int | None = None) -> list[Extent]:
        """Free runs in address order, at most `limit`."""
        found: list[Extent] = []
        with self._txn.cursor(self._db) as cursor:
            for key, value in cursor:
                if len(found) == limit:
                    break
                found.append(Extent(*_PAGE.unpack(key), *_PAGE.unpack(value)))
        return found

    def add(self, extents: Iterable[Extent]) -> None:
        """Give pages back, joined with their free neighbours.

        Raises:
            CorruptObject: some of them are free already.
        """
        for extent in merged(extents):
            self._add(extent)

    def _add(self, extent: Extent) -> None:
        page, pages = extent
        before, after = self._neighbours(page)
        if (before is not None and before.end > page) or (after is not None and after.page < extent.end):
            raise CorruptObject(f"pages {page}..{extent.end - 1} are freed twice")
        if after is not None and after.page == extent.end:
            self._txn.delete(_PAGE.pack(after.page), db=self._db)
            pages += after.pages
        if before is not None and before.end == page:
            page, pages = before.page, before.pages + pages
        self._txn.put(_PAGE.pack(page), _PAGE.pack(pages), db=self._db)

    def _neighbours(self, page: int) -> tuple[Extent | None, Extent | None]:
        with self._txn.cursor(self._db) as cursor:
            after = _at(cursor) if cursor.set_range(_PAGE.pack(page)) else None
            there = cursor.prev() if after is not None else cursor.last()
            return (_at(cursor) if there else None), after

    def take(self, sizes: Sequence[int]) -> list[tuple[Extent, ...]]:
        """Allocate, in order, as many of the leading sizes (in pages) as fit.

        All of them in one contiguous run if there is one, else each in one extent where possible.

        Returns:
            For each size that fits, its extents, `MAX_FRAGMENTS` at most.
        """
        total = sum(sizes)
        runs = self.runs(_SCANNED)
        if sum(run.pages for run in runs) < total:
            runs = self.runs()
        whole = next((run for run in runs if run.pages >= total), None)
        pool = [whole] if whole is not None else sorted(runs, key=lambda run: -run.pages)
        left = [[run.page, run.pages] for run in pool]
        taken: list[tuple[Extent, ...]] = []
        for size in sizes:
            extents = _carve(left, size)
            if not extents:
                break
            taken.append(extents)
        for run, (page, pages) in zip(pool, left, strict=True):
            self._shorten(run, Extent(page, pages))
        return taken

    def _shorten(self, run: Extent, rest: Extent) -> None:
        if rest == run:
            return
        self._txn.delete(_PAGE.pack(run.page), db=self._db)
        if rest.pages:
            self._txn.put(_PAGE.pack(rest.page), _PAGE.pack(rest.pages), db=self._db)

    def cut(self, total: int) -> None:
        """Forget free pages from `total` on."""
        for run in reversed(self.runs()):
            if run.end <= total:
                return
            self._shorten(run, Extent(run.page, max(0, total - run.page)))


def _at(cursor: Any) -> Extent:
    return Extent(*_PAGE.unpack(cursor.key()), *_PAGE.unpack(cursor.value()))


def _carve(left: list[list[int]], size: int) -> tuple[Extent, ...]:
    """Cut `size` pages from the runs ([page, pages], changed in place); empty if they do not fit."""
    chosen = next((run for run in left if run[1] >= size), None)
    if chosen is not None:
        return (_cut(chosen, size),)
    parts = sorted((run for run in left if run[1]), key=lambda run: -run[1])[:MAX_FRAGMENTS]
    if sum(run[1] for run in parts) < size:
        return ()
    extents: list[Extent] = []
    for run in parts:
        extents.append(_cut(run, min(run[1], size)))
        size -= extents[-1].pages
        if not size:
            break
    return tuple(extents)


def _cut(run: list[int], size: int) -> Extent:
    extent = Extent(run[0], size)
    run[0] += size
    run[1] -= size
    return extent
