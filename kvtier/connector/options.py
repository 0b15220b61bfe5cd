"""ConnectorOptions: how a connector decides, as data."""

from dataclasses import dataclass, field

from kvtier.cost import PrefillShape
from kvtier.errors import ConfigError

__all__ = ["ConnectorOptions"]


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Validated on construction.

    Args:
        groups: layer groups of a block; each is a device pool of its own.
        shards: workers, each of which holds its part of every group.
        recompute_gate: whether what was found is loaded only where that is cheaper than computing it again.
        shape: how prefill work grows with depth.
        load_seconds: a look-up, and then a load, that takes longer is given up, and its tokens are computed.
        least_seconds: how long it may take at least, however fast computing would be.

    Raises:
        ConfigError: a value is out of range.
    """

    groups: int = 1
    shards: int = 1
    recompute_gate: bool = True
    shape: PrefillShape = field(default_factory=PrefillShape)
    load_seconds: float = 10.0
    least_seconds: float = 2.0

    def __post_init__(self) -> None:
        if self.groups < 1 or self.shards < 1:
            raise ConfigError(f"groups={self.groups}, shards={self.shards}: expected at least 1 of each")
        if not 0 < self.load_seconds < float("inf") or self.least_seconds < 0:
            raise ConfigError(
                f"load_seconds={self.load_seconds}, least_seconds={self.least_seconds}: expected finite seconds, "
                f"more than 0 and at least 0"
            )
