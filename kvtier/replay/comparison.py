"""Several replays of one trace, each beside the best that any policy could have done."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtier.policies.optimum import optimum_hits
from kvtier.replay.plan import ReplayPlan
from kvtier.replay.report import Outcome
from kvtier.replay.runner import replay
from kvtier.replay.trace import Trace

__all__ = ["optimum_ratio", "replay_all"]


def optimum_ratio(trace: Trace, capacity_blocks: int) -> float:
    """Token hit ratio of a cache of so many blocks that knows the future (Belady with bypass).

    It is the optimum in blocks; a last block that is partly filled makes it an estimate in tokens, by at most one
    block per request.
    """
    hits = optimum_hits([request.blocks for request in trace.requests], capacity_blocks)
    found = sum(
        min(count * trace.block_tokens, request.tokens) for count, request in zip(hits, trace.requests, strict=True)
    )
    return found / trace.tokens


def replay_all(
    trace: Trace, plans: Sequence[ReplayPlan], *, optimum: bool = True, progress: Callable[[], None] | None = None
) -> list[Outcome]:
    """Replay a trace once per plan; `optimum` adds `optimum_hit_tokens` of the room of all its tiers together.

    Raises:
        ConfigError, CapacityError, CorruptObject: see `replay`.
    """
    known: dict[int, float] = {}
    outcomes = []
    for plan in plans:
        outcome = replay(trace, plan, progress=progress)
        room = plan.capacity_blocks + plan.nvme_blocks + plan.device_blocks
        if optimum:
            if room not in known:
                known[room] = optimum_ratio(trace, room)
            outcome = replace(outcome, optimum_hit_tokens=known[room])
        outcomes.append(outcome)
    return outcomes
