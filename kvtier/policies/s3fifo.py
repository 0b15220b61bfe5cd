"""S3-FIFO (Yang et al., SOSP 2023): a small queue on probation, a main queue with second chances, and ghosts."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.policies.ghosts import GhostList
from kvtier.policies.hinted import HintedPolicy
from kvtier.policies.queues import SlotQueue
from kvtier.policies.slots import NO_SLOT, Slots

__all__ = ["S3FifoPolicy"]

_SMALL_SHARE = 0.1
_PROMOTING_USES = 2
_MOST_USES = 3


class S3FifoOrder:
    """Implements `kvtier.policies.order.Order`.

    A new block enters `_small`; it leaves from there as a ghost, or, used twice, moves to `_main`. A ghost that comes
    back enters `_main` at once.
    """

    def __init__(self, slots: Slots, capacity: int) -> None:
        self._arrived = slots.column("q")
        self._uses = slots.column("B")
        self._holds = slots.holds
        self._small = SlotQueue(slots, self._arrived, ordered=True)
        self._main = SlotQueue(slots, self._arrived, ordered=True)
        self._main_blocks = capacity - max(int(capacity * _SMALL_SHARE), 1)
        self._ghosts = GhostList(max(self._main_blocks, 1))
        self._turn = 0

    def insert(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """See `Order.insert`."""
        for slot, key in zip(slots, keys, strict=True):
            self._enter(self._main if self._ghosts.discard(key) else self._small, slot)

    def _enter(self, queue: SlotQueue, slot: int) -> None:
        self._uses[slot] = 0
        self._stamp(slot)
        queue.insert(slot)

    def _stamp(self, slot: int) -> None:
        self._turn += 1
        self._arrived[slot] = self._turn

    def hit(self, slot: int, queue: SlotQueue) -> None:
        """See `Order.hit`."""
        if self._uses[slot] < _MOST_USES:
            self._uses[slot] += 1

    def expect(self, incoming: Sequence[bytes]) -> None:
        """See `Order.expect`: who comes in makes no difference."""

    def pick(self, at: int) -> int:
        """See `Order.pick`. Used blocks move on, whether they could leave or not."""
        while True:
            small, main = self._small.first(), self._main.first()
            if main != NO_SLOT and (small == NO_SLOT or self._main.members > self._main_blocks):
                if self._leaves_main(main):
                    return main
            elif small == NO_SLOT or self._leaves_small(small):
                return small

    def _leaves_main(self, slot: int) -> bool:
        if self._uses[slot]:
            self._uses[slot] -= 1
            self._stamp(slot)
            self._main.touch(slot)
        elif self._holds[slot]:
            self._main.step_out(slot)
        else:
            return True
        return False

    def _leaves_small(self, slot: int) -> bool:
        if self._uses[slot] >= _PROMOTING_USES:
            self._small.remove(slot)
            self._enter(self._main, slot)
        elif self._holds[slot]:
            self._small.step_out(slot)
        else:
            return True
        return False

    def evicted(self, key: bytes, queue: SlotQueue) -> None:
        """See `Order.evicted`."""
        if queue is self._small:
            self._ghosts.add(key)

    @property
    def nbytes(self) -> int:
        """See `Order.nbytes`."""
        return self._ghosts.nbytes


class S3FifoPolicy(HintedPolicy):
    """Tail-first S3-FIFO under `HintedPolicy`: for tiers of one per cent of what is used, or less.

    Args:
        capacity_blocks: how many blocks the tier holds; nine tenths as many ghosts are remembered.
        clock: seconds, for hints that expire.
    """

    def __init__(self, capacity_blocks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(partial(S3FifoOrder, capacity=capacity_blocks), clock)
