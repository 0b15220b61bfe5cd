"""ConnectorOptions: how a connector decides, as data."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from kvtier.cost import PrefillShape
from kvtier.errors import ConfigError

__all__ = ["ConnectorOptions", "CopyRule", "OfferRule"]

CopyRule: TypeAlias = Literal["inclusive", "exclusive"]
OfferRule: TypeAlias = Literal["leased", "verified"]


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Validated on construction.

    Args:
        groups: layer groups of a block; each is a device pool of its own.
        windowed_groups: the last so many of them are of layers with a window in a model that has others, too: they go
            by block tables of their own, `StepSpan.windowed_ids`.
        shards: workers, each of which holds its part of every group.
        recompute_gate: whether what was found is loaded only where that is cheaper than computing it again.
        window_blocks: leading ones of a run of blocks that is found need not be loaded where as many as these follow,
            since the model attends to no more; None: all of them are needed.
        shape: how prefill work grows with depth.
        load_seconds: a look-up, and then a load, that takes longer is given up, and its tokens are computed.
        least_seconds: how long it may take at least, however fast computing would be.
        copies: what becomes of host's copies of device blocks. `inclusive`: nothing, they stay as long as they would
            anyway; `exclusive`: once host is full they leave it first, and are saved again when they leave the device.
        offers: what a match may consist of. `leased`: blocks wherever they are, to be brought into host while the
            request has device blocks already; `verified`: blocks that are in host, which they are brought into before,
            so that nothing but a copy is left to do or to fail.

    Raises:
        ConfigError: a value is out of range.
    """

    groups: int = 1
    windowed_groups: int = 0
    shards: int = 1
    recompute_gate: bool = True
    window_blocks: int | None = None
    shape: PrefillShape = field(default_factory=PrefillShape)
    load_seconds: float = 10.0
    least_seconds: float = 2.0
    copies: CopyRule = "inclusive"
    offers: OfferRule = "leased"

    def __post_init__(self) -> None:
        if self.groups < 1 or self.shards < 1:
            raise ConfigError(f"groups={self.groups}, shards={self.shards}: expected at least 1 of each")
        if not 0 <= self.windowed_groups < self.groups:
            raise ConfigError(
                f"windowed_groups={self.windowed_groups} of {self.groups}: expected 0..{self.groups - 1}; where all "
                "groups have a window, give window_blocks"
            )
        if self.windowed_groups and (self.window_blocks is not None or self.copies == "exclusive"):
            raise ConfigError(
                f"windowed_groups={self.windowed_groups} with window_blocks={self.window_blocks} and "
                f"copies={self.copies!r}: some layers need all blocks, and those with a window give theirs up one by "
                "one; leave window_blocks out, and choose copies = 'inclusive'"
            )
        if self.window_blocks is not None and self.window_blocks < 1:
            raise ConfigError(f"window_blocks={self.window_blocks}: expected at least 1, or None")
        if not 0 < self.load_seconds < float("inf") or self.least_seconds < 0:
            raise ConfigError(
                f"load_seconds={self.load_seconds}, least_seconds={self.least_seconds}: expected finite seconds, "
                f"more than 0 and at least 0"
            )
        if self.copies not in get_args(CopyRule):
            raise ConfigError(f"copies={self.copies!r}: expected one of {', '.join(get_args(CopyRule))}")
        if self.offers not in get_args(OfferRule):
            raise ConfigError(f"offers={self.offers!r}: expected one of {', '.join(get_args(OfferRule))}")
