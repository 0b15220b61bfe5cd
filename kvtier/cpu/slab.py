"""HostSlab: size classes carved from one region, so that memory serves whatever block size comes."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

import numpy as np

from kvtier.cpu.region import PAGE, MemoryRegion, round_up
from kvtier.errors import CapacityError, LeaseError, TierError

__all__ = ["HostSlab"]

_CHUNK_BYTES = 8 << 20
_CHUNKS = 32  # a small slab still has room for about this many chunks, so that several sizes can share it


class _Chunk:
    """A run of pages cut into equal slots: a stack of freed ones, and a mark above which none was used yet.

    `live`: one byte per slot, 1 while it is allocated.
    """

    __slots__ = ("free", "live", "mark", "nbytes", "slot", "start", "used")

    def __init__(self, start: int, nbytes: int, slot: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.slot = slot
        self.mark = start
        self.used = 0
        self.free: list[int] = []
        self.live = bytearray(nbytes // slot)

    def take(self, most: int) -> list[int]:
        """Up to `most` slots, those that were used before first."""
        taken = self.free[-most:]
        del self.free[-most:]
        fresh = min(most - len(taken), (self.start + self.nbytes - self.mark) // self.slot)
        taken += range(self.mark, self.mark + fresh * self.slot, self.slot)
        self.mark += fresh * self.slot
        self.used += len(taken)
        for offset in taken:
            self.live[(offset - self.start) // self.slot] = 1
        return taken

    def give_back(self, offset: int) -> bool:
        """Free a slot; False if it is not allocated."""
        at, rest = divmod(offset - self.start, self.slot)
        if rest or at >= len(self.live) or not self.live[at]:
            return False
        self.live[at] = 0
        self.used -= 1
        self.free.append(offset)
        return True

    def free_ranges(self) -> list[tuple[int, int]]:
        """Of slots that are not allocated, [start, stop), in order."""
        taken = np.frombuffer(self.live, np.uint8).astype(bool)
        edges = np.flatnonzero(np.diff(np.concatenate(([True], taken, [True])).astype(np.int8)))
        spans = (edges * self.slot + self.start).reshape(-1, 2)
        return [(int(first), int(stop)) for first, stop in spans]

    @property
    def full(self) -> bool:
        return not self.free and self.mark == self.start + self.nbytes


class HostSlab:
    """Allocates 4 KiB aligned slots. Not thread-safe: its tier's lock covers it.

        slab   [ chunk of class 64 KiB | chunk of class 1 MiB | free run ............ | chunk ... ]
        chunk  [ slot | slot | slot ]  all of one class, a class being a size rounded up to pages

    Chunks are cut from free runs on demand; a chunk that is wholly free joins its neighbours again. A single size
    therefore gets `nbytes // size` slots, and an empty slab is one run, whatever was in it before.

    Args:
        nbytes: rounded down to pages.
        name: shows in errors and in /proc/<pid>/maps.
        limit: address space, so that `resize` can go as far; `nbytes` by default.

    Raises:
        CapacityError: less than one page, more than this machine has, or more than the limit.
        TierUnavailable: the kernel refuses the memory.
    """

    def __init__(self, nbytes: int, *, name: str = "slab", limit: int | None = None) -> None:
        self.name = name
        most = nbytes if limit is None else limit
        for size in (nbytes, most):
            if isinstance(size, bool) or not isinstance(size, int) or size < PAGE:
                raise CapacityError(f"{name}: capacity of {size!r} bytes: expected an integer of at least {PAGE}")
        if nbytes > most:
            raise CapacityError(f"{name}: capacity of {nbytes} bytes above its limit of {most}: raise the limit")
        self.region = MemoryRegion(most - most % PAGE, name=name, writable=False)
        self.nbytes = self.region.nbytes
        self.capacity = nbytes - nbytes % PAGE
        self.used_bytes = 0
        self._target = min(_CHUNK_BYTES, self.nbytes // _CHUNKS)
        self._starts = [0]  # of free runs, sorted
        self._runs = {0: self.nbytes}
        self._open: dict[int, dict[_Chunk, None]] = {}  # class -> chunks with a free slot, oldest first
        # Chunks only: a slot that is allocated costs one byte, in its chunk.
        self._cut: list[int] = []  # where they start, sorted
        self._chunks: dict[int, _Chunk] = {}

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a slot of at least `nbytes`, or None when neither its class nor the free runs have one."""
        offsets = self.allocate_many(nbytes, 1)
        return offsets[0] if offsets else None

    def allocate_many(self, nbytes: int, count: int) -> list[int]:
        """Offsets of as many slots of at least `nbytes` as there are, `count` at most."""
        slot = round_up(nbytes)
        count = min(count, (self.capacity - self.used_bytes) // slot)
        chunks = self._open.setdefault(slot, {})
        offsets: list[int] = []
        while len(offsets) < count:
            chunk = next(iter(chunks)) if chunks else self._carve(slot)
            if chunk is None:
                break
            taken = chunk.take(count - len(offsets))
            if chunk.full:
                chunks.pop(chunk, None)
            else:
                chunks[chunk] = None
            offsets += taken
        self.used_bytes += slot * len(offsets)
        return offsets

    def free(self, offset: int) -> None:
        """Give a slot back.

        Raises:
            LeaseError: nothing is allocated there.
        """
        at = bisect_right(self._cut, offset) - 1
        chunk = self._chunks[self._cut[at]] if at >= 0 else None
        if chunk is None or not chunk.give_back(offset):
            raise LeaseError(f"slab offset {offset} is not allocated: it was freed before or never given out")
        self.used_bytes -= chunk.slot
        chunks = self._open[chunk.slot]
        if chunk.used:
            chunks[chunk] = None
            return
        chunks.pop(chunk, None)
        del self._chunks[self._cut.pop(at)]
        self._join(chunk.start, chunk.nbytes)

    @property
    def over(self) -> bool:
        """Whether more is used than `resize` allows by now."""
        return self.used_bytes > self.capacity

    def resize(self, nbytes: int) -> None:
        """Allow so many bytes from now on, in whole pages; what is used beyond that stays until it is freed.

        Raises:
            CapacityError: less than one page, or more than was reserved.
        """
        if not PAGE <= nbytes < self.nbytes + PAGE:
            raise CapacityError(
                f"{self.name}: capacity of {nbytes} bytes: expected {PAGE} to {self.nbytes}, as reserved at start"
            )
        self.capacity = nbytes - nbytes % PAGE

    def discard(self, start: int, most: int) -> int | None:
        """Give the first free range from an offset on back to the system, `most` bytes of it at most.

        Returns:
            Where to go on; None: that was all, or the system takes nothing.
        """
        for first, stop in self._free_ranges(start):
            end = min(stop, first + most)
            return end if self.region.discard(first, end - first) else None
        return None

    def _free_ranges(self, start: int) -> Iterator[tuple[int, int]]:
        """Free ranges that begin at an offset, or behind it, in order; touching ones are not joined."""
        for piece in sorted([*self._chunks, *self._starts]):
            chunk = self._chunks.get(piece)
            if chunk is None:
                ranges = [(piece, piece + self._runs[piece])]
            elif chunk.start + chunk.nbytes <= start:
                continue
            else:
                ranges = chunk.free_ranges()
            yield from ((max(first, start), stop) for first, stop in ranges if stop > start)

    def _carve(self, slot: int) -> _Chunk | None:
        if not self._starts:
            return None
        wanted = max(slot, self._target - self._target % slot)
        start = next((start for start in self._starts if self._runs[start] >= wanted), None)
        if start is None:
            start = max(self._starts, key=self._runs.__getitem__, default=None)
        if start is None or self._runs[start] < slot:
            return None
        length = self._runs.pop(start)
        nbytes = min(wanted, length - length % slot)
        self._starts.remove(start)
        if length > nbytes:
            self._add_run(start + nbytes, length - nbytes)
        self.region.expect(start, nbytes)
        insort(self._cut, start)
        chunk = self._chunks[start] = _Chunk(start, nbytes, slot)
        return chunk

    def _join(self, start: int, nbytes: int) -> None:
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + nbytes:
            nbytes += self._runs.pop(self._starts.pop(at))
        if at and self._starts[at - 1] + self._runs[self._starts[at - 1]] == start:
            self._runs[self._starts[at - 1]] += nbytes
        else:
            self._add_run(start, nbytes)

    def _add_run(self, start: int, nbytes: int) -> None:
        insort(self._starts, start)
        self._runs[start] = nbytes

    def check(self) -> None:
        """Verify that chunks and free runs tile the slab and that the counts are right.

        Raises:
            TierError: they do not.
        """
        pieces = sorted([(chunk.start, chunk.nbytes) for chunk in self._chunks.values()] + list(self._runs.items()))
        end = 0
        for start, nbytes in pieces:
            if start != end:
                raise TierError(f"slab: a piece at {start} follows one that ends at {end}")
            end += nbytes
        used = sum(chunk.slot * sum(chunk.live) for chunk in self._chunks.values())
        wrong = any(chunk.used != sum(chunk.live) or not chunk.used for chunk in self._chunks.values())
        if (end, used, sorted(self._chunks)) != (self.nbytes, self.used_bytes, self._cut) or wrong:
            raise TierError(f"slab: {end} of {self.nbytes} bytes tiled, {used} of {self.used_bytes} bytes in use")

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self.region.close()
