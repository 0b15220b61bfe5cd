"""Clock with a counter of two bits: first in, first out, with up to three second chances."""

import time
from collections.abc import Callable, Sequence

from kvtier.policies.hinted import HintedPolicy
from kvtier.policies.queues import SlotQueue
from kvtier.policies.slots import NO_SLOT, Slots

__all__ = ["Clock2Policy"]

_MOST_USES = 3


class Clock2Order:
    """One queue by arrival; a used block goes round once more per use. Implements `kvtier.policies.order.Order`."""

    nbytes = 0

    def __init__(self, slots: Slots) -> None:
        self._arrived = slots.column("q")
        self._uses = slots.column("B")
        self._holds = slots.holds
        self._queue = SlotQueue(slots, self._arrived, ordered=True)
        self._turn = 0

    def insert(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """See `Order.insert`."""
        for slot in slots:
            self._uses[slot] = 0
            self._turn += 1
            self._arrived[slot] = self._turn
        self._queue.extend(slots)

    def hit(self, slot: int, queue: SlotQueue) -> None:
        """See `Order.hit`."""
        if self._uses[slot] < _MOST_USES:
            self._uses[slot] += 1

    def expect(self, incoming: Sequence[bytes]) -> None:
        """See `Order.expect`: who comes in makes no difference."""

    def pick(self, at: int) -> int:
        """See `Order.pick`. The hand moves on over used blocks, whether they could leave or not."""
        while (slot := self._queue.first()) != NO_SLOT:
            if self._uses[slot]:
                self._uses[slot] -= 1
                self._turn += 1
                self._arrived[slot] = self._turn
                self._queue.touch(slot)
            elif self._holds[slot]:
                self._queue.step_out(slot)
            else:
                break
        return slot

    def evicted(self, key: bytes, queue: SlotQueue) -> None:
        """See `Order.evicted`: nothing is remembered."""


class Clock2Policy(HintedPolicy):
    """Two-bit clock under `HintedPolicy`: LRU's hit ratios or better, and a hit only counts.

    Args:
        capacity_blocks: not needed here; every policy of the registry takes it.
        clock: seconds, for hints that expire.
    """

    def __init__(self, capacity_blocks: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(Clock2Order, clock)
