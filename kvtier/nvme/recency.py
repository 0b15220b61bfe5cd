"""Recency: one row per record in a memory-mapped array beside the index, shared by all processes.

file   [ header, 4 KiB: magic, uuid, clock, rows, capacity, hand, prior | row 0 | row 1 | ... ]
row    stamp u64, first half of the key u64, tag of the parent's key u32, the parent's row u32,
       expires u32 (Unix seconds), depth u16, ttl u16 (seconds)                                         32 bytes

Rows are written while the index's write transaction is open and before it commits, so that every record has its
row after a crash too. The reverse does not hold: a row whose record is gone is stale. Nobody trusts a row: the
index decides, and stale rows are reused when they are met. Stamps may race; a lost one costs precision only.

Whoever uses a block also renews its ancestors, so that no row is older than its descendants. The walk stops at the
first ancestor of the same age, in steps of a few thousandths of the array's span, which bounds its cost.

A priority divides a record's age, which counts in stamps, for as long as it holds. Those rows lie in a file of their
own, which nobody looks at unless a priority holds somewhere: `prior` says until when. What a record has its ancestors
have too, so that none of them seems older.
"""

import mmap
import os
import struct
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtier.hints import Hint
from kvtier.nvme.ledger import Ledger, Record
from kvtier.nvme.priorities import Aging, Priorities, counts, cover, give, holds
from kvtier.nvme.victims import NO_ROW, OLDEST, ROW, Victim, choose
from kvtier.tiers import BlockRef

__all__ = ["HEAD_BYTES", "Recency"]

HEAD_BYTES = 8
"""How much of a key a row names."""

_MAGIC = b"kvtrcy02"
_HEADER_BYTES = 4096
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("uuid", "S16"),
        ("clock", np.uint64),
        ("rows", np.uint64),
        ("capacity", np.uint64),
        ("hand", np.uint64),
        ("prior", np.uint64),
    ]
)
_CLOCK, _ROWS, _CAPACITY, _HAND, _PRIOR = range(3, 8)
"""Where the header's numbers are among its words of 8 bytes: read as such they are ints, at a tenth of the cost."""
_GROWTH = 65536
_REMEMBERED = 65536
_PROBED, _PROBED_EVERY = 4096, 16
_FINENESS = 12  # ages are told apart in about 2**12 steps
_MAX_DEPTH = 2**16 - 1
_DEAD = 2**16 - 1
"""The `ttl` of a record that its hint says will not be used again."""
_PAST = 1
"""When that expires, unless something below it is still of use."""
_MAX_TTL = _DEAD - 1
_PACKED = struct.Struct("<Q8s4sIIHH")
"""A row of `ROW`: of longer bytes, `8s` and `4s` take the head, which is what a row keeps of the keys."""
_NO_PARENT = bytes(4)


class Recency:
    """The rows of one directory.

    Args:
        path: the file; made anew if it is absent, damaged, unfinished or of another directory (see `fresh`).
        uuid: 16 bytes of the directory.
        writable: False to look only; an unsound file then counts as an empty one.

    Attributes:
        fresh: the file was made anew: all records have to be entered again with `restore`, and then it is to `finish`.

    Invariant: rows change hands only while the index's write transaction is open.
    """

    def __init__(self, path: Path, uuid: bytes, *, writable: bool = True) -> None:
        self._fd = os.open(path, (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY) | os.O_CLOEXEC, 0o644)
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._header: NDArray[np.void]
        self._numbers: memoryview
        self._rows: NDArray[np.void]
        self._priorities = Priorities(path.parent / "index" / "priorities.bin")
        self._stale: dict[int, None] = {}
        self._probed = self._takes = 0
        try:
            self.fresh = not self._sound(uuid)
            if self.fresh and writable:
                os.ftruncate(self._fd, 0)
                os.posix_fallocate(self._fd, 0, _HEADER_BYTES)
                self._priorities.clear()
            self._map(empty=self.fresh and not writable)
        except BaseException:
            os.close(self._fd)
            raise
        if self.fresh and writable:
            self._header["uuid"], self._numbers[_CLOCK] = uuid, OLDEST

    def _sound(self, uuid: bytes) -> bool:
        data = os.pread(self._fd, _HEADER.itemsize, 0)
        if len(data) < _HEADER.itemsize:
            return False
        header = np.frombuffer(data, _HEADER)[0]
        # numpy strips trailing zero bytes of S fields
        named = header["magic"] == _MAGIC and header["uuid"].ljust(16, b"\0") == uuid
        needed = _HEADER_BYTES + int(header["capacity"]) * ROW.itemsize
        return bool(named) and int(header["rows"]) <= int(header["capacity"]) and os.fstat(self._fd).st_size >= needed

    def _map(self, *, empty: bool = False) -> None:
        if empty:
            self._header, self._rows = np.zeros(1, _HEADER), np.zeros(0, ROW)
            self._numbers = self._header.view(np.uint64).data
            return
        nbytes = os.fstat(self._fd).st_size
        # The old mapping lives as long as an array on it does; both show the same memory.
        memory = mmap.mmap(self._fd, nbytes, access=self._access)
        self._header = np.frombuffer(memory, _HEADER, 1)[0:1]
        self._numbers = self._header.view(np.uint64).data
        count = (nbytes - _HEADER_BYTES) // ROW.itemsize
        self._rows = np.frombuffer(memory, ROW, count, _HEADER_BYTES)

    def _current(self) -> NDArray[np.void]:
        """The rows in use, mapped anew if another process added some."""
        used = self._numbers[_ROWS]
        if used > len(self._rows):
            self._map()
        return self._rows[:used]

    def tick(self) -> int:
        """A new instant: stamps given from now on are no older."""
        clock = self._numbers[_CLOCK] + 1
        self._numbers[_CLOCK] = clock
        return clock

    @staticmethod
    def _shift(rows: int) -> int:
        """How many low bits of a stamp do not count as age."""
        return max(0, rows.bit_length() - _FINENESS)

    # ---- use

    def renew(self, rows: Sequence[int]) -> None:
        """These records were used, all at the same time; a chain comes in its order, parents first."""
        if not rows:
            return
        current = self._current()
        chosen = np.asarray(rows, np.int64)
        chosen = chosen[chosen < len(current)]
        if len(chosen):
            self._link(current, chosen)
            now = self.tick()
            uneven = _stamp(current, chosen, now)
            for row in chosen.tolist() if uneven else chosen[:1].tolist():
                if current["ttl"][row] != _DEAD:
                    self._raise(current, row, now)
                    if uneven:
                        _outlast(current, row)
            self._prolong(current, chosen)

    def touch(self, row: int) -> int:
        """This record and its ancestors are about to be built upon; returns the instant."""
        now = self.tick()
        current = self._current()
        if row < len(current):
            current["stamp"][row] = now
            self._raise(current, row, now)
        return now

    @staticmethod
    def _link(current: NDArray[np.void], chosen: NDArray[np.int64]) -> None:
        """A parent that was stored anew lies in another row than its child remembers."""
        above, below = chosen[:-1], chosen[1:]
        wrong = current["parent_row"][below] != above
        if wrong.any():
            above, below = above[wrong], below[wrong]
            kin = current["parent"][below] == _tags(current["key"][above])
            current["parent_row"][below[kin]] = above[kin]

    def _raise(self, current: NDArray[np.void], row: int, now: int) -> None:
        """Renew the ancestors of a row that was renewed."""
        if not current["parent"][row]:
            return
        shift = self._shift(len(current))
        age, rows = max(now >> shift, 1), len(current)  # what had no reuse has no age, and is raised too
        stamp, key, parent_row, parent = (current[name] for name in ("stamp", "key", "parent_row", "parent"))
        while parent[row]:
            above = int(parent_row[row])
            if above >= rows or int(key[above]) & 0xFFFFFFFF != parent[row]:
                return
            seen = int(stamp[above])
            if not seen or seen >> shift >= age:
                return
            stamp[above] = now
            row = above

    def take(self, ledger: Ledger, count: int) -> list[int]:
        """Rows for new records. Needs the write transaction.

        Raises:
            OSError: the disk has no room for more rows.
        """
        taken: dict[int, None] = {}  # a row may be retired a second time meanwhile
        current = self._current()
        if len(self._stale) < count:
            self._probe(current)
        keys = current["key"]
        while self._stale and len(taken) < count:
            # Others may add to them meanwhile, only this thread takes some away.
            popped = [self._stale.popitem()[0] for _ in range(min(count - len(taken), len(self._stale)))]
            some = [row for row in popped if row < len(keys)]  # a damaged record can name any row
            heads = keys[some].tobytes()
            for at, row in enumerate(some):
                if ledger.at_row(heads[at * HEAD_BYTES : (at + 1) * HEAD_BYTES], row) is None:
                    taken[row] = None
        used = len(current)
        missing = count - len(taken)
        self._grow(used + missing)
        self._numbers[_ROWS] = used + missing
        return [*taken, *range(used, used + missing)]

    def _probe(self, current: NDArray[np.void]) -> None:
        """Meet some rows that another process, or an earlier one, left stale."""
        self._takes += 1
        if self._takes % _PROBED_EVERY:
            return
        start = self._probed if self._probed < len(current) else 0
        self._probed = start + _PROBED
        found = np.flatnonzero(current["stamp"][start : self._probed] == 0) + start
        self._stale.update(dict.fromkeys(found.tolist()))

    def _grow(self, rows: int) -> None:
        if rows <= self._numbers[_CAPACITY]:
            return
        capacity = rows + min(max(rows // 2, _GROWTH // 16), _GROWTH)
        # Allocated, not sparse: storing to a hole of a full disk would kill the process.
        os.posix_fallocate(self._fd, 0, _HEADER_BYTES + capacity * ROW.itemsize)
        self._map()
        self._numbers[_CAPACITY] = capacity

    def fill(self, ledger: Ledger, rows: Sequence[int], refs: Sequence[BlockRef], hints: Sequence[Hint | None]) -> None:
        """Enter records, all used now. Needs the write transaction, before its commit.

        Args:
            ledger: tells the rows of parents.
            rows: from `take`.
            refs: parents before children.
            hints: one per record. `reuse = none` makes it the oldest, whatever uses it, until it has a child that
                is not; `ttl` counts from its last use, and so does `priority_ttl`. A priority below 1 counts as 1.
        """
        if not rows:
            return
        own = {ref.key: row for ref, row in zip(refs, rows, strict=True)}
        now, seconds = self.tick(), int(time.time())
        ttls = [_ttl(hint) for hint in hints] if any(hints) else [0] * len(hints)
        packed = []
        for ref, ttl in zip(refs, ttls, strict=True):
            key, _, depth, parent, _ = ref
            above = NO_ROW if parent is None else own.get(parent, -1)
            packed.append(
                _PACKED.pack(
                    OLDEST if ttl == _DEAD else now,
                    key,
                    _NO_PARENT if parent is None else parent,
                    above if above >= 0 else _row_of(ledger, parent),
                    _PAST if ttl == _DEAD else seconds + ttl if ttl else 0,
                    depth if 0 <= depth <= _MAX_DEPTH else _clamped(depth),
                    ttl,
                )
            )
        current = self._current()
        current[np.asarray(rows, np.int64)] = np.frombuffer(b"".join(packed), ROW)
        uneven = any(ttls)
        for row, ref, ttl in zip(rows, refs, ttls, strict=True):
            if ttl != _DEAD and ref.parent is not None and (uneven or ref.parent not in own):
                self._raise(current, row, now)
                _outlast(current, row)
        held = self._held()
        if held is not None:
            held[np.asarray(rows, np.int64)] = 0  # what the rows were before had this
        if any(hints):
            self._prefer(current, list(zip(rows, hints, strict=True)))

    def hint(self, rows: Sequence[int], hints: Sequence[Hint]) -> None:
        """Take new hints for records. None goes before a live child, whatever its own hint says.

        Others may build upon the record: a ttl that is shorter than the one it has, or than none, is not taken, and a
        priority that is lower than one that holds waits until that has lapsed.
        """
        current = self._current()
        pairs = [(row, hint) for row, hint in zip(rows, hints, strict=True) if row < len(current)]
        chosen = np.array([row for row, _ in pairs], np.int64)
        asked = np.array([_ttl(hint) for _, hint in pairs], np.uint16)
        had, ends = current["ttl"][chosen], current["expires"][chosen]
        is_dead = asked == _DEAD
        ttls = np.where(is_dead | (had == _DEAD), asked, np.maximum(asked, had))
        ttls[~is_dead & ((asked == 0) | (ends == 0))] = 0
        limited = ~is_dead & (ttls > 0)
        current["ttl"][chosen] = ttls
        current["expires"][chosen] = np.where(limited, np.maximum(_expiries(ttls), ends), _expiries(ttls))
        dead, children = chosen[is_dead], []
        if len(dead):
            children = _children(current, dead)
            current["stamp"][_childless(current, dead, children)] = OLDEST
        for row in [*chosen[~is_dead].tolist(), *children]:
            _outlast(current, row)
        self._prefer(current, pairs)

    def _held(self) -> NDArray[np.void] | None:
        """The rows of priorities; None where none holds now, or the disk has no room for them."""
        if self._numbers[_PRIOR] <= time.time():
            return None
        return self._priorities.rows(self._numbers[_CAPACITY])

    def _prefer(self, current: NDArray[np.void], pairs: Sequence[tuple[int, Hint | None]]) -> None:
        """Let the priorities of these rows hold from now on, for their ancestors too."""
        chosen = [(row, hint) for row, hint in pairs if hint is not None and counts(hint)]
        held = self._priorities.rows(self._numbers[_CAPACITY]) if chosen else None
        if held is None:
            return
        now = int(time.time())
        ends = [give(held, row, hint, now) for row, hint in chosen]
        self._numbers[_PRIOR] = max(self._numbers[_PRIOR], *ends)
        for row, _ in chosen:
            self._lift(current, held, row, now)

    def _prolong(self, current: NDArray[np.void], rows: NDArray[np.int64]) -> None:
        """These rows were used: their priorities hold for longer."""
        held = self._held()
        if held is None:
            return
        now = int(time.time())
        mine = rows[holds(held[rows], now)]
        if len(mine):
            held["until"][mine] = now + held["seconds"][mine].astype(np.uint32)
            self._numbers[_PRIOR] = max(self._numbers[_PRIOR], int(held["until"][mine].max()))
            for row in mine[_raised(current, held, mine, now)][::-1].tolist():  # the deepest spares those above it
                self._lift(current, held, row, now)

    @staticmethod
    def _lift(current: NDArray[np.void], held: NDArray[np.void], row: int, now: int) -> None:
        """Let the ancestors of a row with a priority have it at least as high, for as long."""
        wanted = held[row].item()
        while current["parent"][row]:
            above = int(current["parent_row"][row])
            if above >= len(current) or int(current["key"][above]) & 0xFFFFFFFF != current["parent"][row]:
                return
            if not cover(held, above, wanted, now):
                return
            row = above

    def restore(self, ledger: Ledger, batch: Sequence[tuple[bytes, Record]]) -> None:
        """Enter records into the rows that the index gives them, in a file that was made anew."""
        last = max(record.row for _, record in batch)
        self._grow(last + 1)
        self._numbers[_ROWS] = max(self._numbers[_ROWS], last + 1)
        rows = [record.row for _, record in batch]
        refs = [ledger.ref(key, record) for key, record in batch]
        self.fill(ledger, rows, refs, [None] * len(rows))

    def finish(self) -> None:
        """All records have been entered. Without this a file counts for nothing: what has no row is never evicted."""
        self._header["magic"] = _MAGIC
        self.fresh = False

    def forget(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        """These records are being dropped. Needs the write transaction, before its commit.

        If it is never committed they are the first victims: lost, but not leaked.
        """
        if rows:
            current = self._current()
            chosen = np.asarray(rows, np.int64)
            heads = np.frombuffer(b"".join(key[:HEAD_BYTES] for key in keys), "<u8")
            inside = chosen < len(current)
            chosen, heads = chosen[inside], heads[inside]
            current["stamp"][chosen[current["key"][chosen] == heads]] = 0

    def retire(self, rows: Collection[int]) -> None:
        """The records of these rows are gone, or may be: reuse the rows once the index confirms it.

        Not all are remembered: `victims` finds the others again.
        """
        room = _REMEMBERED - len(self._stale) if rows else 0
        self._stale.update(dict.fromkeys(list(rows)[: max(0, room)]))

    # ---- victims

    def victims(self, count: int, spared: Iterable[int], before: int) -> list[Victim]:
        """About `count` rows, in the order in which they should go, of those last used before `before`.

        Rows that look stale come first and beyond the count.

        Args:
            count: how many.
            spared: rows that are leased.
            before: an instant of `touch` or `tick`.
        """
        current = self._current()
        hand = self._numbers[_HAND]
        shift = self._shift(len(current))
        held = self._held()
        aging = None if held is None else Aging(held, self._numbers[_CLOCK], int(time.time()))
        found, hand = choose(current, count, np.fromiter(spared, np.int64), before, shift, hand, aging)
        self._numbers[_HAND] = hand
        return [victim for victim in found if victim.stamp or victim.row not in self._stale]

    def unused_since(self, victim: Victim) -> bool:
        """Whether nobody renewed the row since it became a victim."""
        return int(self._current()["stamp"][victim.row]) == victim.stamp

    def head(self, row: int) -> bytes:
        """The first half of the key that the row names."""
        return bytes(self._current()["key"][row].tobytes())

    def relink(self, row: int, parent_row: int) -> None:
        """The row's parent is there after all, in this row."""
        current = self._current()
        if max(row, parent_row) < len(current):
            current["parent_row"][row] = parent_row

    def matches(self, row: int, key: bytes) -> bool:
        """Whether the row is there and names the key."""
        current = self._current()
        return row < len(current) and current["key"][row].tobytes() == key[:HEAD_BYTES]

    def strangers(self, rows: NDArray[np.uint32], heads: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Which of these rows are not there or do not name these halves of keys."""
        current = self._current()
        inside = rows < len(current)
        known = np.where(inside, rows, 0)
        same = inside & (current["key"][known] == heads) if len(current) else inside
        return np.flatnonzero(~same)

    # ---- the whole

    def nbytes(self) -> int:
        """Size of the file."""
        return os.fstat(self._fd).st_size

    def flush(self) -> None:
        """Write the rows to the disk."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Let go of the file. The mapping goes with the last array on it."""
        os.close(self._fd)
        self._priorities.close()
        del self._header, self._numbers, self._rows


def _tags(heads: NDArray[np.uint64]) -> NDArray[np.uint32]:
    return heads.astype(np.uint32)


def _ttl(hint: Hint | None) -> int:
    """Whole seconds, at least 1; 0 for no limit, or one beyond what a row can say; `_DEAD` for no reuse."""
    if hint is not None and hint.reuse == "none":
        return _DEAD
    if hint is None or hint.ttl is None or hint.ttl > _MAX_TTL:
        return 0
    return max(1, int(hint.ttl))


def _expiries(ttls: NDArray[np.uint16]) -> NDArray[np.uint32]:
    ends = np.where(ttls == _DEAD, _PAST, int(time.time()) + ttls.astype(np.uint32))
    return np.where(ttls > 0, ends, 0).astype(np.uint32)


def _stamp(current: NDArray[np.void], rows: NDArray[np.int64], now: int) -> bool:
    """Used now, but for what is dead; what has a ttl lives on from here. False if no row is one of these."""
    ttls = current["ttl"][rows]
    if not ttls.any():
        current["stamp"][rows] = now
        return False
    current["stamp"][rows[ttls != _DEAD]] = now
    limited = (ttls > 0) & (ttls < _DEAD)
    rows, ends = rows[limited], _expiries(ttls[limited])
    current["expires"][rows] = np.maximum(current["expires"][rows], ends)
    return True


def _raised(current: NDArray[np.void], held: NDArray[np.void], rows: NDArray[np.int64], now: int) -> NDArray[np.bool_]:
    """Which of these rows, whose priorities hold, seem to have a higher one than their parents."""
    above = current["parent_row"][rows].astype(np.int64)
    mine, theirs = held[rows], held[np.minimum(above, len(held) - 1)]
    lower = ~holds(theirs, now)
    for name in ("until", "seconds", "weight"):
        lower |= theirs[name] < mine[name]
    return lower & (above < len(current))


def _clamped(depth: int) -> int:
    return min(max(depth, 0), _MAX_DEPTH)


def _row_of(ledger: Ledger, parent: bytes | None) -> int:
    record = None if parent is None else ledger.get(parent)
    return NO_ROW if record is None else record.row


def _children(current: NDArray[np.void], rows: NDArray[np.int64]) -> list[int]:
    """Live rows right below these."""
    return np.flatnonzero(np.isin(current["parent_row"], rows) & (current["stamp"] != 0)).tolist()


def _outlast(current: NDArray[np.void], row: int) -> None:
    """Let the ancestors of a row be of use for as long as it is: now, and after each use.

    What is above one that never expires does not expire either.
    """
    key, parent, parent_row = current["key"], current["parent"], current["parent_row"]
    ttl, expires, stamp = current["ttl"], current["expires"], current["stamp"]
    least, until = int(ttl[row]), int(expires[row])
    if least == _DEAD:
        least = 1  # what is below it has told its ancestors
    while parent[row]:
        above = int(parent_row[row])
        if (
            above >= len(current)
            or int(key[above]) & 0xFFFFFFFF != parent[row]
            or not (stamp[above] and expires[above])
        ):
            return
        mine, ends = int(ttl[above]), int(expires[above])
        until = max(until, ends) if until else 0
        if mine == _DEAD:
            own = _DEAD
        else:
            own = least = max(least, mine) if until else 0
        if (own, until) == (mine, ends):
            return
        ttl[above], expires[above] = own, until
        row = above


def _childless(current: NDArray[np.void], rows: NDArray[np.int64], children: Sequence[int]) -> NDArray[np.int64]:
    """Those of the rows that have no live descendant but among themselves. `children`: of these rows, and of others."""
    parent_rows = current["parent_row"]
    dead = set(rows.tolist())
    alive = [int(parent_rows[child]) for child in children if child not in dead]
    while alive:
        row = alive.pop()
        if row in dead:
            dead.remove(row)
            alive.append(int(parent_rows[row]))
    return np.array(sorted(dead), np.int64)
