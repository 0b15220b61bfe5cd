"""Least recently used, tail first: the coldest block leaves first, and of one batch the deepest."""

import time
from collections.abc import Callable, Sequence

from kvtier.policies.hinted import HintedPolicy
from kvtier.policies.queues import SlotQueue
from kvtier.policies.slots import Slots

__all__ = ["LruPolicy"]


class LruOrder:
    """One queue by last use. Implements `kvtier.policies.order.Order`."""

    nbytes = 0

    def __init__(self, slots: Slots) -> None:
        self._queue = SlotQueue(slots, slots.used, ordered=True)

    def insert(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """See `Order.insert`."""
        self._queue.extend(slots)

    def hit(self, slot: int, queue: SlotQueue) -> None:
        """See `Order.hit`."""
        queue.touch(slot)

    def expect(self, incoming: Sequence[bytes]) -> None:
        """See `Order.expect`: who comes in makes no difference."""

    def pick(self, at: int) -> int:
        """See `Order.pick`."""
        return self._queue.coldest()

    def evicted(self, key: bytes, queue: SlotQueue) -> None:
        """See `Order.evicted`: nothing is remembered."""


class LruPolicy(HintedPolicy):
    """Tail-first LRU under `HintedPolicy`: the default.

    Args:
        capacity_blocks: not needed here; every policy of the registry takes it.
        clock: seconds, for hints that expire.
    """

    def __init__(self, capacity_blocks: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(LruOrder, clock)
