"""SlotQueue: slots from cold to hot by a stamp, of which the coldest that is free to leave is found at once."""

from array import array
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from kvtier.policies.slots import NO_SLOT, Slots

__all__ = ["SlotQueue"]

_OUT, _LINKED, _LATE = range(3)


class SlotQueue:
    """A doubly linked list threaded through the columns of `Slots`, O(1) per event.

        cold  deepest of the oldest batch <-> ... <-> first block of the newest batch  hot

    A slot that has pins or live children when the list's cold end reaches it steps out, so that nothing is ever
    passed over twice; `wake` brings it back. What comes back between older and newer slots waits in a heap of
    latecomers, which is as small as such cases are rare.

    Args:
        slots: the policy's columns.
        stamps: the column that orders this queue; larger is hotter. A member's stamp changes only right before
            `touch`.
        ordered: belongs to the policy's own order, not to a hint.
    """

    def __init__(self, slots: Slots, stamps: "array[int]", *, ordered: bool = False) -> None:
        self.ordered = ordered
        self.members = 0
        self.id = slots.register(self)
        self._stamps = stamps
        self._owner, self._place, self._holds = slots.owner, slots.place, slots.holds
        self._colder, self._hotter = slots.colder, slots.hotter
        self._cold = self._hot = NO_SLOT
        self._late: list[tuple[int, int]] = []
        self._late_limit = 64

    def insert(self, slot: int) -> None:
        """A slot that no queue owns joins, at the place of its stamp."""
        self._owner[slot] = self.id
        self.members += 1
        self._join(slot)

    def extend(self, slots: Sequence[int]) -> None:
        """Slots that no queue owns join; as a rule each is newer than all before, and than all members."""
        stamps, owner, place, own = self._stamps, self._owner, self._place, self.id
        colder, hotter, hot = self._colder, self._hotter, self._hot
        self.members += len(slots)
        for slot in slots:
            owner[slot] = own
            if hot == NO_SLOT or stamps[hot] > stamps[slot]:
                self._hot = hot
                self._join(slot)
                hot = self._hot
                continue
            colder[slot], hotter[slot] = hot, NO_SLOT
            hotter[hot] = hot = slot
            place[slot] = _LINKED
        self._hot = hot

    def remove(self, slot: int) -> None:
        """A member leaves the queue."""
        self.step_out(slot)
        self._owner[slot] = 0
        self.members -= 1

    def touch(self, slot: int) -> None:
        """A member's stamp has become the newest of all."""
        if self._place[slot] == _LINKED:
            self._unlink(slot)
        self._append(slot)

    def wake(self, slot: int) -> None:
        """A member may be free again."""
        if self._place[slot] == _OUT:
            self._join(slot)

    def first(self) -> int:
        """The member with the oldest stamp of all that have not stepped out, or -1; it may have pins or children."""
        cold, late = self._cold, self._late
        while late:
            stamp, slot = late[0]
            if self._waits(stamp, slot):
                return slot if cold == NO_SLOT or stamp < self._stamps[cold] else cold
            heappop(late)
        return cold

    def step_out(self, slot: int) -> None:
        """A member that is not free waits outside, until `wake` or `touch`."""
        if self._place[slot] == _LINKED:
            self._unlink(slot)
        self._place[slot] = _OUT

    def coldest(self) -> int:
        """The free member with the oldest stamp, or -1."""
        holds = self._holds
        slot = self.first()
        while slot != NO_SLOT and holds[slot]:
            self.step_out(slot)
            slot = self.first()
        return slot

    def _waits(self, stamp: int, slot: int) -> bool:
        return self._owner[slot] == self.id and self._place[slot] == _LATE and self._stamps[slot] == stamp

    def _join(self, slot: int) -> None:
        stamp, stamps, cold = self._stamps[slot], self._stamps, self._cold
        if cold == NO_SLOT or stamps[self._hot] <= stamp:
            self._append(slot)
        elif stamp <= stamps[cold]:
            self._colder[slot], self._hotter[slot] = NO_SLOT, cold
            self._colder[cold] = self._cold = slot
            self._place[slot] = _LINKED
        else:
            self._place[slot] = _LATE
            self._wait(stamp, slot)

    def _wait(self, stamp: int, slot: int) -> None:
        heappush(self._late, (stamp, slot))
        if len(self._late) > self._late_limit:
            self._late = list({entry for entry in self._late if self._waits(*entry)})
            heapify(self._late)
            self._late_limit = 2 * len(self._late) + 64

    def _append(self, slot: int) -> None:
        hot = self._hot
        self._colder[slot], self._hotter[slot] = hot, NO_SLOT
        if hot == NO_SLOT:
            self._cold = slot
        else:
            self._hotter[hot] = slot
        self._hot = slot
        self._place[slot] = _LINKED

    def _unlink(self, slot: int) -> None:
        colder, hotter = self._colder[slot], self._hotter[slot]
        if colder == NO_SLOT:
            self._cold = hotter
        else:
            self._hotter[colder] = hotter
        if hotter == NO_SLOT:
            self._hot = colder
        else:
            self._colder[hotter] = colder
