"""What an index says, what is really there, and what the counters claim must stay one and the same."""

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_world import BLOCK, NVME_OPTIONS, World

from kvtier.cpu import HostTier
from kvtier.nvme import NvmeTier
from kvtier.policies import LruPolicy
from kvtier.testing import Fault, Kind
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import Handle, Status


@pytest.fixture
def small(tmp_path: Path) -> Iterator[World]:
    """16 blocks in host, 128 on NVMe."""
    with contextlib.closing(World(tmp_path, host_blocks=16, nvme_blocks=128)) as world:
        yield world
        world.check()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.closing(World(tmp_path)) as world:
        yield world
        world.check()


# ---- eviction


def test_probes_keep_nothing_alive(small: World) -> None:
    old = [chain_refs(16, seed=seed) for seed in range(8)]
    for refs in old:
        small.put(refs)
        small.store.flush()
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            for refs in old:
                small.found(refs)
                small.below.contains([ref.key for ref in refs]).wait(30)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for seed in range(100, 120):
            new = chain_refs(16, seed=seed)
            assert small.put(new).dropped == 0
            small.store.flush()
            assert small.fetched(new) == 16
    finally:
        stop.set()
        thread.join()
    assert small.dropped() == small.dropped("host") == 0
    assert small.found(old[0]) == ()


def test_what_was_evicted_below_is_a_clean_miss(small: World) -> None:
    chains = [chain_refs(16, seed=seed) for seed in range(30)]
    for refs in chains:
        small.put(refs)
        small.store.flush()
    small.down()
    assert small.total("kvtier_evicted_blocks_total", "nvme") > 0
    lengths = [len(small.found(refs)) for refs in chains]
    assert 0 in lengths
    # No ghosts: whatever the index offers can be loaded, the rest is a miss without an error.
    assert [small.fetched(refs) for refs in chains] == lengths
    assert small.total("kvtier_errors_total", "nvme") == small.total("kvtier_corrupt_blocks_total", "nvme") == 0


class Counting(LruPolicy):
    """How often the tier asks for victims, and how many it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = self.given = 0

    def victims(self, *arguments: object) -> list[int]:
        found = super().victims(*arguments)
        self.asked += 1
        self.given += len(found)
        return found


@pytest.mark.parametrize("blocks", [64, 1024])
def test_the_work_of_an_eviction_does_not_grow_with_the_tier(blocks: int) -> None:
    policy = Counting()
    with contextlib.closing(HostTier(blocks * 4096, policy=policy)) as tier:
        for seed in range(blocks // 8 + 16):
            put(tier, chain_refs(8, seed=seed), 4096)
        # Sixteen batches of 8 beyond the capacity: one question and 8 victims each, however many blocks there are.
        assert (policy.asked, policy.given) == (16, 128)


# ---- accounting


def test_after_a_burst_the_accepted_share_is_what_the_counters_claim(tmp_path: Path) -> None:
    with contextlib.closing(World(tmp_path, host_blocks=64, nvme_blocks=128, writeback_bytes=16 * BLOCK)) as world:
        world.below.inject(Fault("write", Kind.LATENCY, seconds=0.02))
        chains = [chain_refs(16, seed=seed) for seed in range(40)]  # five times what NVMe holds
        stored = sum(world.put(refs).stored for refs in chains)
        world.check()
        evicted = world.total("kvtier_evicted_blocks_total", "nvme")
        assert stored == 640
        assert world.dropped() > 0
        assert stored - world.dropped() - evicted == world.nvme.stats()["blocks"]
        # What was dropped under pressure is taken when it is put again.
        lost = next(refs for refs in chains if not world.found(refs))
        world.put(lost)
        world.down()
        assert world.fetched(lost) == 16


def test_every_counter_is_zero_after_a_storm_and_a_clear(world: World) -> None:
    dice = random.Random(5)
    chains = [chain_refs(12, seed=seed) for seed in range(12)]
    for _ in range(300):
        refs = dice.choice(chains)[: dice.randint(1, 12)]
        match dice.randrange(6):
            case 0 | 1 | 2:
                world.put(refs)
            case 3:
                world.fetched(refs)
            case 4:
                dice.choice([world.host, world.below]).remove([dice.choice(refs).key]).wait(30)
            case 5:
                world.store.clear(dice.choice(["host", "nvme"]), ns=refs[0].ns)
    world.store.clear()
    world.check()
    for tier in (world.inner, world.nvme):
        stats = tier.stats()
        assert (stats["blocks"], stats["bytes"]) == (0, 0)
        assert world.metrics.value("occupied_bytes", tier=tier.name) == 0
    # And all of it can be used again.
    assert world.put(chain_refs(64, seed=99)).stored == 64


def test_a_soak_over_a_tier_smaller_than_the_working_set() -> None:
    """10^5 blocks of random sizes go through a tier that holds a few hundred; then the largest still fits."""
    dice = random.Random(11)
    sizes = [4096, 8192, 20480, 65536]
    chains = [chain_refs(16, seed=seed) for seed in range(64)]
    moved = 0
    with contextlib.closing(HostTier(4 << 20)) as tier:
        while moved < 100_000:
            at = dice.randrange(64)
            refs = chains[at][: dice.randint(1, 16)]
            nbytes = sizes[at % 4]
            if dice.random() < 0.4:
                slots = tier.reserve(refs, [nbytes] * len(refs), ["raw"] * len(refs), "writer")
                handles = [slot for slot in slots if isinstance(slot, Handle)]
                if dice.random() < 0.9:
                    tier.seal(handles)
                    tier.commit(handles)
                tier.abort(handles)
            elif dice.random() < 0.9:
                tier.contains([ref.key for ref in refs])
            else:
                tier.remove([refs[-1].key])
            moved += len(refs)
        tier.check()
        big = chain_refs(1, seed=1000)
        assert isinstance(put(tier, big, 4 << 20)[0], Handle)
        assert load(tier, [big[0].key]) == [(Status.OK, bytes(content(big[0], 4 << 20)))]


def test_the_disk_never_has_more_than_its_budget_over_restarts(tmp_path: Path) -> None:
    def used() -> int:
        return sum(file.stat().st_blocks * 512 for file in (tmp_path / "n").glob("seg-*"))

    for round_ in range(4):
        with contextlib.closing(NvmeTier(tmp_path / "n", 2 << 20, NVME_OPTIONS)) as tier:
            if round_:
                assert tier.stats()["blocks"] > 0
            for seed in range(8):
                put(tier, chain_refs(64, seed=100 * round_ + seed), BLOCK)
                assert tier.stats()["bytes"] <= 2 << 20
                assert used() <= 2 << 20
    # Half the capacity: what lies beyond it goes, and so do the bytes on the disk.
    with contextlib.closing(NvmeTier(tmp_path / "n", 1 << 20, NVME_OPTIONS)) as tier:
        assert tier.stats()["bytes"] <= 1 << 20
        assert used() <= 1 << 20
        assert tier.check(verify=True)["corrupt"] == 0


# ---- presence without data


def test_blocks_dropped_by_others_are_a_clean_miss_at_every_moment(world: World) -> None:
    refs = chain_refs(8)
    for fault, good in (
        (Fault("contains", Kind.VANISH, first_item=2), 3),  # of the probes 0, 1, 3, 7 the last two
        (Fault("acquire", Kind.VANISH, first_item=3), 3),
        (Fault("read", Kind.VANISH, first_item=2), 2),
    ):
        world.put(refs)
        world.down()
        world.below.inject(fault)
        world.found(refs)
        assert world.fetched(refs) == good
        world.heal()
        # The index heals with the first miss: nothing is promised that is not there.
        left = len(world.found(refs))
        assert world.fetched(refs) == left
        world.put(refs)
        assert world.fetched(refs) == 8


def test_a_segment_that_lost_its_end_is_a_miss_once_and_written_again(world: World) -> None:
    refs = chain_refs(8)
    world.put(refs)
    world.down()
    os.truncate(world.nvme._opened.directory.path / "seg-00000.kv", 0)
    assert world.fetched(refs) == 0
    assert world.total("kvtier_errors_total", "nvme") > 0
    # Computed and put again: it must not stay "present" without data.
    world.put(refs)
    world.down()
    assert world.fetched(refs) == 8


def test_a_flipped_bit_in_any_tier_is_a_miss_and_counted(world: World) -> None:
    refs = chain_refs(8)
    world.put(refs)
    world.store.flush()
    world.host.inject(Fault("acquire", Kind.ROT, nth=1, first_item=5))
    world.below.inject(Fault("read", Kind.ROT, nth=1, first_item=1))
    # Blocks 0..4 come from host, 5 from NVMe, 6 is damaged there.
    assert world.fetched(refs) == 6
    assert world.metrics.value("corrupt_blocks_total", tier="host") == 1
    assert world.metrics.value("corrupt_blocks_total", tier="nvme") >= 1
    world.put(refs)
    world.down()
    assert world.fetched(refs) == 8


def test_a_put_that_is_reported_is_visible(world: World) -> None:
    stored = 0
    for seed in range(200):
        refs = chain_refs(4, seed=seed)
        result = world.put(refs)  # some is dropped where write-back holds all of host
        assert len(world.found(refs)) == result.stored
        stored += result.stored
    assert stored >= 64
    assert stored + world.dropped("host") == 800


# ---- look-ups


def test_a_look_up_of_a_thousand_blocks_is_a_handful_of_calls(tmp_path: Path) -> None:
    with contextlib.closing(World(tmp_path, host_blocks=1100, nvme_blocks=1100, block=4096)) as world:
        refs = chain_refs(1000)
        world.put(refs)
        world.down()
        world.put(refs[:300])
        calls = Fault("contains", Kind.LATENCY)
        world.host.inject(calls)
        world.below.inject(calls)
        assert world.found(refs) == ("host",) * 300 + ("nvme",) * 700
        for tier in (world.host, world.below):
            # Galloping: one call for the powers of two, then a binary search; each run is looked for at most twice.
            assert tier.injected["contains", Kind.LATENCY] <= 2 * (1 + 10)


def test_the_length_is_known_before_any_byte_moves(world: World) -> None:
    refs = chain_refs(8)
    world.put(refs)
    world.down()
    world.below.inject(Fault("read", Kind.UNAVAILABLE))
    assert world.found(refs) == ("nvme",) * 8
    lease = world.store.acquire([ref.key for ref in refs], "reader").result(30)
    assert lease.tiers() == ["nvme"] * 8
    assert ("read", Kind.UNAVAILABLE) not in world.below.injected
    # Only the needed range is read.
    world.heal()
    assert world.store.fetch(lease, 2, 5).result(30) == 3
    assert lease.tiers() == ["nvme"] * 2 + ["host"] * 3 + ["nvme"] * 3
    assert world.metrics.value("read_bytes_total", tier="nvme") == 3 * BLOCK
    world.store.release(lease)


def test_many_readers_of_one_prefix_cost_one_load(world: World) -> None:
    refs = chain_refs(8)
    world.put(refs)
    world.down()
    world.below.inject(Fault("read", Kind.LATENCY, seconds=0.02))
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda number: world.fetched(refs, f"reader-{number}"), range(16))) == [8] * 16
    assert world.metrics.value("read_bytes_total", tier="nvme") == 8 * BLOCK


def test_thousands_of_abandoned_look_ups_leave_no_lease(world: World) -> None:
    refs = chain_refs(4)
    world.put(refs)
    keys = [ref.key for ref in refs]
    for number in range(3_000 // 50):
        leases = [world.store.acquire(keys, f"{number}-{at}") for at in range(50)]
        for lease in leases:
            world.store.release(lease.result(30))
    assert world.inner.stats()["leases"] == 0


# ---- readers and writers at once


def test_sessions_that_come_back_from_disk_get_their_own_blocks(tmp_path: Path) -> None:
    """Self-identifying blocks, evicted from host all the time while others write: each key has its own bytes."""
    with contextlib.closing(World(tmp_path, host_blocks=24, nvme_blocks=1024)) as world:
        sessions = [chain_refs(6, seed=seed) for seed in range(40)]
        for refs in sessions:
            world.put(refs)
            world.store.flush()

        def come_back(worker: int) -> int:
            dice = random.Random(worker)
            total = 0
            for turn in range(30):
                if worker % 2:
                    world.put(chain_refs(3, seed=1000 + 100 * worker + turn))
                else:
                    total += world.fetched(dice.choice(sessions), f"session-{worker}-{turn}")
            return total

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(come_back, range(8))) > 100
        world.store.flush()
        assert [world.fetched(refs) for refs in sessions] == [6] * 40
        world.check()


def test_a_reader_sees_a_block_that_is_being_written_not_at_all_or_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, halfway, go = os.pwritev, threading.Event(), threading.Event()

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        done = pwritev(fd, [buffers[0][:4096]], offset)
        halfway.set()
        assert go.wait(30)
        return done

    refs = chain_refs(2)
    with contextlib.closing(NvmeTier(tmp_path / "n", 2 << 20, NVME_OPTIONS)) as tier:
        put(tier, chain_refs(1, seed=1), BLOCK)
        while tier.check()["unprepared_pages"] or tier.check()["preparing_pages"]:
            pass
        monkeypatch.setattr("kvtier.native.vectored._compiled", None)
        monkeypatch.setattr(os, "pwritev", slow)
        writer = threading.Thread(target=put, args=(tier, refs, BLOCK))
        writer.start()
        assert halfway.wait(30)
        for _ in range(50):
            assert run_length(tier, refs) == 0
            assert load(tier, [ref.key for ref in refs]) == [(Status.MISS, b"")] * 2
        go.set()
        writer.join(30)
        assert load(tier, [ref.key for ref in refs]) == [(Status.OK, bytes(content(ref, BLOCK))) for ref in refs]
