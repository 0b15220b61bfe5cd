"""The EvictionPolicy protocol: pure decisions over integer slots."""

from collections.abc import Sequence
from typing import Protocol

from kvtier.hints import Hint

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """Orders a tier's records for eviction. Not thread-safe: called under the tier's lock.

    Slots are small integers that the tier reuses; batches come deepest block first. Hints only reorder.

    Invariants:
        1. No child outlives its parent: a slot with live children is no victim.
        2. A pinned slot is no victim. Pins count.
        3. A block's class is the highest over its live children; `reuse = none` and an expired `ttl` wait for them.
    """

    def insert(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        parents: Sequence[int | None],
        hints: Sequence[Hint] | None = None,
    ) -> None:
        """New records, most recent. `parents`: the slot of each one's parent in this tier, or None.

        Keys are what ghost entries remember a record by once its slot is reused.
        """
        ...

    def hit(self, slots: Sequence[int]) -> None:
        """These records were used."""
        ...

    def hint(self, slots: Sequence[int], hints: Sequence[Hint]) -> None:
        """New hints for live records; renews no recency."""
        ...

    def duplicate(self, slots: Sequence[int], *, above: bool) -> None:
        """These records are also held by the tier above (or not any more): they leave before all others."""
        ...

    def adopt(self, slot: int, parent: int) -> None:
        """The parent of a live record arrived after it."""
        ...

    def remove(self, slots: Sequence[int], *, evicted: bool = False) -> None:
        """These records are gone: evicted as victims (a ghost may remember them), or deleted."""
        ...

    def pin(self, slots: Sequence[int]) -> None:
        """Protect from eviction."""
        ...

    def unpin(self, slots: Sequence[int]) -> None:
        """Undo one `pin`."""
        ...

    def victims(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        """Up to `count` slots to evict now, in order: children before parents, all unpinned.

        incoming: keys of the records that need the room, for policies whose choice depends on them.
        """
        ...
