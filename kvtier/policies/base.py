"""The EvictionPolicy protocol: pure decisions over integer slots."""

from collections.abc import Sequence
from typing import Protocol

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """Orders a tier's records for eviction. Not thread-safe: called under the tier's lock.

    Slots are small integers that the tier reuses; batches come deepest block first.

    Invariants:
        1. No child outlives its parent: a slot with live children is no victim.
        2. A pinned slot is no victim. Pins count.
    """

    def insert(self, slots: Sequence[int], parents: Sequence[int | None]) -> None:
        """New records, most recent. `parents`: the slot of each one's parent in this tier, or None."""
        ...

    def hit(self, slots: Sequence[int]) -> None:
        """These records were used."""
        ...

    def remove(self, slots: Sequence[int]) -> None:
        """These records are gone (victims too: the tier removes what it evicts)."""
        ...

    def pin(self, slots: Sequence[int]) -> None:
        """Protect from eviction."""
        ...

    def unpin(self, slots: Sequence[int]) -> None:
        """Undo one `pin`."""
        ...

    def victims(self, count: int) -> list[int]:
        """Up to `count` slots to evict now, in order: children before parents, all unpinned."""
        ...
