"""Blocks of several parts: two workers, each with pools of two layer groups, over one store."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from connector_world import Request, answer
from patience import until
from shards_world import LAYOUT, NAMESPACE, OPTIONS, World, fill

from kvtier.connector import TierScheduler, TierWorker
from kvtier.errors import ConfigError, FormatMismatch
from kvtier.hooks import Match, Step, StepSpan


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.closing(World()) as world:
        yield world


def test_every_shard_gets_its_own_parts_back(world: World) -> None:
    first = Request("first", list(range(13)))
    ids = (3, 4, 5, 6)
    for block in ids:
        fill(world, block)
    world.run(world.half.plan(Step(0, (StepSpan(first, ids, 0, 13, exact=True),), frozenset(ids))))
    world.settle()
    world.half.finished("first", "stop")
    assert world.store.stats()["host"]["blocks"] == 3 * 4

    second = Request("second", [*range(12), 99])
    assert answer(world.half, second, 4) == Match(8)
    world.half.allocated(second, [3, 9, 10, 11], 8)
    assert world.settle() == {"second": (12, True)}
    for pools in world.pools:
        for pool in pools:
            assert torch.equal(pool[9:11], pool[4:6])
            assert not torch.equal(pool[9], pool[10])
    assert not torch.equal(world.pools[0][0][9], world.pools[1][0][9])
    stats = world.store.stats()["host"]
    assert stats["leases"] == stats["reservations"] == 0
    assert all(region.free_slots == 6 for region in world.staging)


def test_a_block_is_there_once_every_shard_has_saved_it(world: World) -> None:
    first = Request("first", list(range(9)))
    plan = world.half.plan(Step(0, (StepSpan(first, (1, 2, 3), 0, 9, exact=True),), frozenset({1, 2, 3})))
    assert sorted({save.part for save in next(iter(plan.saves.values()))}) == [0, 1, 2, 3]
    world.run(plan, (0,))
    until(lambda: (world.half.completed(world.workers[0].end()), world.workers[0]._jobs == {})[-1])
    world.store.flush()
    assert world.store.stats()["host"]["blocks"] == 0
    # The slower worker's device blocks may not be written over yet.
    assert world.half.plan(Step(1, (), frozenset({2}))).fences == set(plan.saves)
    world.run(plan, (1,))
    world.settle()
    assert world.store.stats()["host"]["blocks"] == 8


def test_a_block_without_one_of_its_parts_is_a_miss(world: World) -> None:
    first = Request("first", list(range(13)))
    world.run(world.half.plan(Step(0, (StepSpan(first, (1, 2, 3, 4), 0, 13, exact=True),), frozenset({1, 2, 3, 4}))))
    world.settle()
    keys = world.half._parts.keys(first.chain)
    world.store.host.remove([keys[1 * 4 + 2]]).wait()
    assert answer(world.half, Request("second", [*range(12), 99])) == Match(4)
    world.half.finished("second", "abort")


def test_the_shard_with_the_fewest_good_copies_decides(world: World) -> None:
    first = Request("first", list(range(13)))
    world.run(world.half.plan(Step(0, (StepSpan(first, (1, 2, 3, 4), 0, 13, exact=True),), frozenset({1, 2, 3, 4}))))
    world.settle()
    second = Request("second", [*range(12), 99])
    assert answer(world.half, second) == Match(12)
    world.half.allocated(second, [7, 8, 99, 10], 12)  # block 99 is beyond the pools
    assert world.settle() == {"second": (8, True)}


def test_the_group_with_the_fewest_good_copies_decides(world: World) -> None:
    first = Request("first", list(range(13)))
    world.run(world.half.plan(Step(0, (StepSpan(first, (1, 2, 3, 4), 0, 13, exact=True),), frozenset({1, 2, 3, 4}))))
    world.settle()
    # One group of one shard has no block 14.
    world.pools[1][1] = world.pools[1][1][:14].clone()
    world.workers[1].close()
    world.workers[1] = world._worker(1)
    second = Request("second", [*range(12), 99])
    assert answer(world.half, second) == Match(12)
    world.half.allocated(second, [7, 14, 9, 10], 12)
    assert world.settle() == {"second": (4, True)}


def test_a_block_that_host_lacks_one_part_of_is_evacuated_from_every_shard(world: World) -> None:
    first, ids = Request("first", list(range(13))), (3, 4, 5, 6)
    plan = world.half.plan(Step(0, (StepSpan(first, ids, 0, 13, exact=True),), frozenset(ids)))
    for block in ids:
        fill(world, block)
    world.run(plan)
    world.settle()
    world.half.finished("first", "stop")
    before = [[pool.clone() for pool in pools] for pools in world.pools]
    keys = world.half._parts.keys(first.chain)
    world.store.host.remove([keys[1 * 4 + 2]]).wait()
    assert answer(world.half, Request("second", [*range(12), 99])) == Match(4)
    world.half.finished("second", "abort")

    # Staging has room for one block more than the two that are missing.
    taken = [region.allocate(3) for region in world.staging]
    plan = world.half.plan(Step(1, (), frozenset(ids)))
    (copies,) = plan.evacuations.values()
    assert [(copy.block_id, copy.part) for copy in copies] == [(block, part) for block in (4, 5) for part in range(4)]
    for worker in world.workers:
        worker.begin(plan)
    for pools in world.pools:
        for pool in pools:
            pool[list(ids)] = 255
    world.settle()
    for region, spans in zip(world.staging, taken, strict=True):
        region.free(spans)
    third = Request("third", [*range(12), 98])
    assert answer(world.half, third) == Match(12)
    world.half.allocated(third, [7, 8, 9, 10], 12)
    assert world.settle() == {"third": (12, True)}
    for pools, old in zip(world.pools, before, strict=True):
        for pool, kept in zip(pools, old, strict=True):
            assert torch.equal(pool[7:10], kept[3:6])


def test_what_does_not_fit_together_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="1 staging regions: expected one for each of 4 parts"):
        TierScheduler(world.store, NAMESPACE, 4, world.staging[0], OPTIONS)
    with pytest.raises(FormatMismatch, match="shard 2"):
        TierWorker({}, LAYOUT, 2)
    with pytest.raises(FormatMismatch, match="1 device pools: expected one for each of 2"):
        TierWorker({}, LAYOUT, 0).register_pool(world.pools[0][0])
