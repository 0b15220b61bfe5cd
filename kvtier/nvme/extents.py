"""Extents: runs of 4 KiB pages in one flat address space, and the map of those that are free.

page number   0 1 2 ......... S-1 | S ........ 2S-1 | ...          S = pages per segment
file          seg-00000.kv        | seg-00001.kv    | ...

Runs may cross from one segment into the next; only the I/O layer knows where files end.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvtier.errors import CorruptObject
from kvtier.nvme.seals import seal, unsealed

__all__ = ["MAX_FRAGMENTS", "PAGE", "Extent", "FreeMap", "merged", "pages_for"]

PAGE = 4096
MAX_FRAGMENTS = 3
"""Extents of one record: one where the space allows it, up to this many in a fragmented file."""

_PAGE = struct.Struct(">I")  # big-endian: the index sorts by bytes
_SCANNED = 256


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
    start = end = -1
    for page, pages in sorted(extents):
        if page != end:
            if end > start:
                runs.append(Extent(start, end - start))
            start = page
        end = page + pages
    if end > start:
        runs.append(Extent(start, end - start))
    return runs


class FreeMap:
    """Free runs inside one index transaction: page -> pages, never adjacent to one another.

    Args:
        txn: an open transaction. db: the database `free`.

    Raises:
        CorruptObject: by any verb that meets an entry which was altered.
    """

    __slots__ = ("_db", "_txn")

    def __init__(self, txn: Any, db: Any) -> None:
        self._txn = txn
        self._db = db

    def runs(self, limit: int | None = None) -> list[Extent]:
        """Free runs in address order, at most `limit`."""
        found: list[Extent] = []
        with self._txn.cursor(self._db) as cursor:
            for key, data in cursor:
                if len(found) == limit:
                    break
                found.append(_run(key, data))
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
        self._put(page, pages)

    def _put(self, page: int, pages: int) -> None:
        key = _PAGE.pack(page)
        self._txn.put(key, seal(key, _PAGE.pack(pages)), db=self._db)

    def _neighbours(self, page: int) -> tuple[Extent | None, Extent | None]:
        with self._txn.cursor(self._db) as cursor:
            after = _at(cursor) if cursor.set_range(_PAGE.pack(page)) else None
            there = cursor.prev() if after is not None else cursor.last()
            return (_at(cursor) if there else None), after

    def take(self, least: int, most: int) -> list[Extent]:
        """Allocate pages: from one run of at least `least` if a bounded look finds one, else from several.

        Returns:
            `least` to `most` pages; fewer only if there are no more.
        """
        seen: list[Extent] = []
        total = 0
        with self._txn.cursor(self._db) as cursor:
            for key, data in cursor:
                run = _run(key, data)
                if run.pages >= least:
                    seen, total = [run], run.pages
                    break
                seen.append(run)
                total += run.pages
                if len(seen) >= _SCANNED and total >= least:
                    break
        chosen = _largest(seen, most if len(seen) == 1 else least)
        whole = {run.page: run for run in seen}
        for extent in chosen:
            run = whole[extent.page]
            self._shorten(run, Extent(extent.end, run.end - extent.end))
        return chosen

    def _shorten(self, run: Extent, rest: Extent) -> None:
        if rest == run:
            return
        self._txn.delete(_PAGE.pack(run.page), db=self._db)
        if rest.pages:
            self._put(rest.page, rest.pages)

    def replace(self, extents: Sequence[Extent]) -> None:
        """Know these runs, which are not adjacent, as the free ones, and no others."""
        self._txn.drop(self._db, delete=False)
        for page, pages in extents:
            self._put(page, pages)

    def cut(self, total: int) -> None:
        """Forget free pages from `total` on."""
        for run in reversed(self.runs()):
            if run.end <= total:
                return
            self._shorten(run, Extent(run.page, max(0, total - run.page)))


def _run(key: bytes, data: bytes) -> Extent:
    return Extent(*_PAGE.unpack(key), *_PAGE.unpack(unsealed(key, data)))


def _at(cursor: Any) -> Extent:
    return _run(cursor.key(), cursor.value())


def _largest(runs: Sequence[Extent], pages: int) -> list[Extent]:
    """As many of the largest runs as hold `pages` pages, the last one cut to fit."""
    chosen: list[Extent] = []
    for run in sorted(runs, key=lambda run: -run.pages):
        chosen.append(Extent(run.page, min(run.pages, pages)))
        pages -= chosen[-1].pages
        if not pages:
            break
    return chosen
