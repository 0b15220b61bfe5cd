"""Victims: who gives way when the device is full. A key per running request, the largest first."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

from kvtier.engine.latency import LoadModel, StepModel
from kvtier.engine.request import Request
from kvtier.gpu.pool import BlockPool

__all__ = ["VictimKey", "VictimName", "make_victims"]

VictimName: TypeAlias = Literal["fifo", "class", "slack", "cost"]
VictimKey: TypeAlias = Callable[[Request], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Victims:
    pool: BlockPool
    steps: StepModel
    loads: LoadModel
    clock: Callable[[], float]

    def fifo(self, request: Request) -> tuple[float, float]:
        """The last arrived."""
        return (0.0, request.birth)

    def by_class(self, request: Request) -> tuple[float, float]:
        """The least important; of a class the last arrived."""
        return (request.params.priority, request.birth)

    def slack(self, request: Request) -> tuple[float, float]:
        """Whose next token is due last."""
        metrics, params = request.metrics, request.params
        started = metrics.latest_token is not None
        since = metrics.latest_token if metrics.latest_token is not None else metrics.arrival
        target = params.tpot_target if started else params.ttft_target
        return (inf if target is None else since + target - self.clock(), request.birth)

    def cost(self, request: Request) -> tuple[float, float]:
        """Most blocks freed per second of bringing them back, of those that are short; shared ones free nothing."""
        freed = self.pool.shortest(self.pool.freed_by([request.blocks]))
        known = [self.steps.prefill_seconds(request.reach), self.loads.seconds(request.reach)]
        seconds = min((cost for cost in known if cost > 0), default=float(request.reach))
        return (freed / max(seconds, 1e-9), request.birth)


def make_victims(
    name: VictimName, pool: BlockPool, steps: StepModel, loads: LoadModel, clock: Callable[[], float]
) -> VictimKey:
    """The rule of that name, see `SchedulingRules.victims`.

    Args:
        name: which.
        pool: the device's blocks.
        steps: what computing costs.
        loads: what loading costs.
        clock: seconds, as in the requests' metrics.
    """
    victims = _Victims(pool, steps, loads, clock)
    known: dict[str, VictimKey] = {
        "fifo": victims.fifo,
        "class": victims.by_class,
        "slack": victims.slack,
        "cost": victims.cost,
    }
    return known[name]
