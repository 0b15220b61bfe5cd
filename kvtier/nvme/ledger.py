"""The ledger: what the index says inside one transaction, and the moves that keep its sums right.

total = unprepared + free + preparing + reserved + used         pages

used        extents of records                                  database `blk`
reserved    a writer's: its arena, what it writes, and what     database `resv`
            was removed while it is still leased
preparing   being zero-filled for their first use               database `resv`
free        ready for use                                       database `free`
unprepared  never used so far: all pages from `prepared` on     a number in `meta`
"""

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from kvtier.errors import CorruptObject, FormatMismatch
from kvtier.keys import STORE_KEY_BYTES, namespace_digest, namespace_index
from kvtier.nvme.extents import PAGE, Extent, FreeMap, merged, pages_for
from kvtier.policies import WriteMeter
from kvtier.tiers import BlockRef

__all__ = ["DATABASES", "Hold", "Ledger", "Names", "Record", "State"]

DATABASES = ("blk", "free", "resv", "names", "meta")

# page, nbytes, format, flags, depth, namespace, row, parent, checksum: 54 bytes
_RECORD = struct.Struct("<I I B B i I I 16s 16s")
# Only a record of several extents says how long each is: pages of the first, then the others.
_PARTS = struct.Struct("<5I")
_HOLD = struct.Struct("<16s B I")
_STATE = struct.Struct("<5Q")
_METER = struct.Struct("<3d")
_PAGE = struct.Struct(">I")
_ID = struct.Struct("<I")
_FLAGS_AT, _ROW_AT = 9, 18
_EXACT, _HAS_PARENT, _SPLIT = 1, 2, 4
_NO_PARENT = bytes(STORE_KEY_BYTES)
_MAX_FORMAT = 255
_REMEMBERED = 1 << 16
_Known = TypeVar("_Known", bytes, int)
_Value = TypeVar("_Value", bytes, int)


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
        """Its 54 bytes in the index, 74 if it lies in several extents."""
        extents, nbytes, fmt, exact, depth, ns, row, parent, checksum = self
        split = len(extents) > 1
        flags = exact * _EXACT + (parent is not None) * _HAS_PARENT + split * _SPLIT
        packed = _RECORD.pack(
            extents[0].page, nbytes, fmt, flags, depth, ns, row, _NO_PARENT if parent is None else parent, checksum
        )
        if not split:
            return packed
        numbers = [extents[0].pages, *(number for extent in extents[1:] for number in extent), 0, 0]
        return packed + _PARTS.pack(*numbers[:5])

    @classmethod
    def unpack(cls, data: bytes) -> "Record":
        """Inverse of `pack`."""
        page, nbytes, fmt, flags, depth, ns, row, parent, checksum = _RECORD.unpack_from(data)
        extents: tuple[Extent, ...]
        if not flags & _SPLIT:
            extents = (Extent(page, -(-nbytes // PAGE)),)
        else:
            first, *rest = _PARTS.unpack_from(data, _RECORD.size)
            parts = [Extent(page, first), Extent(*rest[:2]), Extent(*rest[2:])]
            extents = tuple(part for part in parts if part.pages)
        return cls(
            extents,
            nbytes,
            fmt,
            flags & _EXACT != 0,
            depth,
            ns,
            row,
            parent if flags & _HAS_PARENT else None,
            checksum,
        )


class Hold(NamedTuple):
    """Pages that a living writer holds. `preparing`: being zero-filled, nobody's so far."""

    extent: Extent
    writer: bytes
    preparing: bool


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
        """Pages that hold blocks, or that writers have set aside for some."""
        return self.used + self.reserved


def _pages(extents: Sequence[Extent]) -> int:
    return sum(extent.pages for extent in extents)


class Names:
    """Small numbers for namespace digests and format ids; the same for all processes on the directory.

    Args:
        db: the database `names`.
    """

    __slots__ = ("_db", "_digests", "_formats", "_ids")

    def __init__(self, db: Any) -> None:
        self._db = db
        # Committed ids never change, so they are remembered, as many as are of use; those of a transaction under way
        # are not. Digests, not this process's indices: those change when a namespace is forgotten and comes again.
        self._ids: dict[bytes, int] = {}
        self._formats: dict[int, str] = {}
        self._digests: dict[int, bytes] = {}

    def intern(self, txn: Any, name: bytes, fresh: set[bytes]) -> int:
        """The id of a name (its kind, `n` or `f`, and its value), given to it now if it has none.

        Args:
            txn: a write transaction.
            name: see above.
            fresh: names that this transaction has given an id; they are known to it only.
        """
        known = self._ids.get(name)
        if known is not None:
            return known
        packed = txn.get(name, db=self._db)
        if packed is not None:
            number = cast(int, _ID.unpack(packed)[0])
            if name not in fresh:
                _remember(self._ids, name, number)
            return number
        kind, counter = name[:1], b"#" + name[:1]
        number = cast(int, _ID.unpack(txn.get(counter, _ID.pack(0), db=self._db))[0])
        if kind == b"f" and number > _MAX_FORMAT:
            raise FormatMismatch(f"format {name[1:]!r}: the directory knows {number} others already; use a fresh one")
        txn.put(counter, _ID.pack(number + 1), db=self._db)
        txn.put(name, _ID.pack(number), db=self._db)
        txn.put(counter + _ID.pack(number), name[1:], db=self._db)
        fresh.add(name)
        return number

    def format(self, txn: Any, number: int) -> str:
        """The format id behind a committed number."""
        known = self._formats.get(number)
        if known is None:
            try:
                known = self._formats[number] = self._value(txn, b"f", number).decode()
            except UnicodeDecodeError as error:
                raise CorruptObject(f"format {number} has no name: {error}") from error
        return known

    def namespace(self, txn: Any, number: int) -> int:
        """This process's index of the namespace behind a committed number."""
        known = self._digests.get(number)
        if known is None:
            known = self._value(txn, b"n", number)
            _remember(self._digests, number, known)
        return namespace_index(known)

    def number(self, txn: Any, name: bytes) -> int | None:
        """The id of a name, if it has one; see `intern`."""
        packed = txn.get(name, db=self._db)
        return None if packed is None else cast(int, _ID.unpack(packed)[0])

    def namespaces(self, txn: Any) -> list[int]:
        """This process's indices of all namespaces that have a committed number."""
        found = []
        with txn.cursor(self._db) as cursor:
            if cursor.set_range(b"#n\0"):  # behind the counter, `#n`
                for key, value in cursor:
                    if not key.startswith(b"#n"):
                        break
                    found.append(namespace_index(value))
        return found

    def _value(self, txn: Any, kind: bytes, number: int) -> bytes:
        found = txn.get(b"#" + kind + _ID.pack(number), db=self._db)
        if found is None:
            raise CorruptObject(f"nothing has the number {number} that a record refers to")
        return cast(bytes, found)


def _remember(known: dict[_Known, _Value], name: _Known, value: _Value) -> None:
    if len(known) >= _REMEMBERED:
        known.clear()
    known[name] = value


class Ledger:
    """One transaction's view of the index; see the module for the sums that it keeps.

    Args:
        txn: an open transaction; a reader may only look.
        dbs: the databases by name.
        names: shared by all ledgers of the process.
    """

    __slots__ = ("_blk", "_by_row", "_dbs", "_freed", "_fresh", "_names", "_preparing", "_reserved", "_resv", "_stored",
                 "_used", "free", "prepared", "total", "txn")  # fmt: skip

    def __init__(self, txn: Any, dbs: Mapping[str, Any], names: Names) -> None:
        self.txn = txn
        self.free = FreeMap(txn, dbs["free"])
        self._dbs = dbs
        self._blk = dbs["blk"]
        self._resv = dbs["resv"]
        self._names = names
        self._freed: list[Extent] = []
        self._fresh: set[bytes] = set()
        self._by_row: Any = None  # a cursor, opened once per transaction, which ends it
        packed = txn.get(b"state", db=dbs["meta"])
        self.state = self._stored = State(*_STATE.unpack(packed)) if packed else State()

    @property
    def state(self) -> State:
        """The sums, pages freed by this transaction included."""
        return State(self.total, self.prepared, self._used, self._reserved, self._preparing)

    @state.setter
    def state(self, state: State) -> None:
        self.total, self.prepared, self._used, self._reserved, self._preparing = state

    def save(self) -> None:
        """Store the sums, and the pages that became free, joined; before the commit."""
        self.free.add(self._freed)
        self._freed = []
        if self.state != self._stored:
            self._stored = self.state
            self.txn.put(b"state", _STATE.pack(*self._stored), db=self._dbs["meta"])

    # ---- bytes written

    @property
    def meter(self) -> WriteMeter:
        """What was written, beside the budget of whoever had one last; by `time.time`. Empty where nobody ever had."""
        packed = self.txn.get(b"meter", db=self._dbs["meta"])
        return WriteMeter(*_METER.unpack(packed)) if packed else WriteMeter(0.0)

    @meter.setter
    def meter(self, meter: WriteMeter) -> None:
        self.txn.put(b"meter", _METER.pack(*meter), db=self._dbs["meta"])

    # ---- records

    @property
    def blocks(self) -> int:
        """Number of records."""
        return cast(int, self.txn.stat(self._blk)["entries"])

    def get(self, key: bytes) -> Record | None:
        """The record of a key."""
        data = self.txn.get(key, None, self._blk)
        return None if data is None else Record.unpack(data)

    def find(self, keys: Sequence[bytes]) -> list[Record | None]:
        """The record of each key."""
        get, blk, unpack = self.txn.get, self._blk, Record.unpack
        return [None if (data := get(key, None, blk)) is None else unpack(data) for key in keys]

    def present(self, keys: Sequence[bytes], *, exact: bool = False) -> list[bool]:
        """Which keys have a record, an exact one if asked."""
        get, blk = self.txn.get, self._blk
        if exact:
            return [(data := get(key, None, blk)) is not None and data[_FLAGS_AT] & _EXACT != 0 for key in keys]
        return [get(key, None, blk) is not None for key in keys]

    def at_row(self, head: bytes, row: int) -> tuple[bytes, Record] | None:
        """The record that recency row `row` belongs to, found by the head of its key."""
        cursor = self._by_row
        if cursor is None:
            cursor = self._by_row = self.txn.cursor(self._blk)
        there = cursor.set_range(head)
        while there and (key := cast(bytes, cursor.key())).startswith(head):
            data = cursor.value()
            if _ID.unpack_from(data, _ROW_AT)[0] == row:
                return key, Record.unpack(data)
            there = cursor.next()
        return None

    def records(self, start: bytes = bytes(STORE_KEY_BYTES)) -> Iterator[tuple[bytes, Record]]:
        """All records from the key `start` on, in key order."""
        with self.txn.cursor(self._blk) as cursor:
            if cursor.set_range(start):
                for key, data in cursor:
                    yield key, Record.unpack(data)

    def ref(self, key: bytes, record: Record) -> BlockRef:
        """How tiers speak of a record."""
        return BlockRef(key, self._names.namespace(self.txn, record.ns), record.depth, record.parent, record.exact)

    def namespaces(self) -> list[int]:
        """All namespaces that ever had a block here."""
        return self._names.namespaces(self.txn)

    def numbers(self, namespaces: Collection[int]) -> dict[int, int]:
        """The directory's ids of those namespaces of this process that have one, and which those are."""
        found = {self._names.number(self.txn, b"n" + namespace_digest(index)): index for index in namespaces}
        return {number: index for number, index in found.items() if number is not None}

    def fmt(self, record: Record) -> str:
        """A record's format id."""
        return self._names.format(self.txn, record.fmt)

    def namespace(self, index: int) -> int:
        """The directory's id for a namespace of this process."""
        return self._names.intern(self.txn, b"n" + namespace_digest(index), self._fresh)

    def format(self, fmt: str) -> int:
        """The directory's id for a format."""
        return self._names.intern(self.txn, b"f" + fmt.encode(), self._fresh)

    def insert(self, key: bytes, record: Record) -> None:
        """Make a record of pages that were taken out of the reservations."""
        self.txn.put(key, record.pack(), db=self._blk)
        self._used += pages_for(record.nbytes)

    def drop(self, key: bytes, record: Record) -> None:
        """Delete a record; its pages are the caller's to `release` or `hold`."""
        self.txn.delete(key, db=self._blk)
        self._used -= pages_for(record.nbytes)

    def move(self, key: bytes, record: Record) -> None:
        """Store a record anew on the same pages."""
        self.txn.put(key, record.pack(), db=self._blk)

    # ---- reservations

    def take(self, least: int, most: int, writer: bytes) -> list[Extent]:
        """Turn free pages into a writer's; see `FreeMap.take`."""
        taken = self.free.take(least, most)
        self.hold(taken, writer)
        return taken

    def hold(self, extents: Iterable[Extent], writer: bytes, *, preparing: bool = False) -> None:
        """Enter pages that are nobody's as a writer's."""
        for extent in merged(extents):
            self._put_hold(extent.page, extent.pages, writer, preparing=preparing)
            self._count_hold(preparing, extent.pages)

    def unhold(self, extent: Extent, writer: bytes) -> bool:
        """Take pages out of the holds, for records or to free them; False, and no change, if some are not `writer`'s.

        They may be parts of holds, and of several.
        """
        parts: list[tuple[Hold, int, int]] = []
        page, last = extent.page, extent.end
        with self.txn.cursor(self._resv) as cursor:
            while page < last:
                hold = _hold_over(cursor, page)
                if hold is None or hold.writer != writer:
                    return False
                end = min(last, hold.extent.end)
                parts.append((hold, page, end))
                page = end
        for (held, _, preparing), page, end in parts:
            if page == held.page:
                self.txn.delete(_PAGE.pack(page), db=self._resv)
            else:
                self._put_hold(held.page, page - held.page, writer, preparing=preparing)
            if end < held.end:
                self._put_hold(end, held.end - end, writer, preparing=preparing)
            self._count_hold(preparing, page - end)
        return True

    def free_held(self, extents: Iterable[Extent], writer: bytes) -> None:
        """Free pages of a writer; those that are not its own any more stay as they are."""
        for extent in merged(extents):
            if self.unhold(extent, writer):
                self.release([extent])

    def release(self, extents: Sequence[Extent]) -> None:
        """Free pages that are neither held nor a record's any more. The next transaction can take them."""
        self._freed += extents

    def holds(self) -> list[Hold]:
        """All holds."""
        with self.txn.cursor(self._resv) as cursor:
            return [_unpack_hold(key, data) for key, data in cursor]

    def writers(self) -> set[bytes]:
        """Who holds pages."""
        return {hold.writer for hold in self.holds()}

    def _put_hold(self, page: int, pages: int, writer: bytes, *, preparing: bool) -> None:
        self.txn.put(_PAGE.pack(page), _HOLD.pack(writer, preparing, pages), db=self._resv)

    def _count_hold(self, preparing: bool, pages: int) -> None:  # noqa: FBT001
        if preparing:
            self._preparing += pages
        else:
            self._reserved += pages

    # ---- growing

    def prepare(self, start: int, pages: int, writer: bytes | None) -> bool:
        """Bring the next unprepared pages into use: free at once, or held by `writer` while it zero-fills them.

        Returns:
            False if they are not the next ones any more.
        """
        if self.prepared != start or start + pages > self.total:
            return False
        self.prepared = start + pages
        extent = Extent(start, pages)
        if writer is None:
            self.release([extent])
        else:
            self.hold([extent], writer, preparing=True)
        return True


def _unpack_hold(key: bytes, data: bytes) -> Hold:
    writer, preparing, pages = _HOLD.unpack(data)
    return Hold(Extent(_PAGE.unpack(key)[0], pages), writer, bool(preparing))


def _hold_over(cursor: Any, page: int) -> Hold | None:
    """The hold that a page belongs to."""
    packed = _PAGE.pack(page)
    exact = cursor.set_range(packed) and cursor.key() == packed
    # Behind the last key `set_range` leaves no position to go back from.
    if not exact and not cursor.prev() and not cursor.last():
        return None
    hold = _unpack_hold(cursor.key(), cursor.value())
    return hold if hold.extent.page <= page < hold.extent.end else None
