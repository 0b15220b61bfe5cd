"""The ledger: what the index says inside one transaction, and the moves that keep its sums right.

total = unprepared + free + preparing + reserved + used         pages

used        extents of records                                  database `blk`
reserved    being written, or removed while still leased        database `resv`
preparing   being zero-filled for their first use               database `resv`
free        ready for use                                       database `free`
unprepared  never used so far: all pages from `prepared` on     a number in `meta`
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from kvtier.errors import FormatMismatch
from kvtier.keys import namespace_digest, namespace_index
from kvtier.nvme.extents import MAX_FRAGMENTS, Extent, FreeMap
from kvtier.tiers import BlockRef

__all__ = ["DATABASES", "Hold", "Ledger", "Names", "Record", "State"]

DATABASES = ("blk", "free", "resv", "names", "meta")

_RECORD = struct.Struct("<6I I B B i I I 16s 16s")
_HOLD = struct.Struct("<16s B 6I")
_STATE = struct.Struct("<5Q")
_PAGE = struct.Struct(">I")
_ID = struct.Struct("<I")
_EXACT, _HAS_PARENT = 1, 2
_NO_PARENT = bytes(16)
_NO_EXTENT = Extent(0, 0)
_MAX_FORMAT = 255


class Record(NamedTuple):
    """What the index knows of one block. `fmt`, `ns`: ids in `names`; `row`: its place in the recency array."""

    extents: tuple[Extent, ...]
    nbytes: int
    fmt: int
    exact: bool
    depth: int
    ns: int
    row: int
    parent: bytes | None
    checksum: bytes

    @property
    def page(self) -> int:
        """Its first page: names the bytes' place, unique among all that is not free."""
        return self.extents[0].page

    def pack(self) -> bytes:
        """Its 74 bytes in the index."""
        flags = self.exact * _EXACT + (self.parent is not None) * _HAS_PARENT
        numbers = (self.nbytes, self.fmt, flags, self.depth, self.ns, self.row)
        return _RECORD.pack(*_flat(self.extents), *numbers, self.parent or _NO_PARENT, self.checksum)

    @classmethod
    def unpack(cls, data: bytes) -> "Record":
        """Inverse of `pack`."""
        *flat, nbytes, fmt, flags, depth, ns, row, parent, checksum = _RECORD.unpack(data)
        known_parent = parent if flags & _HAS_PARENT else None
        return cls(_extents(flat), nbytes, fmt, bool(flags & _EXACT), depth, ns, row, known_parent, checksum)


class Hold(NamedTuple):
    """Pages that a living writer holds. `preparing`: no record's, but being zero-filled."""

    writer: bytes
    preparing: bool
    extents: tuple[Extent, ...]

    @property
    def pages(self) -> int:
        """How many."""
        return _pages(self.extents)


class State(NamedTuple):
    """Sums over the directory, in pages."""

    total: int = 0
    prepared: int = 0
    used: int = 0
    reserved: int = 0
    preparing: int = 0

    @property
    def free(self) -> int:
        """Pages that can be allocated at once."""
        return self.prepared - self.used - self.reserved - self.preparing

    @property
    def occupied(self) -> int:
        """Pages that hold, or are about to hold, blocks."""
        return self.used + self.reserved


def _flat(extents: Sequence[Extent]) -> tuple[int, ...]:
    padded = (*extents, _NO_EXTENT, _NO_EXTENT)[:MAX_FRAGMENTS]
    return tuple(number for extent in padded for number in extent)


def _extents(flat: Sequence[int]) -> tuple[Extent, ...]:
    if not flat[3]:  # nearly every record is one extent
        return (Extent(flat[0], flat[1]),)
    return tuple(Extent(flat[at], flat[at + 1]) for at in range(0, 2 * MAX_FRAGMENTS, 2) if flat[at + 1])


def _pages(extents: Sequence[Extent]) -> int:
    return sum(extent.pages for extent in extents)


class Names:
    """Small numbers for namespace digests and format ids; the same for all processes on the directory.

    Args:
        db: the database `names`.
    """

    __slots__ = ("_db", "_values")

    def __init__(self, db: Any) -> None:
        self._db = db
        self._values: dict[tuple[bytes, int], bytes] = {}

    def intern(self, txn: Any, kind: bytes, value: bytes) -> int:
        """The id of a value, given to it now if it has none. Needs a write transaction."""
        known = txn.get(kind + value, db=self._db)
        if known is not None:
            return cast(int, _ID.unpack(known)[0])
        counter = b"#" + kind
        fresh = cast(int, _ID.unpack(txn.get(counter, _ID.pack(0), db=self._db))[0])
        if kind == b"f" and fresh > _MAX_FORMAT:
            raise FormatMismatch(f"format {value!r}: the directory knows {fresh} others already; use a fresh one")
        txn.put(counter, _ID.pack(fresh + 1), db=self._db)
        txn.put(kind + value, _ID.pack(fresh), db=self._db)
        txn.put(counter + _ID.pack(fresh), value, db=self._db)
        return fresh

    def value(self, txn: Any, kind: bytes, number: int) -> bytes:
        """The value behind an id. Remembered, because committed ids never change: ask for committed ones only."""
        known = self._values.get((kind, number))
        if known is None:
            known = cast(bytes, txn.get(b"#" + kind + _ID.pack(number), db=self._db))
            self._values[kind, number] = known
        return known


class Ledger:
    """One transaction's view of the index; see the module for the sums that it keeps.

    Args:
        txn: an open transaction; a reader may only look.
        dbs: the databases by name.
        names: shared by all ledgers of the process.
    """

    __slots__ = ("_blk", "_dbs", "_freed", "_names", "_stored", "free", "state", "txn")

    def __init__(self, txn: Any, dbs: Mapping[str, Any], names: Names) -> None:
        self.txn = txn
        self.free = FreeMap(txn, dbs["free"])
        self._dbs = dbs
        self._blk = dbs["blk"]
        self._names = names
        self._freed: list[Extent] = []
        packed = txn.get(b"state", db=dbs["meta"])
        self.state = State(*_STATE.unpack(packed)) if packed else State()
        self._stored = self.state

    def save(self) -> None:
        """Store the sums, and the pages that became free, joined; before the commit."""
        self.free.add(self._freed)
        self._freed = []
        if self.state != self._stored:
            self.txn.put(b"state", _STATE.pack(*self.state), db=self._dbs["meta"])
            self._stored = self.state

    # ---- records

    @property
    def blocks(self) -> int:
        """Number of records."""
        return cast(int, self.txn.stat(self._blk)["entries"])

    def get(self, key: bytes) -> Record | None:
        """The record of a key."""
        data = self.txn.get(key, db=self._blk)
        return None if data is None else Record.unpack(data)

    def has(self, key: bytes) -> bool:
        """Whether a key has a record."""
        return self.txn.get(key, db=self._blk) is not None

    def records(self, start: bytes = bytes(16)) -> Iterator[tuple[bytes, Record]]:
        """All records from the key `start` on, in key order."""
        with self.txn.cursor(self._blk) as cursor:
            if cursor.set_range(start):
                for key, data in cursor:
                    yield key, Record.unpack(data)

    def ancestors(self, key: bytes | None) -> Iterator[bytes]:
        """`key` and its chain of parents, as far up as they are here."""
        while key is not None and (record := self.get(key)) is not None:
            yield key
            key = record.parent

    def ref(self, key: bytes, record: Record) -> BlockRef:
        """How tiers speak of a record."""
        ns = namespace_index(self._names.value(self.txn, b"n", record.ns))
        return BlockRef(key, ns, record.depth, record.parent, record.exact)

    def fmt(self, record: Record) -> str:
        """A record's format id."""
        return self._names.value(self.txn, b"f", record.fmt).decode()

    def namespace(self, index: int) -> int:
        """The directory's id for a namespace of this process."""
        return self._names.intern(self.txn, b"n", namespace_digest(index))

    def format(self, fmt: str) -> int:
        """The directory's id for a format."""
        return self._names.intern(self.txn, b"f", fmt.encode())

    def insert(self, key: bytes, record: Record) -> None:
        """Make a record of pages that were taken out of the reservations."""
        self.txn.put(key, record.pack(), db=self._blk)
        self.state = self.state._replace(used=self.state.used + _pages(record.extents))

    def drop(self, key: bytes, record: Record, keeper: bytes | None = None) -> None:
        """Delete a record; its pages become free, or `keeper`'s for as long as somebody reads them."""
        self.txn.delete(key, db=self._blk)
        self.state = self.state._replace(used=self.state.used - _pages(record.extents))
        if keeper is None:
            self.release(record.extents)
        else:
            self._hold(Hold(keeper, preparing=False, extents=record.extents))

    # ---- reservations

    def reserve(self, sizes: Sequence[int], writer: bytes) -> list[tuple[Extent, ...]]:
        """Take free pages for as many of the leading sizes (in pages) as fit; see `FreeMap.take`."""
        taken = self.free.take(sizes)
        for extents in taken:
            self._hold(Hold(writer, preparing=False, extents=extents))
        return taken

    def end_hold(self, page: int, writer: bytes) -> tuple[Extent, ...]:
        """Take pages out of the holds, for a record or to free them. Empty if they are not `writer`'s."""
        data = self.txn.get(_PAGE.pack(page), db=self._dbs["resv"])
        if data is None:
            return ()
        hold = _unpack_hold(data)
        if hold.writer != writer:
            return ()
        self.txn.delete(_PAGE.pack(page), db=self._dbs["resv"])
        self._count_hold(hold, -hold.pages)
        return hold.extents

    def free_holds(self, pages: Sequence[int], writer: bytes) -> None:
        """End holds of a writer, named by their first pages, and free their pages."""
        for page in pages:
            self.release(self.end_hold(page, writer))

    def release(self, extents: Sequence[Extent]) -> None:
        """Free pages that are neither held nor a record's any more. The next transaction can take them."""
        self._freed += extents

    def holds(self) -> list[Hold]:
        """All holds."""
        with self.txn.cursor(self._dbs["resv"]) as cursor:
            return [_unpack_hold(data) for _, data in cursor]

    def _hold(self, hold: Hold) -> None:
        data = _HOLD.pack(hold.writer, hold.preparing, *_flat(hold.extents))
        self.txn.put(_PAGE.pack(hold.extents[0].page), data, db=self._dbs["resv"])
        self._count_hold(hold, hold.pages)

    def _count_hold(self, hold: Hold, pages: int) -> None:
        state = self.state
        if hold.preparing:
            self.state = state._replace(preparing=state.preparing + pages)
        else:
            self.state = state._replace(reserved=state.reserved + pages)

    # ---- growing

    def prepare(self, start: int, pages: int, writer: bytes | None) -> bool:
        """Bring the next unprepared pages into use: free at once, or held by `writer` while it zero-fills them.

        Returns:
            False if they are not the next ones any more.
        """
        state = self.state
        if state.prepared != start or start + pages > state.total:
            return False
        self.state = state._replace(prepared=start + pages)
        extent = Extent(start, pages)
        if writer is None:
            self.release([extent])
        else:
            self._hold(Hold(writer, preparing=True, extents=(extent,)))
        return True


def _unpack_hold(data: bytes) -> Hold:
    writer, preparing, *flat = _HOLD.unpack(data)
    return Hold(writer, bool(preparing), _extents(flat))
