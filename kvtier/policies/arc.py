"""ARC (Megiddo and Modha, FAST 2003): two LRU queues whose balance learns from what was evicted too early."""

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.policies.ghosts import GhostList
from kvtier.policies.hinted import HintedPolicy
from kvtier.policies.queues import SlotQueue
from kvtier.policies.slots import NO_SLOT, Slots

__all__ = ["ArcPolicy"]


class ArcOrder:
    """Implements `kvtier.policies.order.Order`. In the paper's names:

    T1 `_recent`, T2 `_frequent`: blocks used once and more than once. B1, B2: their ghosts. p `_target`: the size that
    T1 should have. c `_capacity`. Invariants: |T1| + |B1| <= c, and |T1| + |T2| + |B1| + |B2| <= 2 c.
    """

    def __init__(self, slots: Slots, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._recent = SlotQueue(slots, slots.used, ordered=True)
        self._frequent = SlotQueue(slots, slots.used, ordered=True)
        self._recent_ghosts = GhostList(capacity)
        self._frequent_ghosts = GhostList(2 * capacity)
        # Ghosts that are on their way in, and whether they come from B2: the target has learned from them already.
        self._returning: OrderedDict[bytes, bool] = OrderedDict()
        self._incoming: Sequence[bytes] = ()
        self._arrived = self._arrived_recent = 0

    def insert(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """See `Order.insert`."""
        for slot, key in zip(slots, keys, strict=True):
            self._learn(key)
            known = self._returning.pop(key, None) is not None
            (self._frequent if known else self._recent).insert(slot)
            self._trim()

    def hit(self, slot: int, queue: SlotQueue) -> None:
        """See `Order.hit`."""
        if queue is self._frequent:
            queue.touch(slot)
        else:
            queue.remove(slot)
            self._frequent.insert(slot)

    def expect(self, incoming: Sequence[bytes]) -> None:
        """See `Order.expect`. The target learns from returning ghosts now, before they displace anything."""
        for key in incoming:
            self._learn(key)
        self._incoming = incoming
        self._arrived = self._arrived_recent = 0

    def pick(self, at: int) -> int:
        """See `Order.pick`: the paper's REPLACE."""
        incoming = self._incoming[at] if at < len(self._incoming) else None
        recent, frequent = self._recent.coldest(), self._frequent.coldest()
        if recent == NO_SLOT or frequent == NO_SLOT:
            return frequent if recent == NO_SLOT else recent
        size = self._recent.members + self._arrivals(at)
        from_frequent_ghosts = incoming is not None and self._returning.get(incoming, False)
        if size > self._target or (size == self._target and from_frequent_ghosts):
            return recent
        return frequent

    def _arrivals(self, at: int) -> int:
        """How many of the first `at` incoming keys go to T1; it only asks for ever larger `at`."""
        for key in self._incoming[self._arrived : at]:
            self._arrived_recent += key not in self._returning
        self._arrived = max(self._arrived, at)
        return self._arrived_recent

    def evicted(self, key: bytes, queue: SlotQueue) -> None:
        """See `Order.evicted`."""
        (self._recent_ghosts if queue is self._recent else self._frequent_ghosts).add(key)

    def _learn(self, key: bytes) -> None:
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if self._recent_ghosts.discard(key):
            self._target = min(self._target + max(frequent / recent, 1), self._capacity)
            self._returning[key] = False
        elif self._frequent_ghosts.discard(key):
            self._target = max(self._target - max(recent / frequent, 1), 0)
            self._returning[key] = True
        if len(self._returning) > self._capacity:
            self._returning.popitem(last=False)

    def _trim(self) -> None:
        while self._recent_ghosts and self._recent.members + len(self._recent_ghosts) > self._capacity:
            self._recent_ghosts.forget_oldest()
        live = self._recent.members + self._frequent.members
        while self._frequent_ghosts and (
            live + len(self._recent_ghosts) + len(self._frequent_ghosts) > 2 * self._capacity
        ):
            self._frequent_ghosts.forget_oldest()

    @property
    def nbytes(self) -> int:
        """See `Order.nbytes`."""
        return self._recent_ghosts.nbytes + self._frequent_ghosts.nbytes + sys.getsizeof(self._returning)


class ArcPolicy(HintedPolicy):
    """Tail-first ARC under `HintedPolicy`.

    Args:
        capacity_blocks: how many blocks the tier holds; as many ghosts are remembered.
        clock: seconds, for hints that expire.
    """

    def __init__(self, capacity_blocks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(partial(ArcOrder, capacity=capacity_blocks), clock)
