"""A lease: one owner's hold on a run of blocks, each part in one tier."""

import threading
from collections.abc import Callable, Sequence

from kvtier.tiers import BlockRef, Handle, Owner, Tier

__all__ = ["Lease"]


class Lease:
    """A hold on a run of blocks. Made by `TieredStore.acquire`, ended by `TieredStore.release`. Thread-safe.

    `blocks` lists (tier, handle) of each part, block-major: `blocks[b * parts + p]`. It only ever grows, changes a
    handle for one in a faster tier, and empties.

    Args:
        owner: who holds it.
        parts: per block.
        exact: takes exact blocks only.
        checked: of host, takes blocks whose bytes were verified only; else whoever reads them there verifies them.
        order: tier names, fastest first.

    Attributes:
        deleted: keys that were deleted while they were leased: they may be read where they lie, and go nowhere.
    """

    __slots__ = ("_closed", "_lock", "_order", "_removals", "blocks", "checked", "deleted", "exact", "owner", "parts")

    def __init__(
        self, owner: Owner, parts: int = 1, *, exact: bool = True, checked: bool = True, order: Sequence[str] = ()
    ) -> None:
        self.owner = owner
        self.parts = parts
        self.exact = exact
        self.checked = checked
        self.blocks: list[tuple[Tier, Handle]] = []
        self.deleted: frozenset[bytes] = frozenset()
        self._order = tuple(order)
        self._closed = False
        self._removals: list[Callable[[BlockRef], bool]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Blocks, of which every part is held."""
        return len(self.blocks) // self.parts

    def part(self, start: int, stop: int) -> list[tuple[Tier, Handle]]:
        """Tier and handle of every part of blocks [start, stop); shorter where the lease is."""
        return self.blocks[start * self.parts : stop * self.parts]

    def tiers(self) -> list[str]:
        """Where each block lies now: the slowest tier that holds one of its parts."""
        names = [tier.name for tier, _ in self.blocks]
        if self.parts == 1:
            return names
        whole = range(0, len(self) * self.parts, self.parts)
        return [max(names[at : at + self.parts], key=self._order.index) for at in whole]

    def is_exact(self, start: int, stop: int) -> bool:
        """Whether blocks [start, stop) are exact in every part."""
        return all(handle.ref.exact for _, handle in self.part(start, stop))

    def nbytes(self, start: int, stop: int) -> int:
        """Stored bytes of blocks [start, stop)."""
        return sum(handle.nbytes for _, handle in self.part(start, stop))

    # ---- for the store

    def extend(self, tier: Tier, handles: Sequence[Handle]) -> bool:
        """Append what was leased for it; False: it grows no more, and the caller keeps the handles."""
        with self._lock:
            if self._closed:
                return False
            self.blocks += [(tier, handle) for handle in handles]
            for is_gone in self._removals:
                self._note(is_gone, handles)
            return True

    def close(self) -> list[tuple[Tier, Handle]]:
        """Grow no more; returns what was left over of an incomplete last block, which is not held any more."""
        with self._lock:
            self._closed = True
            whole = len(self) * self.parts
            rest = self.blocks[whole:]
            del self.blocks[whole:]
            return rest

    def swap(self, at: int, old: Handle, tier: Tier, new: Handle) -> bool:
        """Hold `new` in `tier` instead of `old`; False: `old` is not held here any more, the caller keeps `new`."""
        with self._lock:
            if at >= len(self.blocks) or self.blocks[at][1] is not old:
                return False
            self.blocks[at] = (tier, new)
            return True

    def delete(self, is_gone: Callable[[BlockRef], bool]) -> None:
        """Note what of it was deleted; while it grows, handles may come in that were leased before."""
        with self._lock:
            if not self._closed:
                self._removals.append(is_gone)
            self._note(is_gone, [handle for _, handle in self.blocks])

    def _note(self, is_gone: Callable[[BlockRef], bool], handles: Sequence[Handle]) -> None:
        self.deleted |= {handle.ref.key for handle in handles if is_gone(handle.ref)}

    def end(self) -> list[tuple[Tier, Handle]]:
        """Hold nothing any more; returns what was held."""
        with self._lock:
            self._closed = True
            blocks, self.blocks = self.blocks, []
            return blocks
