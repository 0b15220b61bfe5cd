"""What the store asks of its host tier beyond the protocol of all tiers."""

from collections.abc import Sequence
from typing import Protocol

from kvtier.tiers import AddressableTier

__all__ = ["GatewayTier"]


class GatewayTier(AddressableTier, Protocol):
    """The tier between the device and all others."""

    def duplicate(self, keys: Sequence[bytes], *, above: bool) -> None:
        """The device holds these records too (or not any more): they leave before all others."""
        ...

    def coldest(self, count: int) -> list[bytes]:
        """Keys of the next victims, in order; changes nothing."""
        ...

    def take_evicted(self) -> list[bytes]:
        """Keys of the records evicted since the last call, as far as it remembers."""
        ...
