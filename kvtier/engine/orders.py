"""Orders: who is computed first. A key per request, the smallest first; whoever waits moves forward.

Every key is an urgency plus the time of arrival in units of `ageing`, so a request is overtaken only by those that come
within a bounded time after it: none starves, and the keys of two waiting requests keep their order while they age.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvtier.engine.latency import LoadModel, StepModel
from kvtier.engine.request import Request

__all__ = ["Order", "OrderName", "make_order"]

OrderName: TypeAlias = Literal["fcfs", "priority", "slack", "longest_prefix"]


@dataclass(frozen=True, slots=True)
class Order:
    """An order of requests.

    Args:
        urgency: without age and arrival; the smallest first.
        drifts: whether it changes while a request waits.
        classes: whether a request of a better class may take a running one's place.
    """

    urgency: Callable[[Request], float]
    drifts: bool = False
    classes: bool = False

    def rank(self, request: Request) -> tuple[float, int, int]:
        """The request's key: urgency and age, then arrival, then parents before forks."""
        return (self.urgency(request), request.order, request.birth)


@dataclass(frozen=True, slots=True)
class _Orders:
    ageing: float
    token_budget: int
    cached_tokens: Callable[[Request], int]
    steps: StepModel
    loads: LoadModel

    def fcfs(self, _: Request) -> float:
        return 0.0

    def priority(self, request: Request) -> float:
        """By class; a class is worth `ageing` seconds of waiting."""
        return request.params.priority + request.metrics.arrival / self.ageing

    def slack(self, request: Request) -> float:
        """When it must be started at the latest: deadline - prefill of what is cached nowhere - load of the rest.

        The deadline is that of the next token, which is not the first one of a request that lost its blocks. The
        present is the same for all and left out. Without a target a request may take `ageing` seconds.
        """
        metrics, params, deadline = request.metrics, request.params, request.metrics.arrival + self.ageing
        if metrics.latest_token is None and params.ttft_target is not None:
            deadline = metrics.arrival + params.ttft_target
        elif metrics.latest_token is not None and params.tpot_target is not None:
            deadline = metrics.latest_token + params.tpot_target
        missing = max(0, request.num_tokens - self.cached_tokens(request))
        loaded = min(request.offered, missing)
        return deadline - self.steps.prefill_seconds(missing - loaded) - self.loads.seconds(loaded)

    def longest_prefix(self, request: Request) -> float:
        """By the steps that the device's cache saves; a step is worth `ageing` seconds of waiting."""
        return request.metrics.arrival / self.ageing - self.cached_tokens(request) / self.token_budget


def make_order(
    name: OrderName,
    *,
    ageing: float,
    token_budget: int,
    cached_tokens: Callable[[Request], int],
    steps: StepModel,
    loads: LoadModel,
) -> Order:
    """The order of that name.

    Args:
        name: see `SchedulingRules.order`.
        ageing: seconds of waiting that weigh as much as one unit of urgency.
        token_budget: of a step.
        cached_tokens: leading tokens of a request that the device holds.
        steps: what computing costs.
        loads: what loading costs.
    """
    orders = _Orders(ageing, token_budget, cached_tokens, steps, loads)
    known = {
        "fcfs": Order(orders.fcfs),
        "priority": Order(orders.priority, classes=True),
        "slack": Order(orders.slack, drifts=True),
        "longest_prefix": Order(orders.longest_prefix, drifts=True),
    }
    return known[name]
