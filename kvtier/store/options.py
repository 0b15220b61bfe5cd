"""How a store behaves, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from kvtier.errors import ConfigError
from kvtier.policies.admission import AdmissionPolicy, SecondTouch
from kvtier.policies.prefetch import NoPrefetch, PrefetchPolicy

__all__ = ["StoreOptions", "WriteRule"]

# Thirty years: threads cannot wait for ever.
_LONGEST = 1e9

WriteRule: TypeAlias = Literal["through", "leave", "second_touch"]


@dataclass(frozen=True)
class StoreOptions:
    """Options of a `TieredStore`.

    Args:
        accept_lossy: requests that do not say take lossy blocks.
        formats: tier name -> format id for every namespace whose registration names none; raw where absent.
        writeback_bytes: how much of host may wait to be written to each lower tier.
        staging_bytes: memory per tier for blocks that are decoded or encoded on their way, at least one block.
        write_rule: blocks go to lower tiers at once, when they are about to leave host, or at their second touch.
        write_budget: bytes per day that may be written to lower tiers, not counting remote ones; above it, second touch
            only, and nothing a whole day above. None: no limit.
        admission: what is asked under the rule `second_touch`, also where the budget brings it about.
        load_deadline: seconds after which a load that was given no deadline is a miss; close, flush and removals
            wait as long for a tier that makes no progress.
        session_keys: keys of which it is remembered to which session they belong; of those beyond it nobody knows.
        prefetch: what is brought to host before it is asked for.
        breaker_timeouts: consecutive timeouts after which a tier is skipped.
        breaker_pause: seconds until a skipped tier is tried again, doubled at every failure up to sixteen times.
    """

    accept_lossy: bool = False
    formats: Mapping[str, str] = field(default_factory=dict)
    writeback_bytes: int = 1 << 28
    staging_bytes: int = 1 << 26
    write_rule: WriteRule = "through"
    write_budget: int | None = None
    admission: AdmissionPolicy = field(default_factory=SecondTouch)
    load_deadline: float = 10.0
    session_keys: int = 1 << 20
    prefetch: PrefetchPolicy = field(default_factory=NoPrefetch)
    breaker_timeouts: int = 3
    breaker_pause: float = 5.0

    def __post_init__(self) -> None:
        if self.write_rule not in get_args(WriteRule):
            raise ConfigError(f"write_rule {self.write_rule!r}: expected one of {', '.join(get_args(WriteRule))}")
        positive = {
            "writeback_bytes": self.writeback_bytes,
            "staging_bytes": self.staging_bytes,
            "load_deadline": self.load_deadline,
            "session_keys": self.session_keys,
            "breaker_timeouts": self.breaker_timeouts,
            "breaker_pause": self.breaker_pause,
        }
        if self.write_budget is not None:
            positive["write_budget"] = self.write_budget
        bad = next((name for name, value in positive.items() if not value > 0), None)
        if bad is not None:
            raise ConfigError(f"{bad} = {positive[bad]}: expected more than 0")
        if self.load_deadline > _LONGEST:
            raise ConfigError(f"load_deadline = {self.load_deadline}: expected at most {_LONGEST:g} s")
