"""Recency: one row per record in a memory-mapped array beside the index, shared by all processes.

file   [ header, 4 KiB: magic, uuid, clock, rows | row 0 | row 1 | ... ]
row    stamp uint64, key 2 x uint64, first half of the parent's key uint64, depth int32, spare     40 bytes

Rows are written while the index's write transaction is open and before it commits, so that every record has its
row after a crash too. The reverse does not hold: a row whose record is gone is stale. Nobody trusts a row: the
index decides, and stale rows are reused when they are met. Stamps may race; a lost one costs precision only.

Victims, oldest first and deepest first among equals, are found with numpy over the whole array, a batch of some
thousandths of it at a time. There, a block counts as recent as its most recent descendant, and as oldest of all
if an ancestor is gone: nobody can reach it any more.
"""

import mmap
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.nvme.ledger import Ledger
from kvtier.tiers import BlockRef

__all__ = ["Recency", "Victim"]

_MAGIC = b"kvtrcy01"
_HEADER_BYTES = 4096
_HEADER = np.dtype([("magic", "S8"), ("uuid", "S16"), ("clock", "<u8"), ("rows", "<u8"), ("capacity", "<u8")])
_ROW = np.dtype([("stamp", "<u8"), ("key", "<u8", 2), ("parent", "<u8"), ("depth", "<i4"), ("spare", "<u4")])
_GROWTH = 4096
_STALE_AT_ONCE = 4096
_NEVER = np.iinfo(np.uint64).max


class Victim(NamedTuple):
    """A row that may go: `stamp` tells whether it was used since."""

    row: int
    key: bytes
    stamp: int


class Recency:
    """The rows of one directory.

    Args:
        path: the file; made anew if it is absent, damaged or of another directory (see `fresh`).
        uuid: 16 bytes of the directory.

    Attributes:
        fresh: the file was made anew: all records have to be entered again with `restore`.

    Invariant: rows change hands only while the index's write transaction is open.
    """

    def __init__(self, path: Path, uuid: bytes) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._stale: dict[int, None] = {}
        try:
            self.fresh = not self._sound(uuid)
            if self.fresh:
                os.ftruncate(self._fd, 0)
                os.posix_fallocate(self._fd, 0, _HEADER_BYTES)
            self._map()
        except BaseException:
            os.close(self._fd)
            raise
        if self.fresh:
            self._header["magic"], self._header["uuid"] = _MAGIC, uuid

    def _sound(self, uuid: bytes) -> bool:
        data = os.pread(self._fd, _HEADER.itemsize, 0)
        if len(data) < _HEADER.itemsize:
            return False
        header = np.frombuffer(data, _HEADER)[0]
        # numpy strips trailing zero bytes of S fields
        named = header["magic"] == _MAGIC and header["uuid"].ljust(16, b"\0") == uuid
        needed = _HEADER_BYTES + int(header["capacity"]) * _ROW.itemsize
        return bool(named) and int(header["rows"]) <= int(header["capacity"]) and os.fstat(self._fd).st_size >= needed

    def _map(self) -> None:
        nbytes = os.fstat(self._fd).st_size
        # The old mapping lives as long as an array on it does; both show the same memory.
        memory = mmap.mmap(self._fd, nbytes)
        self._header: NDArray[np.void] = np.frombuffer(memory, _HEADER, 1)[0:1]
        count = (nbytes - _HEADER_BYTES) // _ROW.itemsize
        self._rows: NDArray[np.void] = np.frombuffer(memory, _ROW, count, _HEADER_BYTES)

    def _current(self) -> NDArray[np.void]:
        """The rows in use, mapped anew if another process added some."""
        used = int(self._header["rows"][0])
        if used > len(self._rows):
            self._map()
        return self._rows[:used]

    def _tick(self) -> int:
        clock = int(self._header["clock"][0]) + 1
        self._header["clock"] = clock
        return clock

    # ---- use

    def renew(self, rows: Sequence[int]) -> None:
        """These records were used, all at the same time."""
        if rows:
            current = self._current()
            chosen = np.asarray(rows, np.int64)
            current["stamp"][chosen[chosen < len(current)]] = self._tick()

    def take(self, ledger: Ledger, count: int) -> list[int]:
        """Rows for new records. Needs the write transaction.

        Raises:
            OSError: the disk has no room for more rows.
        """
        taken: dict[int, None] = {}  # a row may be retired a second time meanwhile
        current = self._current()
        while self._stale and len(taken) < count:
            row, _ = self._stale.popitem()
            record = ledger.get(current["key"][row].tobytes())
            if record is None or record.row != row:
                taken[row] = None
        used = len(current)
        missing = count - len(taken)
        self._grow(used + missing)
        self._header["rows"] = used + missing
        return [*taken, *range(used, used + missing)]

    def _grow(self, rows: int) -> None:
        if rows <= int(self._header["capacity"][0]):
            return
        capacity = max(rows, len(self._rows) * 3 // 2) + _GROWTH
        # Allocated, not sparse: storing to a hole of a full disk would kill the process.
        os.posix_fallocate(self._fd, 0, _HEADER_BYTES + capacity * _ROW.itemsize)
        self._map()
        self._header["capacity"] = capacity

    def fill(self, rows: Sequence[int], refs: Sequence[BlockRef]) -> None:
        """Enter records, all used now. Needs the write transaction, before its commit."""
        if not rows:
            return
        current, chosen = self._current(), np.asarray(rows, np.int64)
        current["key"][chosen] = np.frombuffer(b"".join(ref.key for ref in refs), "<u8").reshape(-1, 2)
        parents = b"".join(ref.parent[:8] if ref.parent is not None else bytes(8) for ref in refs)
        current["parent"][chosen] = np.frombuffer(parents, "<u8")
        current["depth"][chosen] = [ref.depth for ref in refs]
        current["stamp"][chosen] = self._tick()

    def restore(self, row: int, ref: BlockRef) -> None:
        """Enter a record into the row that the index gives it, in a file that was made anew."""
        self._grow(row + 1)
        self._header["rows"] = max(int(self._header["rows"][0]), row + 1)
        self.fill([row], [ref])

    def forget(self, rows: Collection[int]) -> None:
        """These records are being dropped. Needs the write transaction, before its commit.

        If it is never committed they are the first victims: lost, but not leaked.
        """
        if rows:
            self._current()["stamp"][list(rows)] = 0

    def retire(self, rows: Collection[int]) -> None:
        """The records of these rows are gone, or may be: reuse the rows once the index confirms it."""
        self._stale.update(dict.fromkeys(rows))

    # ---- victims

    def victims(self, count: int, spared: Collection[int]) -> list[Victim]:
        """About `count` rows, in the order in which they should go, of those not in `spared`.

        Rows that look stale come first and beyond the count.
        """
        known = np.array(list(self._stale), np.int64)
        current = self._current().copy()  # after `known`, whose rows it then has
        stamps = _effective(current)
        # One that has a stamp was reused by another process.
        stamps[known[current["stamp"][known] == 0]] = _NEVER
        stamps[np.fromiter(spared, np.int64)] = _NEVER
        stale = np.flatnonzero((current["stamp"] == 0) & (stamps == 0))[:_STALE_AT_ONCE]
        stamps[stale] = _NEVER
        oldest = _oldest(stamps, current["depth"], count)
        return [
            Victim(int(row), current["key"][row].tobytes(), int(current["stamp"][row]))
            for row in np.concatenate([stale, oldest])
        ]

    def unused_since(self, victim: Victim) -> bool:
        """Whether nobody renewed the row since it became a victim."""
        return int(self._current()["stamp"][victim.row]) == victim.stamp

    def matches(self, row: int, key: bytes) -> bool:
        """Whether the row is there and names the key."""
        current = self._current()
        return row < len(current) and current["key"][row].tobytes() == key

    # ---- the whole

    def flush(self) -> None:
        """Write the rows to the disk."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Let go of the file. The mapping goes with the last array on it."""
        os.close(self._fd)
        del self._header, self._rows


def _effective(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """Stamps, raised to those of the most recent descendant, and 0 below an absent ancestor."""
    stamps = rows["stamp"].astype(np.uint64)
    alive = np.flatnonzero(stamps)
    if not len(alive):
        return stamps
    keys = rows["key"][alive, 0]
    order = np.argsort(keys)
    wanted = rows["parent"][alive]
    at = np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)
    parent = alive[order[at]]
    has_parent = (rows["key"][parent, 0] == wanted) & (wanted != 0)
    children, parents = alive[has_parent], parent[has_parent]
    if np.any(stamps[children] > stamps[parents]):
        for child, above in _levels(rows["depth"], children, parents, deepest_first=True):
            np.maximum.at(stamps, above, stamps[child])
    orphans = alive[~has_parent & (wanted != 0)]
    if len(orphans):
        stamps[orphans] = 0
        for child, above in _levels(rows["depth"], children, parents, deepest_first=False):
            stamps[child[stamps[above] == 0]] = 0
    return stamps


def _levels(
    depth: NDArray[np.int32], children: NDArray[np.int64], parents: NDArray[np.int64], *, deepest_first: bool
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Children and their parents, grouped by the children's depth."""
    order = np.argsort(depth[children], kind="stable")
    levels = depth[children][order]
    cuts = np.flatnonzero(np.diff(levels)) + 1
    groups = list(zip(np.split(children[order], cuts), np.split(parents[order], cuts), strict=True))
    return groups[::-1] if deepest_first else groups


def _oldest(stamps: NDArray[np.uint64], depth: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """The `count` oldest rows, deepest first among equals; rows with the highest possible stamp never."""
    candidates = np.flatnonzero(stamps != _NEVER)
    if len(candidates) > count:
        bound = np.partition(stamps[candidates], count - 1)[count - 1]
        candidates = candidates[stamps[candidates] <= bound]
    order = np.lexsort((-depth[candidates], stamps[candidates]))
    return candidates[order][:count]
