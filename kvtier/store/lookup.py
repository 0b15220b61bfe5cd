"""Galloping look-up: how many leading blocks of a chain a tier holds, in O(log n) index probes."""

import time
from collections.abc import Callable, Sequence

from kvtier.errors import TierTimeout
from kvtier.tiers import Status, Tier

__all__ = ["leading_run", "present"]


def leading_run(count: int, held: Callable[[Sequence[int]], Sequence[bool]], *, wide: bool = False) -> int:
    """Length of the leading run of `count` blocks that is held.

    Relies on prefix closure (a present block has its ancestors), so it is a hint: `acquire` verifies the run.

    Args:
        count: blocks in all.
        held: block positions -> whether each is there.
        wide: asking costs a round trip: never more than two, the second for all that the first left open.
    """
    if count <= 0:
        return 0
    probes = _gallop(count)
    found = held(probes)
    misses = [at for at, here in zip(probes, found, strict=True) if not here]
    if not misses:
        return count
    high = misses[0]
    low = max((at for at, here in zip(probes, found, strict=True) if here and at < high), default=-1)
    if wide and high - low > 1:
        between = held(range(low + 1, high))
        return next((low + 1 + at for at, here in enumerate(between) if not here), high)
    while high - low > 1:
        middle = (low + high) // 2
        if held([middle])[0]:
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


def present(tier: Tier, keys: Sequence[bytes], seconds: float, *, exact: bool) -> list[bool]:
    """Which keys a tier holds; one batch, answered within so many seconds or not at all.

    Raises:
        TierTimeout: the tier did not answer.
    """
    deadline = time.monotonic() + seconds
    statuses = tier.contains(keys, deadline, exact=exact).wait(seconds).statuses
    if Status.TIMEOUT in statuses:
        raise TierTimeout(f"tier {tier.name} did not answer a look-up within {seconds} s")
    return [status is Status.OK for status in statuses]
