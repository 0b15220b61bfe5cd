"""The device's own prefix index, as an engine keeps it in front of the store."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["DeviceIndex", "Moved"]


class Moved(NamedTuple):
    """Block numbers that came into the device and that left it, in no order that matters."""

    entered: list[int]
    left: list[int]


class DeviceIndex:
    """Which blocks the device holds: least recently used leaves first, of one request the deepest.

    Args:
        capacity: blocks; 0: nothing is kept between requests.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def leading(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are there."""
        held = self._blocks
        return next((at for at, block in enumerate(blocks) if block not in held), len(blocks))

    def use(self, blocks: Sequence[int]) -> Moved:
        """A request ran over `blocks`: they are on the device, most recent, and others leave."""
        held = self._blocks
        if not self.capacity:
            return Moved([], [])
        entered = [block for block in blocks if block not in held]
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        left = [held.popitem(last=False)[0] for _ in range(len(held) - self.capacity)]
        gone = set(left)
        return Moved([block for block in entered if block not in gone], left)
