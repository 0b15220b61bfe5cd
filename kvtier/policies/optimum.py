"""The offline optimum: what a cache could hit at best that knew the future."""

from collections.abc import Sequence
from heapq import heappop, heappush

from kvtier.errors import CapacityError

__all__ = ["optimum_hits"]

_NEVER = 1 << 62


def optimum_hits(chains: Sequence[Sequence[bytes | int]], capacity: int) -> list[int]:
    """Leading hits of each request under Belady's MIN with bypass, ties deepest first.

    An ancestor's next use is never later than a descendant's, so what MIN keeps is closed under prefixes by itself,
    and its block hits bound those of every policy. Cost: O(n log n) for n blocks touched.

    Args:
        chains: per request the ids of its blocks from depth 0 on; an id names its whole prefix.
        capacity: blocks that the cache holds between two requests.

    Returns:
        Per request the number of leading blocks that are resident when it comes.

    Raises:
        CapacityError: a negative capacity.
    """
    if capacity < 0:
        raise CapacityError(f"optimum of {capacity} blocks: expected 0 or more")
    following = _next_uses(chains)
    resident: dict[bytes | int, int] = {}  # -> next use
    farthest: list[tuple[int, int, bytes | int]] = []
    hits: list[int] = []
    for chain, uses in zip(chains, following, strict=True):
        hits.append(next((at for at, block in enumerate(chain) if block not in resident), len(chain)))
        for depth, (block, use) in enumerate(zip(chain, uses, strict=True)):
            if use == _NEVER:
                resident.pop(block, None)
            else:
                resident[block] = use
                heappush(farthest, (-use, -depth, block))
        while len(resident) > capacity:
            use, _, block = heappop(farthest)
            if resident.get(block) == -use:
                del resident[block]
    return hits


def _next_uses(chains: Sequence[Sequence[bytes | int]]) -> list[list[int]]:
    """Per request and block, the index of the next request that has the block."""
    coming: dict[bytes | int, int] = {}
    uses: list[list[int]] = []
    for at in reversed(range(len(chains))):
        uses.append([coming.get(block, _NEVER) for block in chains[at]])
        coming.update(dict.fromkeys(chains[at], at))
    uses.reverse()
    return uses
