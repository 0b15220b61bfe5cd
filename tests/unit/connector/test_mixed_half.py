"""Layers with a window as a group of their own: their parts go by block tables of their own, in every shard."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from connector_world import Request, answer
from shards_world import OPTIONS, World, fill

from kvtier.connector import ConnectorOptions
from kvtier.errors import ConfigError
from kvtier.hooks import NO_BLOCK, Match, Step, StepSpan, TransferPlan

MIXED = replace(OPTIONS, windowed_groups=1, copies="inclusive")
IDS, SLOTS = (3, 7, 1, 5), (2, 0, 9, 4)


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.closing(World(MIXED)) as world:
        for block in range(10):
            fill(world, block)
        yield world


def step(request: Request, stop: int, slots: tuple[int, ...] = SLOTS) -> Step:
    blocks = -(-stop // 4)
    span = StepSpan(request, IDS[:blocks], 0, stop, exact=True, windowed_ids=slots[:blocks])
    return Step(0, (span,), frozenset(IDS[:blocks]), frozenset(slots[:blocks]) - {NO_BLOCK})


def saved(world: World, tokens: int = 13) -> Request:
    request = Request("first", list(range(tokens)))
    world.run(world.half.plan(step(request, tokens)))
    world.settle()
    world.half.finished("first", "stop")
    return request


def test_parts_behind_the_window_stay_where_they_are(world: World) -> None:
    saved(world)
    assert world.store.stats()["host"]["blocks"] == 3 * 4
    before = [[pool.clone() for pool in pools] for pools in world.pools]
    second = Request("second", [*range(12), 99])
    assert answer(world.half, second) == Match(12)
    world.half.allocated(second, [10, 11, 12, 13], 12, [NO_BLOCK, NO_BLOCK, 14, 15])
    loaded = world.store.metrics.value("loaded_bytes_total", tier="host")
    assert world.settle() == {"second": (12, True)}
    for pools, (full, windowed) in zip(world.pools, before, strict=True):
        assert torch.equal(pools[0][10:13], full[list(IDS[:3])])
        assert torch.equal(pools[1][14], windowed[SLOTS[2]])
        windowed[14] = pools[1][14]
        assert torch.equal(pools[1], windowed)
    sizes = [pool.shape[1] for pool in world.pools[0]]
    moved = world.store.metrics.value("loaded_bytes_total", tier="host") - loaded
    assert moved == 2 * (3 * sizes[0] + sizes[1])


def test_a_slot_is_not_written_over_before_it_was_saved(world: World) -> None:
    request = Request("first", list(range(13)))
    plan = world.half.plan(step(request, 13))
    assert world.half.plan(Step(1, (), frozenset({2, 9, 4}))).fences == set()
    assert world.half.plan(Step(2, (), frozenset(), frozenset({9}))).fences == set(plan.saves)
    assert world.half.plan(Step(3, (), frozenset({7}))).fences == set(plan.saves)
    world.run(plan)
    world.settle()


def test_what_fell_behind_before_it_was_saved_is_dropped(world: World) -> None:
    request = Request("first", list(range(13)))
    plan = world.half.plan(step(request, 13, (NO_BLOCK, 0, 9, 4)))
    assert {save.block_id for save in plan.saves[1] if save.part < 2} == {7, 1}
    assert {save.block_id for save in plan.saves[1] if save.part >= 2} == {0, 9}
    assert world.store.metrics.value("dropped_blocks_total", tier="host", reason="behind_window") == 1
    world.run(plan)
    world.settle()


def swap_out(world: World, request: Request, slots: tuple[int, ...], *, exact: bool) -> bool:
    kinds = {"exact": exact, "forced": True}
    return world.half.swap_out(request, IDS, 14, **kinds, windowed_ids=slots)  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [True, False])
def test_who_is_swapped_out_gets_both_parts_back(world: World, exact: bool) -> None:
    request = Request("first", list(range(15)))
    before = [[pool.clone() for pool in pools] for pools in world.pools]
    assert swap_out(world, request, SLOTS, exact=exact)
    world.settle()
    for pools in world.pools:
        for pool in pools:
            pool.zero_()
    assert answer(world.half, request) == Match(14, exact)
    world.half.allocated(request, [10, 11, 12, 13], 14, [NO_BLOCK, 15, 12, 14])
    assert world.settle() == {"first": (14, exact)}
    for pools, (full, windowed) in zip(world.pools, before, strict=True):
        assert torch.equal(pools[0][10:14], full[list(IDS)])
        assert torch.equal(pools[1][[15, 12, 14]], windowed[list(SLOTS[1:])])


def test_who_lost_windowed_parts_that_were_not_saved_cannot_be_kept(world: World) -> None:
    request = Request("first", list(range(15)))
    assert not swap_out(world, request, (NO_BLOCK, 0, 9, 4), exact=True)
    assert world.half.plan(Step(0, (), frozenset())) == TransferPlan()
    assert all(region.free_slots == 6 for region in world.staging)
    world.half.finished("first", "abort")
    # Saved, they are there for whoever needs them.
    saved(world)
    again = Request("again", list(range(15)))
    assert swap_out(world, again, (NO_BLOCK, 0, 9, 4), exact=True)
    world.settle()
    assert answer(world.half, again) == Match(14)
    world.half.finished("again", "abort")


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"windowed_groups=2 of 2: expected 0\.\.1"):
        ConnectorOptions(groups=2, windowed_groups=2)
    with pytest.raises(ConfigError, match="windowed_groups=1 with window_blocks=3"):
        ConnectorOptions(groups=2, windowed_groups=1, window_blocks=3)
    with pytest.raises(ConfigError, match="choose copies = 'inclusive'"):
        ConnectorOptions(groups=2, windowed_groups=1, copies="exclusive")
