"""The optimum: against exhaustive search on small trees, and never below a policy."""

import itertools
import random

import pytest

from kvtier.errors import CapacityError
from kvtier.policies import POLICIES, make_policy, optimum_hits


def best_by_search(chains: list[list[int]], capacity: int) -> int:
    """Leading hits of the best of all ways to keep blocks: tries every content after every request."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for chain in chains:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            run = next((at for at, block in enumerate(chain) if block not in kept), len(chain))
            candidates = sorted(kept | set(chain))
            for size in range(min(capacity, len(candidates)) + 1):
                for content in map(frozenset, itertools.combinations(candidates, size)):
                    after[content] = max(after.get(content, 0), hits + run)
        states = after
    return max(states.values())


def random_chains(dice: random.Random, requests: int, depth: int, fan: int) -> list[list[int]]:
    """Chains over a tree: an id is the path so far."""
    chains = []
    for _ in range(requests):
        path, chain = 1, []
        for _ in range(dice.randint(1, depth)):
            path = path * fan + dice.randrange(fan)
            chain.append(path)
        chains.append(chain)
    return chains


@pytest.mark.parametrize("seed", range(25))
def test_no_content_of_the_cache_hits_more(seed: int) -> None:
    dice = random.Random(seed)
    chains = random_chains(dice, 7, 3, 2)
    for capacity in range(5):
        assert sum(optimum_hits(chains, capacity)) == best_by_search(chains, capacity)


def test_of_equal_next_uses_the_deepest_leaves() -> None:
    assert optimum_hits([[1, 2, 3], [1, 2, 3]], 2) == [0, 2]
    assert optimum_hits([[1, 2, 3], [9], [1, 2, 3]], 2) == [0, 0, 2]
    assert optimum_hits([[b"a"], [b"a"], []], 1) == [0, 1, 0]
    assert optimum_hits([[1], [1]], 0) == [0, 0]
    with pytest.raises(CapacityError, match="optimum of -1 blocks"):
        optimum_hits([], -1)


def replay(name: str, capacity: int, chains: list[list[int]]) -> list[int]:
    """Leading hits under a policy: a request touches its whole chain deepest first, pinned meanwhile."""
    policy = make_policy(name, capacity)
    slots: dict[int, int] = {}
    free = list(range(capacity))
    hits = []
    for chain in chains:
        hits.append(next((at for at, block in enumerate(chain) if block not in slots), len(chain)))
        there = [slots[block] for block in reversed(chain) if block in slots]
        policy.hit(there)
        policy.pin(there)
        fresh = [block for block in chain if block not in slots]
        keys = {block: block.to_bytes(16, "little") for block in fresh}
        while len(free) < len(fresh) and (victims := policy.victims(1, [keys[fresh[-1]]])):
            policy.remove(victims, evicted=True)
            slots = {block: slot for block, slot in slots.items() if slot != victims[0]}
            free += victims
        fresh = fresh[: len(free)][::-1]
        slots.update((block, free.pop()) for block in fresh)
        parents = [slots.get(chain[at - 1]) if (at := chain.index(block)) else None for block in fresh]
        policy.insert([slots[block] for block in fresh], [keys[block] for block in fresh], parents)
        policy.unpin(there)
    return hits


@pytest.mark.parametrize("name", ["lru", "arc", "clock2", "s3fifo"])
def test_no_policy_hits_more(name: str) -> None:
    assert name in POLICIES.names()
    dice = random.Random(name)
    for fan in (2, 3, 6):
        chains = random_chains(dice, 300, 8, fan)
        for capacity in (8, 40, 150):
            found = sum(replay(name, capacity, chains))
            assert 0 < found <= sum(optimum_hits(chains, capacity))
