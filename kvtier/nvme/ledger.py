"""The ledger: what the index says inside one transaction, and the moves that keep its sums right.

total = unprepared + free + preparing + reserved + used         pages

used        extents of records                                  database `blk`
reserved    a writer's: its arena, what it writes, and what     database `resv`
            was removed while it is still leased
preparing   being zero-filled for their first use               database `resv`
free        ready for use                                       database `free`
unprepared  never used so far: all pages from `prepared` on     a number in `meta`

Every value has a seal (`kvtier.nvme.seals`). A record whose seal is broken counts as absent wherever it is met, and is
dropped by the next transaction that may. Its pages are nobody's until the index is rebuilt or repaired: what it says of
them may be another's.
"""

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from kvtier.errors import CorruptObject
from kvtier.keys import STORE_KEY_BYTES, namespace_digest, namespace_index
from kvtier.nvme.extents import PAGE, Extent, FreeMap, merged, pages_for
from kvtier.nvme.names import FORMAT, NAMESPACE, Names, names_in
from kvtier.nvme.seals import seal, unseal, unsealed
from kvtier.policies import WriteMeter
from kvtier.tiers import BlockRef

__all__ = ["DATABASES", "Hold", "Ledger", "Record", "State", "record_in"]

DATABASES = ("blk", "free", "resv", "names", "meta")
"""The records first."""

# page, nbytes, format, flags, depth, namespace, row, parent, checksum: 54 bytes
_RECORD = struct.Struct("<I I B B i I I 16s 16s")
# Only a record of several extents says how long each is: pages of the first, then the others.
_PARTS = struct.Struct("<5I")
_RECORD_SIZES = (_RECORD.size, _RECORD.size + _PARTS.size)
_HOLD = struct.Struct("<16s B I")
_STATE = struct.Struct("<5Q")
_METER = struct.Struct("<3d")
_PAGE = struct.Struct(">I")
_NUMBER = struct.Struct("<I")
_SUMS, _METERED, _LOST = b"state", b"meter", b"dropped"
_FLAGS_AT, _NS_AT, _ROW_AT = 9, 14, 18
_EXACT, _HAS_PARENT, _SPLIT = 1, 2, 4
_NO_PARENT = bytes(STORE_KEY_BYTES)


class Record(NamedTuple):
    """What the index knows of one block. `fmt`, `ns`: numbers in `names`; `row`: its place in the recency array."""

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

    @property
    def names(self) -> tuple[tuple[bytes, int], tuple[bytes, int]]:
        """What it refers to in `names`, by kind and number."""
        return (NAMESPACE, self.ns), (FORMAT, self.fmt)

    def pack(self) -> bytes:
        """Its 54 bytes in the index before the seal, 74 if it lies in several extents."""
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


def record_in(key: bytes, value: bytes) -> Record | None:
    """The record that an entry of the index is; None if it is none."""
    return Record.unpack(value) if len(key) == STORE_KEY_BYTES and len(value) in _RECORD_SIZES else None


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


class Ledger:
    """One transaction's view of the index; see the module for the sums that it keeps.

    Args:
        txn: an open transaction; a reader may only look.
        dbs: the databases by name.
        names: shared by all ledgers of the process.

    Attributes:
        broken: what lies under the keys of records that were met and whose seals are broken.

    Raises:
        CorruptObject: anywhere, an entry was altered that there is no going on without.
    """

    __slots__ = ("_blk", "_by_row", "_dbs", "_freed", "_fresh", "_names", "_preparing", "_reserved", "_resv", "_stored",
                 "_used", "broken", "free", "prepared", "total", "txn")  # fmt: skip

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
        self.broken: dict[bytes, bytes] = {}
        packed = self._meta(_SUMS)
        if packed is None and txn.stat(dbs["meta"])["entries"]:
            raise CorruptObject("its sums were altered")
        self._stored = State(*_STATE.unpack(packed)) if packed else None
        self.state = self._stored or State()

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
        state = self.state
        if state != self._stored:
            self._stored = state
            self._put_meta(_SUMS, _STATE.pack(*state))

    def _put_meta(self, key: bytes, value: bytes) -> None:
        self.txn.put(key, seal(key, value), db=self._dbs["meta"])

    def _meta(self, key: bytes) -> bytes | None:
        data = self.txn.get(key, db=self._dbs["meta"])
        return None if data is None else unseal(key, data)

    # ---- bytes written

    @property
    def meter(self) -> WriteMeter:
        """What was written, beside the budget of whoever had one last; by `time.time`.

        Empty where nobody ever had, and where it was altered.
        """
        packed = self._meta(_METERED)
        return WriteMeter(*_METER.unpack(packed)) if packed else WriteMeter(0.0)

    @meter.setter
    def meter(self, meter: WriteMeter) -> None:
        self._put_meta(_METERED, _METER.pack(*meter))

    # ---- records

    @property
    def blocks(self) -> int:
        """Number of records."""
        return cast(int, self.txn.stat(self._blk)["entries"])

    def _record(self, key: bytes, data: bytes) -> Record | None:
        packed = unseal(key, data)
        if packed is None:
            self.broken[key] = data
            return None
        return Record.unpack(packed)

    def get(self, key: bytes) -> Record | None:
        """The record of a key."""
        data = self.txn.get(key, None, self._blk)
        return None if data is None else self._record(key, data)

    def find(self, keys: Sequence[bytes]) -> list[Record | None]:
        """The record of each key."""
        get, blk, record = self.txn.get, self._blk, self._record
        return [None if (data := get(key, None, blk)) is None else record(key, data) for key in keys]

    def present(self, keys: Sequence[bytes], *, exact: bool = False) -> list[bool]:
        """Which keys have a record, an exact one if asked; not whether its seal is whole."""
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
            if _NUMBER.unpack_from(data, _ROW_AT)[0] == row:
                record = self._record(key, data)
                return None if record is None else (key, record)
            there = cursor.next()
        return None

    def records(self, start: bytes = bytes(STORE_KEY_BYTES)) -> Iterator[tuple[bytes, Record]]:
        """All records from the key `start` on, in key order."""
        with self.txn.cursor(self._blk) as cursor:
            if cursor.set_range(start):
                for key, data in cursor:
                    record = self._record(key, data)
                    # An altered key misleads the search; who goes on behind the last one must come to an end.
                    if record is not None and key >= start:
                        yield key, record

    def drop_broken(self) -> list[tuple[int | None, bytes]]:
        """Delete the records that were met with broken seals, unless they were stored anew.

        Returns:
            The key of each, and the namespace that it seems to be of, None if there is no such one.
        """
        digests = self._names.digests(self.txn) if self.broken else {}
        found: list[tuple[int | None, bytes]] = []
        for key, data in self.broken.items():
            digest = digests.get(_NUMBER.unpack_from(data, _NS_AT)[0])
            found.append((None if digest is None else namespace_index(digest), key))
            now = self.txn.get(key, db=self._blk)
            if now is not None and unseal(key, now) is None:
                self.txn.delete(key, db=self._blk)
        if found:
            self.lost += len(found)
            self.broken.clear()
        return found

    @property
    def lost(self) -> int:
        """Records that were dropped because their seals were broken, whose pages nobody has found so far."""
        packed = self._meta(_LOST)
        return cast(int, _NUMBER.unpack(packed)[0]) if packed else 0

    @lost.setter
    def lost(self, records: int) -> None:
        self._put_meta(_LOST, _NUMBER.pack(records))

    def require_whole(self) -> None:
        """Find out whether the index has to be rebuilt.

        Raises:
            CorruptObject: entries beside the records were altered, or records were dropped because they were.
        """
        if self.lost:
            raise CorruptObject(f"{self.lost} altered records were dropped, and nobody knows their pages")
        self.require_sealed()

    def require_sealed(self) -> None:
        """Find out whether all entries beside the records are as they were stored.

        Raises:
            CorruptObject: one was altered.
        """
        for name in DATABASES[1:]:
            with self.txn.cursor(self._dbs[name]) as cursor:
                for key, data in cursor:
                    unsealed(key, data)

    def ref(self, key: bytes, record: Record) -> BlockRef:
        """How tiers speak of a record."""
        return BlockRef(key, self._names.namespace(self.txn, record.ns), record.depth, record.parent, record.exact)

    def namespaces(self) -> list[int]:
        """All namespaces that ever had a block here."""
        return [namespace_index(digest) for digest in self._names.digests(self.txn).values()]

    def numbers(self, namespaces: Collection[int]) -> dict[int, int]:
        """The directory's numbers of those namespaces of this process that have one, and which those are."""
        wanted = {namespace_digest(index): index for index in namespaces}
        digests = self._names.digests(self.txn)
        return {number: wanted[digest] for number, digest in digests.items() if digest in wanted}

    def fmt(self, record: Record) -> str:
        """A record's format id."""
        return self._names.format(self.txn, record.fmt)

    def namespace(self, index: int) -> int:
        """The directory's number for a namespace of this process."""
        return self._names.intern(self.txn, NAMESPACE, namespace_digest(index), self._fresh)

    def format(self, fmt: str) -> int:
        """The directory's number for a format."""
        return self._names.intern(self.txn, FORMAT, fmt.encode(), self._fresh)

    def adopt(self, entries: Mapping[bytes, bytes]) -> set[tuple[bytes, int]]:
        """Take names, sums and what was written from entries of another index.

        Returns:
            Kind and number of each name.
        """
        names = names_in(entries.items())
        for (kind, number), value in names.items():
            self._names.put(self.txn, kind, number, value)
        if _METERED in entries:
            self._put_meta(_METERED, entries[_METERED])
        if _SUMS in entries:
            self.total, self.prepared, *_ = _STATE.unpack(entries[_SUMS])
        return set(names)

    def insert(self, key: bytes, record: Record) -> None:
        """Make a record of pages that were taken out of the reservations."""
        self.move(key, record)
        self._used += pages_for(record.nbytes)

    def drop(self, key: bytes, record: Record) -> None:
        """Delete a record; its pages are the caller's to `release` or `hold`."""
        self.txn.delete(key, db=self._blk)
        self._used -= pages_for(record.nbytes)

    def move(self, key: bytes, record: Record) -> None:
        """Store a record anew on the same pages."""
        self.txn.put(key, seal(key, record.pack()), db=self._blk)

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
        key = _PAGE.pack(page)
        self.txn.put(key, seal(key, _HOLD.pack(writer, preparing, pages)), db=self._resv)

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
    writer, preparing, pages = _HOLD.unpack(unsealed(key, data))
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
