"""HintedPolicy: what all policies share: the prefix tree, pins, and the order in which hints let blocks leave."""

import math
import sys
from collections.abc import Callable, Sequence

from kvtier.errors import LeaseError
from kvtier.hints import Hint
from kvtier.policies.expiry import Expiry
from kvtier.policies.order import Order
from kvtier.policies.queues import SlotQueue
from kvtier.policies.slots import NO_SLOT, Slots

__all__ = ["HintedPolicy"]

_NO_KEY = b""
# Finite weights that have a class of their own at a time; others share the class of the nearest.
_CLASSES = 64


class HintedPolicy:
    """Implements `kvtier.policies.EvictionPolicy` around any `Order`.

    Every live slot belongs to one queue, and these give their free slots up in turn:

        1. blocks that the tier above holds too
        2. blocks that will not be used again, or whose ttl has passed since their last use
        3. of the heads of the weight classes and of the order, the one with the largest age / weight

    Only a slot without pins and live children is free, so the class of a block is never below that of a descendant.
    A victim costs O(classes), which are few, an event O(1); what expires is found when victims are asked for, O(log n)
    each.

    Args:
        make_order: makes the order of the blocks that have no hint, over the policy's columns.
        clock: seconds.
    """

    def __init__(self, make_order: Callable[[Slots], Order], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots = Slots()
        self._order = make_order(self._slots)
        self._duplicated = self._slots.column("B")
        self._duplicates = SlotQueue(self._slots, self._slots.used)
        self._dead = SlotQueue(self._slots, self._slots.used)
        self._classes: dict[float, SlotQueue] = {}
        self._expiry = Expiry(self._slots.used)
        self._keys: list[bytes] = []
        self._latest = 0
        # Victims that were named last, with their queues: out of these and off their parents until anything but
        # their removal is asked for, for nearly always that comes next.
        self._named: list[int] = []
        self._named_queues: list[SlotQueue] = []

    # ---- records

    def insert(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        parents: Sequence[int | None],
        hints: Sequence[Hint] | None = None,
    ) -> None:
        """See `EvictionPolicy.insert`. A slot's parent may come after it in the same batch.

        Raises:
            LeaseError: a slot is live already.
        """
        self._grow(max([*slots, *(parent for parent in parents if parent is not None)], default=NO_SLOT) + 1)
        taken = next((slot for slot in slots if self._slots.owner[slot]), None)
        if taken is not None or len(set(slots)) < len(slots):
            raise LeaseError(f"slot {taken if taken is not None else list(slots)} is in the policy already, or twice")
        self._restore()
        stamp = self._stamps(len(slots))
        used, known, attach = self._slots.used, self._keys, self._slots.attach
        for at, (slot, key, parent) in enumerate(zip(slots, keys, parents, strict=True), stamp):
            used[slot] = at
            known[slot] = key
            if parent is not None:
                attach(slot, parent)
        if hints is None:
            self._order.insert(slots, keys)
            return
        for slot, key, hint in zip(slots, keys, hints, strict=True):
            counts = self._expiry.note(slot, hint, used[slot])
            target = self._target(slot, used[slot]) if counts else None
            if target is None:
                self._order.insert((slot,), (key,))
            else:
                target.insert(slot)

    def hit(self, slots: Sequence[int]) -> None:
        """See `EvictionPolicy.hit`."""
        self._restore()
        stamp = self._stamps(len(slots))
        used, hinted = self._slots.used, self._expiry.hints
        for at, slot in enumerate(slots, stamp):
            queue = self._slots.queue(slot)
            used[slot] = at
            if queue.ordered:
                self._order.hit(slot, queue)
            else:
                queue.touch(slot)
            if slot in hinted:
                self._expiry.renew(slot, at)
                self._settle(slot, at)

    def hint(self, slots: Sequence[int], hints: Sequence[Hint]) -> None:
        """See `EvictionPolicy.hint`."""
        self._restore()
        now = self._stamps(0)
        for slot, hint in zip(slots, hints, strict=True):
            self._slots.queue(slot)
            self._expiry.note(slot, hint, now)
            self._settle(slot, now)

    def duplicate(self, slots: Sequence[int], *, above: bool) -> None:
        """See `EvictionPolicy.duplicate`."""
        self._restore()
        now = self._stamps(0)
        for slot in slots:
            self._slots.queue(slot)
            self._duplicated[slot] = above
            self._settle(slot, now)

    def adopt(self, slot: int, parent: int) -> None:
        """See `EvictionPolicy.adopt`.

        Raises:
            LeaseError: the slot has a parent.
        """
        if self._slots.parent[slot] != NO_SLOT:
            raise LeaseError(f"slot {slot} has parent {self._slots.parent[slot]} already: cannot give it {parent}")
        self._restore()
        self._slots.attach(slot, parent)

    def remove(self, slots: Sequence[int], *, evicted: bool = False) -> None:
        """See `EvictionPolicy.remove`. Children come before their parents.

        Raises:
            LeaseError: a slot has live children, or is not live.
        """
        count = len(slots)
        if evicted and self._named and self._named[:count] == list(slots):
            queues = self._named_queues[:count]
            del self._named[:count], self._named_queues[:count]
            for slot, queue in zip(slots, queues, strict=True):
                self._gone(slot, queue, evicted=True)
            for queue in set(queues).difference(self._named_queues):
                self._retire(queue)
            return
        self._restore()
        for slot in slots:
            queue = self._slots.queue(slot)
            if self._slots.children(slot):
                raise LeaseError(f"slot {slot} has {self._slots.children(slot)} live children: cannot remove it")
            queue.remove(slot)
            self._wake(self._slots.detach(slot))
            self._gone(slot, queue, evicted=evicted)
            self._retire(queue)

    def _gone(self, slot: int, queue: SlotQueue, *, evicted: bool) -> None:
        """Forget a slot that has left its queue and its parent for good."""
        if evicted and queue.ordered:
            self._order.evicted(self._keys[slot], queue)
        if slot in self._expiry.hints:
            self._expiry.forget(slot)
        self._duplicated[slot] = False
        self._keys[slot] = _NO_KEY
        self._slots.reset(slot)

    def pin(self, slots: Sequence[int]) -> None:
        """See `EvictionPolicy.pin`."""
        self._restore()
        self._slots.pin(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        """See `EvictionPolicy.unpin`.

        Raises:
            LeaseError: a slot is not pinned.
        """
        self._restore()
        for slot in slots:
            if self._slots.unpin(slot):
                self._wake(slot)

    # ---- victims

    def victims(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        """See `EvictionPolicy.victims`. Asking evicts nothing, and asking again gives the same answer.

        Each victim really leaves its queue, so that its parent may be the next; who is not removed next comes back.
        """
        self._restore()
        now = self._stamps(0)
        for slot in self._expiry.due(now):
            self._settle(slot, now)
        self._order.expect(incoming)
        slots, taken, queues = self._slots, self._named, self._named_queues
        while len(taken) < count and (slot := self._pick(len(taken), now)) != NO_SLOT:
            queue = slots.queue(slot)
            queue.remove(slot)
            taken.append(slot)
            queues.append(queue)
            parent = slots.detach(slot)
            if parent != NO_SLOT:
                self._wake(parent)
        return taken.copy()

    def _restore(self) -> None:
        """The victims that were named last come back."""
        if not self._named:
            return
        for slot, queue in zip(reversed(self._named), reversed(self._named_queues), strict=True):
            self._slots.reattach(slot)
            queue.insert(slot)
        self._named.clear()
        self._named_queues.clear()

    def _pick(self, at: int, now: int) -> int:
        for queue in (self._duplicates, self._dead):
            if queue.members and (slot := queue.coldest()) != NO_SLOT:
                return slot
        ordinary = self._order.pick(at)
        if not self._classes:
            return ordinary
        heads = [(1.0, ordinary)] + [(weight, queue.coldest()) for weight, queue in self._classes.items()]
        used = self._slots.used
        # A strict class has no age at all: it is asked only when every other is empty.
        return max(
            (head for head in heads if head[1] != NO_SLOT),
            key=lambda head: (head[0] < math.inf, (now - used[head[1]]) / head[0]),
            default=(1.0, NO_SLOT),
        )[1]

    # ---- queues

    def _target(self, slot: int, now: int) -> SlotQueue | None:
        """Where a slot belongs; None for the order."""
        if self._duplicated[slot]:
            return self._duplicates
        if self._expiry.dead(slot, now):
            return self._dead
        weight = self._expiry.weight(slot, now)
        if weight == 1:
            return None
        return self._class_of(weight)

    def _class_of(self, weight: float) -> SlotQueue:
        known = self._classes.get(weight)
        if known is None and (len(self._classes) < _CLASSES or weight == math.inf):
            known = self._classes[weight] = SlotQueue(self._slots, self._slots.used)
        if known is None:
            finite = (one for one in self._classes if one < math.inf)
            known = self._classes[min(finite, key=lambda one: abs(math.log(one) - math.log(weight)))]
        return known

    def _settle(self, slot: int, now: int) -> None:
        """Move a live slot to where it belongs now."""
        queue, target = self._slots.queue(slot), self._target(slot, now)
        if target is queue or (target is None and queue.ordered):
            return
        queue.remove(slot)
        self._retire(queue)
        if target is None:
            self._order.insert((slot,), (self._keys[slot],))
        else:
            target.insert(slot)

    def _retire(self, queue: SlotQueue) -> None:
        """If it is the queue of a weight class and empty, it goes."""
        if queue.members or queue.ordered or queue in (self._duplicates, self._dead):
            return
        weight = next(weight for weight, class_queue in self._classes.items() if class_queue is queue)
        del self._classes[weight]
        self._slots.unregister(queue)

    def _wake(self, slot: int) -> None:
        """A slot that is free now, or none (-1), comes back to its queue."""
        if slot != NO_SLOT:
            queue = self._slots.queues[self._slots.owner[slot]]
            if queue is not None:  # a parent that this batch inserts later has none yet
                queue.wake(slot)

    # ---- time and room

    def _stamps(self, count: int) -> int:
        """The first of `count` stamps [ns]: each is newer than all before, and all say what time it is."""
        first = max(int(self._clock() * 1e9), self._latest + 1)
        self._latest = first + count - 1 if count else self._latest
        return first

    def _grow(self, size: int) -> None:
        self._slots.grow(size)
        if size > len(self._keys):
            self._keys += [_NO_KEY] * (size - len(self._keys))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the policy takes, ghosts included."""
        return self._slots.nbytes + sys.getsizeof(self._keys) + self._expiry.nbytes + self._order.nbytes
