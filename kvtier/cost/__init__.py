"""What moving and computing KV costs: measured speeds, and the choice between loading and recomputing."""

from kvtier.cost.choice import Choice, Decision, LoadOrRecompute, Run
from kvtier.cost.prefill import PrefillMeter, PrefillShape
from kvtier.cost.speed import UNMEASURED, SpeedMeter, TierSpeed

__all__ = [
    "UNMEASURED",
    "Choice",
    "Decision",
    "LoadOrRecompute",
    "PrefillMeter",
    "PrefillShape",
    "Run",
    "SpeedMeter",
    "TierSpeed",
]
