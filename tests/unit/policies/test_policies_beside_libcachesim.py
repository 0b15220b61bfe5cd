"""On a stream of blocks without prefixes, LRU, ARC and Clock-2 miss exactly as often as libcachesim's."""

from collections.abc import Callable

import libcachesim
import numpy as np
import pytest

from kvtier.policies import make_policy

CAPACITIES = (50, 700)


def zipf() -> list[int]:
    return (np.random.default_rng(3).zipf(1.2, 20_000) % 20_000).tolist()


def scans() -> list[int]:
    """A hot set, interrupted by scans of which every other one comes again."""
    dice = np.random.default_rng(4)
    stream: list[int] = []
    while len(stream) < 20_000:
        stream += (dice.zipf(1.3, 400) % 5000).tolist()
        first = 10**6 + int(dice.integers(0, 40)) * 100
        stream += range(first, first + 150)
    return stream


def misses(name: str, capacity: int, stream: list[int]) -> int:
    policy = make_policy(name, capacity)
    slots: dict[int, int] = {}
    free = list(range(capacity))
    missed = 0
    for block in stream:
        if block in slots:
            policy.hit([slots[block]])
            continue
        missed += 1
        key = block.to_bytes(16, "little")
        if not free:
            victims = policy.victims(1, [key])
            policy.remove(victims, evicted=True)
            slots = {there: slot for there, slot in slots.items() if slot != victims[0]}
            free += victims
        slots[block] = free.pop()
        policy.insert([slots[block]], [key], [None])
    return missed


def reference_misses(cache, stream: list[int]) -> int:
    missed = 0
    for at, block in enumerate(stream):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = block, 1, at
        missed += not cache.get(request)
    return missed


REFERENCES = {
    "lru": libcachesim.LRU,
    "arc": libcachesim.ARC,
    "clock2": lambda capacity: libcachesim.Clock(capacity, n_bit_counter=2),
    "s3fifo": libcachesim.S3FIFO,
}


@pytest.mark.parametrize("name", ["lru", "arc", "clock2"])
@pytest.mark.parametrize("stream", [zipf, scans])
def test_misses_are_the_same(name: str, stream: Callable[[], list[int]]) -> None:
    blocks = stream()
    for capacity in CAPACITIES:
        assert misses(name, capacity, blocks) == reference_misses(REFERENCES[name](capacity), blocks)


@pytest.mark.parametrize("stream", [zipf, scans])
def test_s3fifo_misses_nearly_as_often(stream: Callable[[], list[int]]) -> None:
    """Its ghosts differ, and it fills its small queue first, as the paper does."""
    blocks = stream()
    for capacity in CAPACITIES:
        ours, theirs = misses("s3fifo", capacity, blocks), reference_misses(REFERENCES["s3fifo"](capacity), blocks)
        assert ours == pytest.approx(theirs, rel=0.02)
