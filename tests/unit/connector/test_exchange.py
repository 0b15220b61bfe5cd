"""Exchange: rows of an engine's memory reach the lower tiers and come back, verified, or are reported as not moved."""

import threading
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.connector.exchange import Exchange, Moved
from kvtier.cpu import HostTier
from kvtier.errors import CapacityError, FormatMismatch
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import StoreOptions, TieredStore
from kvtier.tiers import Handle, Ticket, Tier
from tests.store_world import BLOCK, NS, content, held, holds_nothing_soon, key, memory_tier

BLOCKS = 40
HOST_BLOCKS = 16


def memory(rows: int = BLOCKS) -> NDArray[np.int8]:
    return np.zeros((rows, BLOCK), np.int8)


def named(chain: object, count: int = BLOCKS) -> list[bytes]:
    return [key(chain, at) for at in range(count)]


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
    exchange = Exchange(store, NS, filled(keys).data)
    exchange.save(1, keys, range(len(keys)))
    assert ended(exchange)[:3] == (1, len(keys), len(keys) * BLOCK)
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
        exchange = Exchange(store, NS, there.data)
        exchange.load(7, keys, rows.tolist())
        assert ended(exchange)[:3] == (7, BLOCKS, BLOCKS * BLOCK)
        assert np.array_equal(there[rows], filled(keys))
        assert holds_nothing_soon(store)
        exchange.close()
    finally:
        store.close()


def test_what_is_there_is_not_moved_again() -> None:
    store = store_over(memory_tier(BLOCKS))
    try:
        keys = named("again")
        saved(store, keys[:3])
        exchange = Exchange(store, NS, filled(keys).data)
        for moved in (2, 0):
            exchange.save(1, keys[:5], range(5))
            assert ended(exchange)[:3] == (1, 5, moved * BLOCK)
        exchange.close()
    finally:
        store.close()


def test_look_ups_tell_what_some_tier_has() -> None:
    store = store_over(memory_tier(BLOCKS))
    try:
        keys = named("some")
        saved(store, keys[:3])
        store.clear("host")
        exchange = Exchange(store, NS, memory().data)
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
        exchange = Exchange(store, NS, there.data)
        exchange.load(1, keys, range(BLOCKS))
        assert ended(exchange).good == 3
        for at, one in enumerate(keys):
            assert there[at].tobytes() == (content(one) if at < 3 else bytes(BLOCK))
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
        exchange, other = Exchange(store, NS, filled(keys).data), Exchange(store, NS, memory().data)
        exchange.save(1, keys, range(BLOCKS))
        other.load(2, named("unknown", 2), [0, 1])
        assert ended(other).good == 0
        other.close()
        assert exchange.finished() == []
        assert held(below, keys) == [False] * BLOCKS
        below.may_write.set()
        assert ended(exchange).good == BLOCKS
        assert held(below, keys) == [True] * BLOCKS
        exchange.close()
    finally:
        store.close()


def test_a_lower_tier_that_hangs_is_waited_for_once_and_told_of() -> None:
    below = HeldTier()
    metrics = Metrics()
    store = TieredStore(
        HostTier(HOST_BLOCKS * BLOCK), [below], metrics=metrics, options=StoreOptions(load_deadline=0.2)
    )
    try:
        rows, keys = filled(named("hanging")), named("hanging")
        exchange = Exchange(store, NS, rows.data)
        exchange.save(1, keys[:2], [0, 1])
        assert ended(exchange).good == 2, "host has them, and they are still to go down"
        waits = metrics.value("timeouts_total", tier="below", operation="drain")
        assert waits == 1
        for job in range(2, 6):
            exchange.save(job, keys[2:4], [2, 3])
            exchange.load(-job, keys[:2], [5, 6])
        exchange.drain()
        assert all(moved.good == 2 for moved in exchange.finished()), "loads and saves go on"
        assert metrics.value("timeouts_total", tier="below", operation="drain") == waits
        assert np.array_equal(rows[5:7], rows[:2])
        below.may_write.set()
        store.settle()
        exchange.save(9, keys[:4], range(4))
        exchange.close()
        store.settle()
        assert held(below, keys[:4]) == [True] * 4, "also what it did not take before"
    finally:
        below.may_write.set()
        store.close()


def test_a_storm_of_jobs_over_tiers_that_evict_moves_right_bytes_or_none(tmp_path: Path) -> None:
    dice = Random(7)
    metrics = Metrics()
    below = NvmeTier(tmp_path, 1 << 20, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0), metrics=metrics)
    options = StoreOptions(writeback_bytes=HOST_BLOCKS * BLOCK // 4)
    store = TieredStore(HostTier(HOST_BLOCKS * BLOCK), [below], metrics=metrics, options=options)
    chains = [named(chain, 30) for chain in range(20)]
    try:
        rows = np.concatenate([filled(keys) for keys in chains])
        source = Exchange(store, NS, rows.data)
        there = memory(16 * 30)
        target = Exchange(store, NS, there.data)
        found = 0
        for turn in range(8):
            there[:] = 0
            asked = [dice.choice(chains)[: dice.randrange(1, 31)] for _ in range(16)]
            for at, keys in enumerate(asked):
                chain = dice.randrange(len(chains))
                source.save(100 * turn + at, chains[chain], range(30 * chain, 30 * chain + 30))
                target.load(at, keys, range(30 * at, 30 * at + len(keys)))
            source.drain()
            target.drain()
            for moved in target.finished():
                mine, keys = there[30 * moved.job : 30 * moved.job + 30], asked[moved.job]
                assert np.array_equal(mine[: moved.good], filled(keys)[: moved.good])
                assert not mine[moved.good :].any()
                found += moved.good
            assert sorted(moved.job - 100 * turn for moved in source.finished()) == list(range(16))
        assert metrics.value("evicted_blocks_total", tier="nvme", reason="capacity") > 0
        assert found > 100
        source.close()
        target.close()
        store.settle()
        assert holds_nothing_soon(store)
    finally:
        store.close()


def test_rows_that_there_are_not_are_refused_before_anything_moves() -> None:
    store = store_over(memory_tier(BLOCKS))
    try:
        exchange = Exchange(store, NS, memory(4).data)
        for rows in ([0, 4], [-1, 0]):
            with pytest.raises(FormatMismatch, match=f"row {min(rows) if min(rows) < 0 else 4} .* one of its 4 rows"):
                exchange.save(1, named("rows", 2), rows)
            with pytest.raises(FormatMismatch, match="one of its 4 rows"):
                exchange.load(1, named("rows", 2), rows)
        exchange.drain()
        assert exchange.finished() == []
        exchange.close()
    finally:
        store.close()


def test_a_job_that_comes_after_the_end_is_reported_as_not_moved() -> None:
    store = store_over(memory_tier(BLOCKS))
    try:
        exchange = Exchange(store, NS, memory().data)
        exchange.close()
        exchange.load(3, named("late"), range(BLOCKS))
        assert ended(exchange)[:3] == (3, 0, 0)
        exchange.load(4, [], [])
        assert ended(exchange)[:3] == (4, 0, 0)
    finally:
        store.close()


def test_memory_of_another_shape_and_a_host_without_room_are_refused() -> None:
    store = TieredStore(HostTier(2 * BLOCK))
    try:
        with pytest.raises(FormatMismatch, match="expected bytes"):
            Exchange(store, NS, np.zeros(BLOCK, np.int8).data)
        with pytest.raises(FormatMismatch, match="read-only"):
            Exchange(store, NS, memory().data.toreadonly())
        with pytest.raises(CapacityError, match=f"{8 * BLOCK} at least"):
            Exchange(store, NS, memory().data)
    finally:
        store.close()
