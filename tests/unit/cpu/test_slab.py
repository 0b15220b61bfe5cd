"""HostSlab: no overlap, no drift, no lasting fragmentation."""

import random
from itertools import pairwise

import pytest

from kvtier.cpu import HostSlab
from kvtier.errors import CapacityError, LeaseError

MIB = 1 << 20


@pytest.mark.parametrize("size", [4096, 65536, 69632, MIB, 5 * MIB])
def test_one_size_uses_the_whole_slab(size: int) -> None:
    slab = HostSlab(64 * MIB)
    offsets = [slab.allocate(size) for _ in range(64 * MIB // size)]
    assert None not in offsets
    assert slab.allocate(size) is None
    assert len(set(offsets)) == len(offsets)
    assert all(offset % 4096 == 0 for offset in offsets if offset is not None)
    slab.check()


def test_random_sizes_leave_no_overlap_and_no_fragmentation() -> None:
    dice = random.Random(1)
    slab = HostSlab(32 * MIB)
    sizes = [4096, 5000, 65536, 100_000, 300_000, MIB, 4 * MIB]
    live: dict[int, int] = {}
    for step in range(100_000):
        if dice.random() < 0.52:
            size = dice.choice(sizes)
            offset = slab.allocate(size)
            if offset is not None:
                live[offset] = size
        elif live:
            offset = dice.choice(list(live)) if step % 50 == 0 else next(iter(live))
            slab.free(offset)
            del live[offset]
        if step % 5000 == 0:
            slab.check()
            ordered = sorted(live.items())
            assert all(a + n <= b for (a, n), (b, _) in pairwise(ordered))
    for offset in live:
        slab.free(offset)
    slab.check()
    assert slab.used_bytes == 0
    assert slab.allocate(32 * MIB) == 0


def test_memory_of_one_size_serves_another_later() -> None:
    slab = HostSlab(16 * MIB)
    small = [slab.allocate(65536) for _ in range(256)]
    assert slab.allocate(4 * MIB) is None
    for offset in small:
        assert offset is not None
        slab.free(offset)
    assert None not in [slab.allocate(4 * MIB) for _ in range(4)]


def test_double_free_is_refused() -> None:
    slab = HostSlab(MIB)
    offset = slab.allocate(4096)
    assert offset is not None
    slab.free(offset)
    with pytest.raises(LeaseError, match=str(offset)):
        slab.free(offset)
    assert slab.used_bytes == 0


@pytest.mark.parametrize("capacity", [0, -4096, 4095, 1 << 62, True, 8192.0, "8192"])
def test_absurd_capacities_are_refused(capacity: int) -> None:
    with pytest.raises(CapacityError, match=r"bytes.*expected"):
        HostSlab(capacity)
