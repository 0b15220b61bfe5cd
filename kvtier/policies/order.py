"""The Order protocol: in which order the blocks leave of which no hint says anything."""

from collections.abc import Sequence
from typing import Protocol

from kvtier.policies.queues import SlotQueue

__all__ = ["Order"]


class Order(Protocol):
    """A replacement algorithm over queues of slots; `HintedPolicy` looks after tree, pins and hints.

    Its queues are made with `ordered=True`. They contain only blocks without a hint that counts.
    """

    def insert(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """Blocks come in, coldest first: new, or their hint has lapsed. `Slots.used` says when each was last used."""
        ...

    def hit(self, slot: int, queue: SlotQueue) -> None:
        """A block of this order, in this queue, was used just now."""
        ...

    def expect(self, incoming: Sequence[bytes]) -> None:
        """Victims for these keys are asked for next. Telling it again changes nothing."""
        ...

    def pick(self, at: int) -> int:
        """The block that leaves for the `at`-th incoming key, or -1; those before it have left for theirs.

        It is still in its queue, as that queue's coldest.
        """
        ...

    def evicted(self, key: bytes, queue: SlotQueue) -> None:
        """A block of this queue is about to leave as a victim."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that the order keeps beside `Slots`: its ghosts."""
        ...
