"""What the store asks of its host tier beyond the protocol of all tiers."""

from collections.abc import Sequence
from typing import Protocol

from kvtier.hints import Hint
from kvtier.policies import EvictionPolicy
from kvtier.tiers import AddressableTier, BlockRef, Handle, Owner, Reservation, Ticket

__all__ = ["GatewayTier"]


class GatewayTier(AddressableTier, Protocol):
    """The tier between the device and all others."""

    def lease(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        """`acquire` without a look at the bytes: whoever uses them compares them with `Handle.checksum` first."""
        ...

    def duplicate(self, keys: Sequence[bytes], *, above: bool) -> None:
        """The device holds these records too (or not any more): they leave before all others."""
        ...

    def refs(self, keys: Sequence[bytes]) -> list[BlockRef | None]:
        """What the records of these keys are, None where there is none. Takes no lease and renews no recency."""
        ...

    def coldest(self, count: int) -> list[bytes]:
        """Keys of the next victims, in order; changes nothing."""
        ...

    def rename(
        self, handles: Sequence[Handle], refs: Sequence[BlockRef], owner: Owner, hints: Sequence[Hint]
    ) -> list[Reservation]:
        """`reserve` in memory that is reserved: each handle becomes the reservation of its ref, bytes and all.

        Returns:
            Per ref its handle, or `Exists`, where the handle stays what it was.

        Raises:
            FormatMismatch: a key that no record can have, or not as many of each.
            LeaseError: a handle is no reservation any more.
        """
        ...

    def resize(self, capacity_bytes: int) -> int:
        """Change the capacity at run time; returns the bytes that are still used beyond it."""
        ...

    def set_policy(self, policy: EvictionPolicy) -> None:
        """Let another policy decide who leaves."""
        ...

    def usage(self) -> dict[int, tuple[int, int]]:
        """Records that are ready, and their bytes, by namespace."""
        ...

    def take_evicted(self) -> list[bytes]:
        """Keys of the records evicted since the last call, as far as it remembers."""
        ...
