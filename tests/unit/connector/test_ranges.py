"""RangeTransfers: blocks in several ranges of memory go down and come back, or leave the memory as it was."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.connector.ranges import Part, RangeTransfers
from kvtier.cpu import HostTier
from kvtier.errors import CapacityError, ConfigError, FormatMismatch
from kvtier.metrics import Metrics
from kvtier.store import StoreOptions, TieredStore
from kvtier.tiers import Handle, Ticket, Tier, TierCaps
from tests.store_world import BLOCK, NS, content, held, key, keys, memory_tier, nothing_is_held

HOST_BLOCKS = 16
PIECES = 3
WIDTH = BLOCK // PIECES + 1  # the last range of a block is the shortest


class Memory:
    """An engine's memory: range r of block b lies at row b of plane r, so that no block is contiguous."""

    def __init__(self, blocks: int) -> None:
        self.planes = np.full((PIECES, blocks, WIDTH), 0xEE, np.uint8)

    def part(self, block: int) -> Part:
        sizes = [min(WIDTH, BLOCK - at * WIDTH) for at in range(PIECES)]
        return [(self.planes[at, block].ctypes.data, size) for at, size in enumerate(sizes)]

    def parts(self, start: int, stop: int) -> list[Part]:
        return [self.part(block) for block in range(start, stop)]

    def fill(self, names: Sequence[bytes]) -> None:
        for block, name in enumerate(names):
            padded = np.frombuffer(content(name).ljust(PIECES * WIDTH, b"\xee"), np.uint8)
            self.planes[:, block] = padded.reshape(PIECES, WIDTH)

    def block(self, block: int) -> bytes:
        return self.planes[:, block].tobytes()[:BLOCK]

    def untouched(self, start: int) -> bool:
        return bool((self.planes[:, start:] == 0xEE).all())


def store_over(
    lower: Sequence[Tier], host_blocks: int = HOST_BLOCKS, metrics: Metrics | None = None, **options: object
) -> TieredStore:
    options = {"writeback_bytes": host_blocks * BLOCK // 4} | options
    return TieredStore(HostTier(host_blocks * BLOCK), lower, metrics=metrics, options=StoreOptions(**options))


def holds_nothing_soon(store: TieredStore) -> bool:
    """What was read ahead of a run that ended early arrives, and is let go of."""
    until = time.monotonic() + 10
    while not nothing_is_held(store) and time.monotonic() < until:
        time.sleep(0.01)
    return nothing_is_held(store)


@pytest.mark.parametrize("parts", [1, 2])
def test_more_blocks_than_host_holds_go_down_and_come_back(parts):
    count = 40
    below = memory_tier(count * parts)
    store = store_over([below])
    moves = RangeTransfers(store, NS, BLOCK, parts)
    names = keys("chain", count, parts)
    there = Memory(count * parts)
    there.fill(names)
    assert moves.save(keys("chain", count, parts), there.parts(0, count * parts)) == count
    store.settle()
    assert all(held(below, names)), "nothing was dropped on the way, though host is a fraction of it"
    back = Memory(count * parts)
    assert moves.present(names) == count
    assert moves.load(names, back.parts(0, count * parts)) == count
    assert all(back.block(at) == content(name) for at, name in enumerate(names))
    assert holds_nothing_soon(store)
    store.close()


def test_what_is_missing_ends_the_run_and_leaves_its_memory_alone():
    below = memory_tier(64)
    store = store_over([below])
    moves = RangeTransfers(store, NS, BLOCK)
    there = Memory(20)
    there.fill(keys("chain", 20))
    moves.save(keys("chain", 20), there.parts(0, 20))
    store.delete([key("chain", 11)])
    back = Memory(20)
    assert moves.load(keys("chain", 20), back.parts(0, 20)) == 11
    assert back.block(10) == content(key("chain", 10))
    assert back.untouched(11)
    assert holds_nothing_soon(store)
    store.close()


def test_what_is_there_is_not_written_again():
    below = memory_tier(64)
    store = store_over([below])
    moves = RangeTransfers(store, NS, BLOCK)
    there = Memory(8)
    there.fill(keys("chain", 8))
    assert moves.save(keys("chain", 8), there.parts(0, 8)) == 8
    before = store.metrics.value("put_blocks_total", outcome="stored")
    assert moves.save(keys("chain", 8), there.parts(0, 8)) == 8
    assert store.metrics.value("put_blocks_total", outcome="stored") == before == 8
    store.close()


class StuckTier(HostTier):
    """Takes no byte until it may."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(64 * BLOCK, name="stuck", metrics=metrics)
        self.free = threading.Event()

    def write(self, pairs: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        assert self.free.wait(30)
        return super().write(pairs, deadline)


def test_a_tier_that_takes_nothing_is_waited_for_once():
    metrics = Metrics()
    below = StuckTier(metrics)
    store = store_over([below], metrics=metrics, load_deadline=0.2)
    moves = RangeTransfers(store, NS, BLOCK)
    there = Memory(30)
    there.fill(keys("chain", 30))
    taken = moves.save(keys("chain", 30), there.parts(0, 30))
    assert 0 < taken < 30, "as much as may wait"
    waits = store.metrics.value("timeouts_total", tier="stuck", operation="drain")
    assert waits >= 1
    assert moves.save(keys("other", 4), there.parts(0, 4)) == 0
    assert store.metrics.value("timeouts_total", tier="stuck", operation="drain") == waits
    below.free.set()
    store.settle()
    assert moves.save(keys("chain", 30), there.parts(0, 30)) == 30
    store.close()


def test_a_read_that_is_late_does_not_touch_the_engines_memory():
    class LateTier(HostTier):
        def read(self, pairs: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
            assert free.wait(30)
            return super().read(pairs, deadline)

    free = threading.Event()
    below = LateTier(64 * BLOCK, name="late")
    store = store_over([below], host_blocks=8, load_deadline=0.3)
    moves = RangeTransfers(store, NS, BLOCK)
    there = Memory(24)
    there.fill(keys("chain", 24))
    moves.save(keys("chain", 24), there.parts(0, 24))
    store.settle()
    back = Memory(24)
    assert moves.load(keys("chain", 24), back.parts(0, 24)) < 24
    before: NDArray[np.uint8] = back.planes.copy()
    free.set()
    store.close()
    assert np.array_equal(back.planes, before)


def test_what_makes_no_sense_is_refused_before_anything_moves():
    store = store_over([])
    moves = RangeTransfers(store, NS, BLOCK, parts=2)
    memory = Memory(4)
    with pytest.raises(FormatMismatch, match="3 keys and 4 parts, 2 parts per block"):
        moves.load(keys("chain", 3), memory.parts(0, 4))
    with pytest.raises(FormatMismatch, match=rf"{BLOCK - 1} bytes in 1 ranges: expected {BLOCK}"):
        moves.save(keys("chain", 1, 2), [[(memory.planes.ctypes.data, BLOCK - 1)]] * 2)
    with pytest.raises(CapacityError, match="as staging for blocks of 65536 bytes"):
        RangeTransfers(store, NS, 16 * BLOCK)
    assert holds_nothing_soon(store)
    store.close()
    lossy = store_over([], accept_lossy=True, formats={"host": "int8"})
    with pytest.raises(ConfigError, match=r"host\.format = 'int8'"):
        RangeTransfers(lossy, NS, BLOCK)
    lossy.close()


def test_a_tier_that_keeps_runs_is_refused():
    class RunTier(HostTier):
        caps = TierCaps(run=4)

    store = store_over([RunTier(64 * BLOCK, name="runs")])
    with pytest.raises(ConfigError, match=r"tier runs keeps several blocks .* say run=1 in"):
        RangeTransfers(store, NS, BLOCK)
    store.close()


def test_nothing_is_nothing():
    store = store_over([])
    moves = RangeTransfers(store, NS, BLOCK)
    assert (moves.present([]), moves.load([], []), moves.save([], [])) == (0, 0, 0)
    store.close()
