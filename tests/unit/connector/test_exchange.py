"""Exchange: rows of an engine's memory reach the lower tiers and come back, verified, or are reported as not moved."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.connector.exchange import Exchange, Moved
from kvtier.cpu import HostTier
from kvtier.errors import CapacityError, FormatMismatch
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeTier
from kvtier.store import TieredStore
from kvtier.tiers import BlockRef, Handle, Ticket, Tier
from tests.store_world import BLOCK, NS, content, held, key, memory_tier, nothing_is_held

BLOCKS = 40
HOST_BLOCKS = 16


def memory(rows: int = BLOCKS) -> NDArray[np.int8]:
    return np.zeros((rows, BLOCK), np.int8)


def named(chain: object, count: int = BLOCKS) -> list[bytes]:
    return [key(chain, at) for at in range(count)]


def refs(keys: Sequence[bytes]) -> list[BlockRef]:
    return [BlockRef(one, NS, -1, None, True) for one in keys]


def filled(keys: Sequence[bytes]) -> NDArray[np.int8]:
    return np.stack([np.frombuffer(content(one), np.int8) for one in keys])


def ended(exchange: Exchange) -> Moved:
    exchange.drain()
    (moved,) = exchange.finished()
    assert exchange.finished() == []
    return moved


def store_over(below: Tier) -> TieredStore:
    return TieredStore(HostTier(HOST_BLOCKS * BLOCK), [below])


def saved(store: TieredStore, keys: Sequence[bytes]) -> None:
    exchange = Exchange(store, filled(keys).data)
    exchange.save(1, refs(keys), range(len(keys)))
    moved = ended(exchange)
    assert moved.job == 1
    assert all(moved.good)
    assert moved.nbytes == len(keys) * BLOCK
    exchange.close()


def flip_a_byte(directory: Path, block: bytes) -> None:
    """In the file that holds these bytes."""
    for path in directory.rglob("*"):
        at = path.read_bytes().find(block) if path.is_file() else -1
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 9)
                file.write(bytes([block[9] ^ 1]))


def test_a_job_larger_than_host_goes_down_and_comes_back(tmp_path: Path) -> None:
    keys = named("there and back")
    rows = np.random.default_rng(0).permutation(BLOCKS)
    store = store_over(NvmeTier(tmp_path, 1 << 24))
    try:
        saved(store, keys)
        assert held(store.lower[0], keys) == [True] * BLOCKS
        there = memory()
        exchange = Exchange(store, there.data)
        exchange.load(7, keys, rows.tolist())
        moved = ended(exchange)
        assert (moved.job, moved.good, moved.nbytes) == (7, (True,) * BLOCKS, BLOCKS * BLOCK)
        assert np.array_equal(there[rows], filled(keys))
        assert nothing_is_held(store)
        exchange.close()
    finally:
        store.close()


def test_look_ups_tell_what_some_tier_has() -> None:
    store = store_over(memory_tier(BLOCKS))
    try:
        keys = named("some")
        saved(store, keys[:3])
        store.clear("host")
        exchange = Exchange(store, memory().data)
        assert [exchange.present(one) for one in keys[:4]] == [True, True, True, False]
        assert exchange.present_anywhere([keys[5], keys[1]]) == [False, True]
        exchange.close()
    finally:
        store.close()


def test_a_damaged_block_leaves_its_row_alone(tmp_path: Path) -> None:
    keys = named("damaged")
    store = store_over(NvmeTier(tmp_path, 1 << 24))
    saved(store, keys)
    store.close()
    flip_a_byte(tmp_path, content(keys[3]))
    metrics = Metrics()
    store = store_over(NvmeTier(tmp_path, 1 << 24, metrics=metrics))
    try:
        there = memory()
        exchange = Exchange(store, there.data)
        exchange.load(1, keys, range(BLOCKS))
        good = ended(exchange).good
        assert good[:3] == (True,) * 3
        assert not good[3]
        for at, one in enumerate(keys):
            assert there[at].tobytes() == (content(one) if good[at] else bytes(BLOCK))
        assert metrics.value("corrupt_blocks_total", tier="nvme") == 1
        assert not exchange.present(keys[3])
        exchange.close()
    finally:
        store.close()


class HeldTier(HostTier):
    """A tier below that writes when it may."""

    def __init__(self) -> None:
        super().__init__(BLOCKS * BLOCK, name="below")
        self.may_write = threading.Event()

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        assert self.may_write.wait(30)
        return super().write(items, deadline)


def test_a_save_ends_when_the_lower_tier_has_it_and_blocks_nobody_until_then() -> None:
    below = HeldTier()
    store = store_over(below)
    try:
        keys = named("held")
        exchange, other = Exchange(store, filled(keys).data), Exchange(store, memory().data)
        exchange.save(1, refs(keys), range(BLOCKS))
        other.load(2, named("unknown", 2), [0, 1])
        assert ended(other).good == (False, False)
        other.close()
        assert exchange.finished() == []
        assert held(below, keys) == [False] * BLOCKS
        below.may_write.set()
        assert all(ended(exchange).good)
        assert held(below, keys) == [True] * BLOCKS
        exchange.close()
    finally:
        store.close()


def test_a_job_that_comes_after_the_end_is_reported_as_not_moved() -> None:
    store = store_over(memory_tier(BLOCKS))
    try:
        exchange = Exchange(store, memory().data)
        exchange.close()
        exchange.load(3, named("late"), range(BLOCKS))
        assert ended(exchange)[:3] == (3, (False,) * BLOCKS, 0)
        exchange.load(4, [], [])
        assert ended(exchange)[:3] == (4, (), 0)
    finally:
        store.close()


def test_memory_of_another_shape_and_a_host_without_room_are_refused() -> None:
    store = TieredStore(HostTier(2 * BLOCK))
    try:
        with pytest.raises(FormatMismatch, match="expected bytes"):
            Exchange(store, np.zeros(BLOCK, np.int8).data)
        with pytest.raises(CapacityError, match=f"{8 * BLOCK} at least"):
            Exchange(store, memory().data)
    finally:
        store.close()
