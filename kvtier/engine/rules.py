"""SchedulingRules: who is computed first, and who gives way."""

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from kvtier.engine.orders import OrderName
from kvtier.engine.victims import VictimName
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.config import EngineSettings

__all__ = ["Preemption", "SchedulingRules"]

Preemption: TypeAlias = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True)
class SchedulingRules:
    """Validated on construction.

    Args:
        order: who is computed first. `fcfs`: who came first; `priority`: by class, and a better class takes the place
            of a worse one; `slack`: whose next token is due first, less the time that it takes; `longest_prefix`:
            whose prompt the device holds most of.
        victims: who gives way where blocks are missing, among those behind in the order. `fifo`: who came last;
            `class`: the least important; `slack`: whose next token is due last; `cost`: who frees most blocks per
            second of bringing them back.
        preemption: whether who gives way is kept in other tiers or computed again. `auto`: whatever is expected to be
            cheaper.
        ageing: seconds of waiting that weigh as much as one class, or as one step saved by a cached prefix; also the
            time in which a request without a target of its own wants its first token, in the order `slack`.
        watermark: share of the device's blocks that stay free when a request is admitted beside others.
        residency: steps that a request which lost its blocks is left alone after it got some again, if anyone else can
            give way.
        prefetch_ahead: waiting requests whose KV is brought closer meanwhile.
        pipelined: plan the next step while one is running.
        overlap_loads: a request whose KV is copied into the device within the time of a step is computed in that very
            step, layer by layer behind the copy. If the copy fails, what was computed is dropped.

    Raises:
        ConfigError: a value is out of range.
    """

    order: OrderName = "fcfs"
    victims: VictimName = "fifo"
    preemption: Preemption = "auto"
    ageing: float = 30.0
    watermark: float = 0.01
    residency: int = 16
    prefetch_ahead: int = 4
    pipelined: bool = False
    overlap_loads: bool = False

    def __post_init__(self) -> None:
        for name, names in (("order", OrderName), ("victims", VictimName), ("preemption", Preemption)):
            if getattr(self, name) not in get_args(names):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(get_args(names))}")
        if not (isfinite(self.ageing) and self.ageing > 0):
            raise ConfigError(f"ageing={self.ageing!r}: expected seconds, more than 0")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark={self.watermark!r}: expected a share, at least 0 and below 1")
        if self.residency < 0 or self.prefetch_ahead < 0:
            raise ConfigError(
                f"residency={self.residency}, prefetch_ahead={self.prefetch_ahead}: expected at least 0 of each"
            )

    @classmethod
    def from_config(cls, settings: "EngineSettings") -> "SchedulingRules":
        """The rules that the `engine` section of the configuration describes."""
        return cls(
            order=settings.order,
            victims=settings.victims,
            preemption=settings.preemption,
            ageing=settings.ageing,
            watermark=settings.watermark,
            residency=settings.residency,
            prefetch_ahead=settings.prefetch_ahead,
            pipelined=settings.pipelined,
            overlap_loads=settings.overlap_loads,
        )
