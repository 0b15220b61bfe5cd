"""An eviction policy of one's own: the block that was used least often leaves first, of equals the oldest."""

import time
from collections.abc import Callable, Sequence

from kvtier.policies.hinted import HintedPolicy
from kvtier.policies.queues import SlotQueue
from kvtier.policies.slots import Slots


class LfuOrder:
    """Implements `kvtier.policies.order.Order`: one queue, by number of uses."""

    nbytes = 0

    def __init__(self, slots: Slots) -> None:
        self._uses = slots.column("q")
        self._rank = slots.column("q")
        self._queue = SlotQueue(slots, self._rank, ordered=True)
        self._turn = 0

    def insert(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        for slot in slots:
            self._uses[slot] = 0
            self._place(slot)

    def hit(self, slot: int, queue: SlotQueue) -> None:
        self._uses[slot] += 1
        queue.remove(slot)
        self._place(slot)

    def _place(self, slot: int) -> None:
        self._turn += 1
        self._rank[slot] = (self._uses[slot] << 40) + self._turn
        self._queue.insert(slot)

    def expect(self, incoming: Sequence[bytes]) -> None:
        pass  # what comes in makes no difference

    def pick(self, at: int) -> int:
        return self._queue.coldest()

    def evicted(self, key: bytes, queue: SlotQueue) -> None:
        pass  # nothing is remembered of a block that left


class LfuPolicy(HintedPolicy):
    """`HintedPolicy` looks after the prefix tree, pins and hints; the order says the rest."""

    def __init__(self, capacity_blocks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(LfuOrder, clock)
