"""The exception tree: every error that kvtier raises on purpose descends from `KVTierError`.

A cache miss is a return value, never an exception; a damaged block is a miss that is counted.
"""

from collections.abc import Mapping

__all__ = [
    "BlocksRemain",
    "CapacityError",
    "ConfigError",
    "CorruptObject",
    "FormatMismatch",
    "KVTierError",
    "LeaseError",
    "ModelError",
    "RequestError",
    "TierError",
    "TierFull",
    "TierTimeout",
    "TierUnavailable",
]


class KVTierError(Exception):
    """Root of the tree. The message names the value, what was expected and what to do."""


class ConfigError(KVTierError):
    """A setting is unknown, malformed or contradicts another one."""


class ModelError(KVTierError):
    """A model's files are missing, damaged or of an architecture that is not supported."""


class RequestError(KVTierError):
    """A generation request cannot be served as written (empty, too long, bad parameters)."""


class CapacityError(KVTierError):
    """A pool or tier is too small for what was asked of it."""


class FormatMismatch(KVTierError):
    """Bytes, layout and format do not belong together."""


class LeaseError(KVTierError):
    """A lease or handle was used after its end, twice, or in the wrong state."""


class TierError(KVTierError):
    """A tier failed as a whole (a failed item is a status, not an exception)."""


class TierUnavailable(TierError):
    """The tier cannot be opened or reached."""


class TierFull(TierError):
    """The tier cannot make room for what it must hold."""


class TierTimeout(TierError):
    """A deadline passed before the tier answered."""


class BlocksRemain(TierError):
    """Blocks that were to go are still in some tiers, and may be served again; from all others they are gone.

    Args:
        tiers: names of those tiers, and why each kept them.
        late: one of them gave no answer in time, and may still do it.
    """

    def __init__(self, tiers: Mapping[str, str], *, late: bool) -> None:
        why = "; ".join(f"{name} ({error})" for name, error in tiers.items())
        super().__init__(f"blocks remain in {why}: they are gone from all other tiers; repeat it once these can do it")
        self.tiers = tuple(tiers)
        self.late = late


class CorruptObject(TierError):
    """A tier's own directory or index is damaged beyond what a miss can express."""
