"""Writing into reservations: what arrives is committed, what does not is given back, whatever happens."""

from collections.abc import Sequence

from kvtier.tiers import Handle, Status, Tier

__all__ = ["write_reserved"]


def write_reserved(tier: Tier, pairs: Sequence[tuple[Handle, memoryview]]) -> int:
    """Write and commit reserved records; no reservation is left, also when the tier raises.

    Args:
        tier: the reservations' tier.
        pairs: reservation and bytes, parents first.

    Returns:
        How many records were committed.
    """
    try:
        statuses = tier.write(pairs).wait().statuses if pairs else ()
        good = [slot for (slot, _), status in zip(pairs, statuses, strict=True) if status is Status.OK]
        tier.commit(good)
    finally:
        # Leaves committed ones alone.
        tier.abort([slot for slot, _ in pairs])
    return len(good)
