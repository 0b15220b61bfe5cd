"""Slots: the arrays that all parts of one policy share, and the prefix tree in them."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.errors import LeaseError

if TYPE_CHECKING:
    from kvtier.policies.queues import SlotQueue

__all__ = ["NO_SLOT", "Slots"]

NO_SLOT = -1


class Slots:
    """Columns indexed by slot, 43 bytes a slot; whoever needs more asks for a `column`.

    Columns: parent, its slot or -1. holds, live children + pins: a slot with none is free to leave. pins. used, when
    it was last used [ns]. owner, id of the queue that it belongs to, 0 for a slot that is not live. colder, hotter,
    place: see `SlotQueue`.
    """

    def __init__(self) -> None:
        self._columns: list[tuple[array[int], int]] = []  # with what fills it
        self.parent = self.column("i", NO_SLOT)
        self.holds = self.column("i")
        self.pins = self.column("i")
        self.used = self.column("q")
        self.owner = self.column("h")
        self.colder = self.column("i")
        self.hotter = self.column("i")
        self.place = self.column("B")
        self.queues: list[SlotQueue | None] = [None]  # by id; nobody has id 0
        self._size = 0

    def column(self, typecode: str, fill: int = 0) -> "array[int]":
        """A new column that grows with the others, `fill` where nothing was written. Before the first `grow`."""
        column: array[int] = array(typecode)
        self._columns.append((column, fill))
        return column

    def register(self, queue: "SlotQueue") -> int:
        """The id of a new queue."""
        for at in range(1, len(self.queues)):
            if self.queues[at] is None:
                self.queues[at] = queue
                return at
        self.queues.append(queue)
        return len(self.queues) - 1

    def unregister(self, queue: "SlotQueue") -> None:
        """Give the id of an empty queue back."""
        self.queues[queue.id] = None

    def grow(self, size: int) -> None:
        """Make room for slots 0 .. size - 1."""
        if size <= self._size:
            return
        missing = size + size // 8 + 64 - self._size
        for column, fill in self._columns:
            column.extend(array(column.typecode, [fill]) * missing)
        self._size += missing

    def queue(self, slot: int) -> "SlotQueue":
        """The queue of a live slot.

        Raises:
            LeaseError: the slot is not live.
        """
        queue = self.queues[self.owner[slot]] if 0 <= slot < self._size else None
        if queue is None:
            raise LeaseError(f"slot {slot} is not in the policy: insert it first")
        return queue

    def attach(self, slot: int, parent: int) -> None:
        """Make a root the child of another slot."""
        self.parent[slot] = parent
        self.holds[parent] += 1

    def reattach(self, slot: int) -> None:
        """Undo `detach`."""
        parent = self.parent[slot]
        if parent != NO_SLOT:
            self.holds[parent] += 1

    def detach(self, slot: int) -> int:
        """A slot leaves its parent, which it still remembers. Returns the parent if that is free now, else -1."""
        parent = self.parent[slot]
        if parent == NO_SLOT:
            return NO_SLOT
        self.holds[parent] -= 1
        return NO_SLOT if self.holds[parent] else parent

    def reset(self, slot: int) -> None:
        """A slot that was detached is gone."""
        self.parent[slot] = NO_SLOT
        self.holds[slot] = self.pins[slot] = 0

    def children(self, slot: int) -> int:
        """How many live children a slot has."""
        return self.holds[slot] - self.pins[slot]

    def pin(self, slots: Sequence[int]) -> None:
        """Count one more pin on each."""
        for slot in slots:
            self.holds[slot] += 1
            self.pins[slot] += 1

    def unpin(self, slot: int) -> bool:
        """Count one pin less; whether the slot is free now.

        Raises:
            LeaseError: it has no pin.
        """
        if not (0 <= slot < self._size and self.pins[slot]):
            raise LeaseError(f"slot {slot} is not pinned: cannot unpin it")
        self.holds[slot] -= 1
        self.pins[slot] -= 1
        return not self.holds[slot]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.itemsize * len(column) for column, _ in self._columns)
