"""Galloping look-up: how many leading blocks of a chain a tier holds, in O(log n) index probes."""

import time
from collections.abc import Callable, Sequence

from kvtier.errors import TierTimeout
from kvtier.tiers import Status, Tier

__all__ = ["leading_run", "present"]

_WIDE = 64


def leading_run(
    count: int, held: Callable[[Sequence[int]], Sequence[bool]], *, wide: bool = False, few: int = 0
) -> int:
    """Length of the leading run of `count` blocks that is held.

    Relies on prefix closure (a present block has its ancestors), so it is a hint: `acquire` verifies the run.

    Args:
        count: blocks in all.
        held: block positions -> whether each is there.
        few: no more blocks than these are all asked for at once.
        wide: asking costs a round trip, whose answer is waited for, and work for each block: few of the first, and not
            many blocks in any.
    """
    if count <= 0:
        return 0
    probes: Sequence[int] = range(count) if count <= few else _gallop(count)
    found = held(probes)
    misses = [at for at, here in zip(probes, found, strict=True) if not here]
    if not misses:
        return count
    high = misses[0]
    low = max((at for at, here in zip(probes, found, strict=True) if here and at < high), default=-1)
    while high - low > 1:
        probes = _between(low, high, _WIDE if wide else 1)
        leading = next((at for at, here in enumerate(held(probes)) if not here), len(probes))
        low, high = [low, *probes][leading], [*probes, high][leading]
    return low + 1


def _between(low: int, high: int, most: int) -> Sequence[int]:
    """Positions between two, all of them or `most` at equal distances."""
    inner = range(low + 1, high)
    return inner if len(inner) <= most else [low + (high - low) * at // (most + 1) for at in range(1, most + 1)]


def _gallop(count: int) -> list[int]:
    probes, at = [], 1
    while at < count:
        probes.append(at - 1)
        at *= 2
    return [*probes, count - 1]


def present(tier: Tier, keys: Sequence[bytes], seconds: float, *, exact: bool) -> list[bool]:
    """Which keys a tier holds; one batch, answered within so many seconds or not at all.

    A tier on this machine, which mostly answers in this thread, is given no deadline: all that could pass before it
    begins is that this thread is held up, and an answer is worth no less for that.

    Raises:
        TierTimeout: the tier did not answer.
    """
    deadline = time.monotonic() + seconds if tier.caps.remote else None
    statuses = tier.contains(keys, deadline, exact=exact).wait(seconds).statuses
    if Status.TIMEOUT in statuses:
        raise TierTimeout(f"tier {tier.name} did not answer a look-up within {seconds} s")
    return [status is Status.OK for status in statuses]
