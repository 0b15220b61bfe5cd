"""Replay: published traces of LLM serving through the real store, to see what a policy or a tier is worth."""

from kvtier.replay.comparison import optimum_ratio, replay_all
from kvtier.replay.plan import ReplayPlan
from kvtier.replay.readers import read_trace
from kvtier.replay.report import Outcome, TierOutcome
from kvtier.replay.runner import replay
from kvtier.replay.trace import ReadOptions, Trace, TraceRequest

__all__ = [
    "Outcome",
    "ReadOptions",
    "ReplayPlan",
    "TierOutcome",
    "Trace",
    "TraceRequest",
    "optimum_ratio",
    "read_trace",
    "replay",
    "replay_all",
]
