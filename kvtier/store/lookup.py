"""Galloping look-up: how many leading keys of a chain a tier holds, in O(log n) index probes."""

from collections.abc import Sequence

from kvtier.tiers import Status, Tier

__all__ = ["leading_run"]


def leading_run(tier: Tier, keys: Sequence[bytes]) -> int:
    """Length of the leading run of `keys` in `tier`.

    Relies on prefix closure (a present block has its ancestors), so it is a hint: `acquire` verifies the run.
    """
    if not keys:
        return 0
    probes = _gallop(len(keys))
    found = _present(tier, [keys[at] for at in probes])
    misses = [at for at, here in zip(probes, found, strict=True) if not here]
    if not misses:
        return len(keys)
    high = misses[0]
    low = max((at for at, here in zip(probes, found, strict=True) if here and at < high), default=-1)
    while high - low > 1:
        middle = (low + high) // 2
        if _present(tier, [keys[middle]])[0]:
            low = middle
        else:
            high = middle
    return low + 1


def _gallop(count: int) -> list[int]:
    probes, at = [], 1
    while at < count:
        probes.append(at - 1)
        at *= 2
    return [*probes, count - 1]


def _present(tier: Tier, keys: Sequence[bytes]) -> list[bool]:
    return [status is Status.OK for status in tier.contains(keys).wait().statuses]
