"""Every way in which a tier can fail, at every call: right bytes or a miss, nothing leaks, and then it is over."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from fault_world import BLOCK, World

from kvtier.errors import LeaseError
from kvtier.testing import Fault, Kind
from kvtier.testing.blocks import chain_refs
from kvtier.testing.faults import VERBS

REFS = chain_refs(8)
PROMPT = 15.0  # seconds that stand for "promptly" on a machine that is busy with other things


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.closing(World(tmp_path)) as world:
        yield world
        world.check()


ENDLESS = (Kind.LATENCY, Kind.HANG, Kind.LOST)  # these have tests of their own
KINDS = [kind for kind in Kind if kind not in ENDLESS]
CALLED = sorted(VERBS - {"clear", "stats", "flush", "remove", "coldest", "duplicate"})


def faults_of(kind: Kind) -> list[Fault]:
    """One for every call that the kind can befall: all items of a batch, and those from the fourth on."""
    whole = kind in (Kind.UNAVAILABLE, Kind.TIMEOUT)
    verbs = [verb for verb in CALLED if Fault("*", kind).fits(verb)]
    return [Fault(verb, kind, first_item=first) for verb in verbs for first in ((0,) if whole else (0, 3))]


# ---- one fault at a time


@pytest.mark.parametrize("kind", KINDS)
def test_below_fails_on_the_way_down(world: World, kind: Kind) -> None:
    for seed, fault in enumerate(faults_of(kind)):
        refs = chain_refs(8, seed=seed)
        world.below.inject(fault)
        assert world.put(refs).stored == 8
        world.store.flush()
        assert world.fetched(refs) == 8, "what NVMe does to a block must not touch host"
        world.heal()
        world.down()
        assert world.fetched(refs) == len(world.found(refs)), fault
        # Nothing of the failure is left: the same blocks are taken now.
        world.put(refs)
        world.down()
        assert world.fetched(refs) == 8, fault


@pytest.mark.parametrize("kind", KINDS)
def test_below_fails_on_the_way_up(world: World, kind: Kind) -> None:
    for seed, fault in enumerate(faults_of(kind)):
        refs = chain_refs(8, seed=seed)
        world.put(refs)
        world.down()
        world.below.inject(fault)
        good = world.fetched(refs)
        if fault.verb in ("acquire", "read"):
            assert good == fault.first_item, fault
        world.heal()
        world.put(refs)
        world.down()
        assert world.fetched(refs) == 8, fault


@pytest.mark.parametrize("kind", KINDS)
def test_host_fails_on_the_way_up(world: World, kind: Kind) -> None:
    for seed, fault in enumerate(faults_of(kind)):
        refs = chain_refs(8, seed=seed)
        world.put(refs)
        world.down()
        world.host.inject(fault)
        assert world.fetched(refs) <= 8
        world.heal()
        assert world.fetched(refs) == 8, fault


@pytest.mark.parametrize("kind", KINDS)
def test_host_fails_on_the_way_down(world: World, kind: Kind) -> None:
    for seed, fault in enumerate(faults_of(kind)):
        refs = chain_refs(8, seed=seed)
        world.host.inject(fault)
        world.put(refs)
        world.store.flush()  # whoever was struck is through
        world.heal()
        assert len(world.found(refs)) <= 8
        world.put(refs)
        assert world.fetched(refs) == 8, fault


def test_an_abort_whose_answer_is_lost_leaks_nothing(tmp_path: Path) -> None:
    refs = chain_refs(8)
    with contextlib.closing(World(tmp_path)) as world:
        world.below.inject(Fault("abort", Kind.UNAVAILABLE))
        world.put(refs)
        world.store.flush()
        world.heal()
        assert world.nvme.stats()["reservations"] == 0
        world.put(refs)
        world.down()
        assert world.fetched(refs) == 8


# ---- many at random


@pytest.mark.parametrize("seed", range(3))
def test_after_a_storm_of_faults_everything_can_be_allocated_again(world: World, seed: int) -> None:
    dice = random.Random(seed)
    for tier in (world.host, world.below):
        # Host memory does not rot here: a reader reads in place, and would see it happen under its lease.
        kinds = [kind for kind in KINDS if tier is world.below or kind is not Kind.ROT]
        plan = [fault for kind in kinds for fault in faults_of(kind)]
        tier.inject(*(replace(fault, probability=0.04, seed=dice.randrange(99)) for fault in plan))
    chains = [chain_refs(8, seed=number) for number in range(24)]
    for _ in range(120):
        refs = dice.choice(chains)[: dice.randint(1, 8)]
        if dice.random() < 0.5:
            world.put(refs)
        else:
            world.fetched(refs)
    assert world.host.injected.total() > 30
    assert world.below.injected.total() > 20
    world.heal()
    world.down()
    for refs in chains:
        world.fetched(refs)  # what rotted below and was met by nobody is met now
    world.check()
    world.store.clear()
    full = chain_refs(64, seed=1000)
    assert world.put(full).stored == 64
    assert world.fetched(full) == 64


def test_verbs_in_every_order_leak_nothing(world: World) -> None:
    refs = chain_refs(3, seed=1)
    keys = [ref.key for ref in refs]
    lease = world.store.acquire(keys, "reader").result(PROMPT)

    def again() -> None:
        world.store.release(lease)
        world.store.release(lease)

    def leased() -> None:
        nonlocal lease
        world.store.release(lease)
        lease = world.store.acquire(keys, "reader").result(PROMPT)

    verbs = [
        lambda: world.put(refs),
        leased,
        lambda: world.store.fetch(lease, 0, len(lease.tiers())).result(PROMPT),
        again,
        lambda: world.store.clear("host"),
    ]
    for order in permutations(verbs):
        for verb in order:
            verb()
            verb()
    again()
    world.store.clear()
    world.check()
    assert world.inner.stats()["bytes"] == world.nvme.stats()["bytes"] == 0


# ---- pressure


def test_writers_on_a_slow_disk_fill_a_bounded_queue(tmp_path: Path) -> None:
    bound = 8 * BLOCK
    with contextlib.closing(World(tmp_path, host_blocks=256, writeback_bytes=bound)) as world:
        world.below.inject(Fault("write", Kind.LATENCY, seconds=0.1))
        seen: list[int] = []

        def write(worker: int) -> int:
            stored = 0
            for turn in range(10):
                stored += world.put(chain_refs(4, seed=100 * worker + turn)).stored
                seen.append(world.store.stats()["store"]["waiting_bytes"])
            return stored

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(write, range(4))) == 160
        assert max(seen) <= bound
        world.check()
        assert world.dropped() > 0
        assert world.dropped() + world.nvme.stats()["blocks"] == 160
        # Who was asked and who had it is told apart.
        world.fetched(chain_refs(4, seed=0))
        assert world.metrics.value("hit_blocks_total", tier="host") >= 4


def test_a_pool_smaller_than_one_request_fails_fast(tmp_path: Path) -> None:
    with contextlib.closing(World(tmp_path, host_blocks=4)) as world:
        long = chain_refs(16)
        assert world.put(long) == (4, 0, 12)
        world.store.flush()
        held = world.store.acquire([ref.key for ref in long], "holder").result(PROMPT)
        other = chain_refs(6, seed=1)
        assert world.put(other) == (0, 0, 6)
        assert world.fetched(other) == 0
        world.store.release(held)
        assert world.put(other) == (4, 0, 2)
        world.check()


def test_no_room_in_host_is_not_told_as_absence(tmp_path: Path) -> None:
    with contextlib.closing(World(tmp_path, host_blocks=8)) as world:
        refs, other = chain_refs(8), chain_refs(8, seed=1)
        for chain in (refs, other):
            world.put(chain)
            world.store.flush()
        held = world.store.acquire([ref.key for ref in other], "holder").result(PROMPT)
        assert held.tiers() == ["host"] * 8
        lease = world.store.acquire([ref.key for ref in refs], "reader").result(PROMPT)
        # The hit is a full one and stays one, although nothing can be loaded now.
        assert lease.tiers() == ["nvme"] * 8
        assert world.store.fetch(lease, 0, 8).result(PROMPT) == 0
        assert world.found(refs) == ("nvme",) * 8
        told = world.store.prefetch([ref.key for ref in refs], "prefetcher").result(PROMPT)
        assert told == (0, "no_space")
        world.store.release(held)
        assert world.store.fetch(lease, 0, 8).result(PROMPT) == 8
        world.store.release(lease)
        world.check()


def test_many_threads_in_every_order(world: World) -> None:
    """64 threads put, look up, load, give up and drop the same few chains: nothing is raised, nothing is left."""
    chains = [chain_refs(6, seed=seed) for seed in range(8)]

    def work(worker: int) -> int:
        dice = random.Random(worker)
        done = 0
        for _ in range(6):
            refs: Sequence = dice.choice(chains)
            match dice.randrange(4):
                case 0:
                    world.put(refs[: dice.randint(1, 6)])
                case 1:
                    done += world.fetched(refs, f"reader-{worker}")
                case 2:
                    world.store.release(world.store.acquire([ref.key for ref in refs], f"quitter-{worker}").result(60))
                case 3:
                    world.below.remove([dice.choice(refs).key]).wait(30)
        return done

    with ThreadPoolExecutor(64) as pool:
        assert sum(pool.map(work, range(64))) > 0


def test_a_handle_cannot_be_used_after_its_end(world: World) -> None:
    world.put(REFS)
    lease = world.store.acquire([ref.key for ref in REFS], "reader").result(PROMPT)
    handles = [handle for _, handle in lease.blocks]
    world.store.release(lease)
    with pytest.raises(LeaseError):
        world.inner.buffer(handles[0])
