"""Faults: what can go wrong with a call of a tier, and when. `kvtier.testing.FaultyTier` makes it happen."""

import enum
from dataclasses import dataclass

from kvtier.errors import ConfigError

__all__ = ["ALL", "VERBS", "Fault", "Kind"]

ALL = "*"
"""In `Fault.verb`: every verb that the kind can befall."""

VERBS = frozenset(
    {
        "abort",
        "acquire",
        "clear",
        "coldest",
        "commit",
        "contains",
        "duplicate",
        "flush",
        "hint",
        "read",
        "release",
        "release_owner",
        "remove",
        "reserve",
        "seal",
        "stats",
        "write",
    }
)
_TICKETED = frozenset({"contains", "acquire", "read", "write", "remove", "clear"})


class Kind(enum.StrEnum):
    """What goes wrong. Items before `Fault.first_item` of a batch are spared where a kind hits items."""

    LATENCY = "latency"  # the call takes longer
    UNAVAILABLE = "unavailable"  # the tier as a whole raises TierUnavailable
    HANG = "hang"  # no answer until the tier is healed; TIMEOUT where the call's deadline passes before
    LOST = "lost"  # the work is done, its completion arrives when the tier is healed, whatever the deadline
    TIMEOUT = "timeout"  # every item is TIMEOUT, and nothing was done
    EIO = "eio"  # the device fails: items are MISS, buffers hold garbage; what is written is FULL
    SHORT = "short"  # half of an item's bytes arrive, garbage behind them: MISS
    CORRUPT = "corrupt"  # a bit flips on the way out and the checksum finds it: CORRUPT, and the record is gone
    ROT = "rot"  # a stored bit flips, unnoticed as yet
    VANISH = "vanish"  # somebody else drops the records: after `contains` said OK, before `acquire`, before `read`
    ENOSPC = "enospc"  # no room: Full or FULL
    REFUSE = "refuse"  # `commit` drops the records silently


_BEFALLS = {
    Kind.LATENCY: VERBS,
    Kind.UNAVAILABLE: VERBS,
    Kind.HANG: VERBS,
    Kind.LOST: _TICKETED,
    Kind.TIMEOUT: _TICKETED,
    Kind.EIO: frozenset({"contains", "acquire", "read", "write"}),
    Kind.SHORT: frozenset({"read"}),
    Kind.CORRUPT: frozenset({"acquire", "read"}),
    Kind.ROT: frozenset({"acquire", "read"}),
    Kind.VANISH: frozenset({"contains", "acquire", "read"}),
    Kind.ENOSPC: frozenset({"reserve", "write"}),
    Kind.REFUSE: frozenset({"commit"}),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of failure of one verb.

    Args:
        verb: of `kvtier.tiers.Tier`, or `ALL`.
        kind: what goes wrong.
        nth: strikes only this call of the verb, counted from 1 since the fault is in force; None: any.
        probability: of striking a call.
        first_item: the first item of a batch that is hit.
        seconds, jitter: of `LATENCY`: fixed, and uniformly random on top.
        seed: of the dice.

    Raises:
        ConfigError: a verb that does not exist or that the kind cannot befall, or a number out of range.
    """

    verb: str
    kind: Kind
    nth: int | None = None
    probability: float = 1.0
    first_item: int = 0
    seconds: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.verb != ALL and not self.fits(self.verb):
            raise ConfigError(f"{self.kind} of {self.verb!r}: expected {ALL!r} or one of {sorted(_BEFALLS[self.kind])}")
        if not 0 <= self.probability <= 1 or (self.nth is not None and self.nth < 1):
            raise ConfigError(f"{self}: expected a probability of 0 to 1, and nth of at least 1")
        if min(self.first_item, self.seconds, self.jitter) < 0:
            raise ConfigError(f"{self}: first_item, seconds and jitter must be at least 0")

    def fits(self, verb: str) -> bool:
        """Whether this kind can befall the verb."""
        return verb in _BEFALLS[self.kind]
