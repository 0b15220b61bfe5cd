"""The scheduler over layers with and without a window: right outputs, and no more windowed blocks than windows take."""

import random

import pytest
from scheduler_world import Fate, RandomFate, World

from kvtier.engine.params import SamplingParams
from kvtier.engine.request import State
from kvtier.engine.rules import SchedulingRules
from kvtier.errors import CapacityError
from kvtier.gpu.mixed import MixedBlockPool
from kvtier.gpu.pool import Amount
from kvtier.gpu.windows import most_blocks

SIZE = 4


def finish(made: World) -> None:
    made.drain()
    made.check_outputs()
    if made.under_way is not None:
        made.land(*made.under_way)
        made.under_way = None
    made.at_rest()
    assert made.pool.used_slots == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", [1, 4, 9, 10])
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("budget", [1, 6, 50])
def test_the_fewest_slots_hold_any_length(window: int, pipelined: bool, budget: int) -> None:
    least = most_blocks(10**6, 1, SIZE, window)
    rules = SchedulingRules(pipelined=pipelined)
    made = World(num_blocks=45, slots=least, token_budget=budget, rules=rules, window=window)
    for name in ("a", "b"):
        made.add(name, [(7 * at) % 50 for at in range(60)], 90)
    finish(made)
    assert [len(output) for _, output in made.outputs.values()] == [90, 90]


@pytest.mark.parametrize("slots", [0, 40])
@pytest.mark.parametrize("ahead", [1, 6, 20])
def test_a_fork_from_before_its_parents_window_does_without_what_is_gone(slots: int, ahead: int) -> None:
    made = World(num_blocks=60, slots=slots, window=6)
    parent = made.add("a", [(7 * at) % 50 for at in range(16)], 30)
    while parent.num_output < ahead:
        made.step()
    child = parent.sibling("a-fork", SamplingParams(max_tokens=9), 0)
    made.scheduler.fork(parent, child)
    made.live["a-fork"] = child
    assert (child.state is State.RUNNING) == (ahead == 1)
    made.drain()
    made.check_outputs()
    assert len(made.outputs) == 2


def test_less_slots_than_a_window_are_refused() -> None:
    with pytest.raises(CapacityError, match="3 blocks for the layers with a window of 9 tokens: expected at least 4"):
        MixedBlockPool(40, 3, SIZE, 9)


def test_steps_hold_no_more_slots_than_windows_and_all_blocks() -> None:
    made = World(num_blocks=100, slots=100, max_running=3, token_budget=8, window=10)
    most = most_blocks(10**6, 8, SIZE, 10)
    for number in range(3):
        made.add(f"{number}", [(5 * at + number) % 50 for at in range(80)], 40)
    slots = blocks = 0
    while made.live:
        made.step()
        slots = max(slots, made.pool.used_slots)  # type: ignore[attr-defined]
        blocks = max(blocks, made.pool.used_blocks)
    assert slots <= 3 * most
    assert blocks >= 3 * 100 // SIZE
    made.check_outputs()


def test_a_prefix_whose_last_window_is_gone_is_found_as_far_as_both_groups_have_it() -> None:
    prompt = [(7 * at) % 50 for at in range(48)]
    made = World(num_blocks=60, slots=14, token_budget=16, window=9)
    made.add("first", prompt, 4)
    made.drain()
    pool, keys = made.pool, made.scheduler and made.add("probe", [*prompt, 1], 1).chain
    made.abort("probe")
    assert pool.leading(keys) == 12
    # Others take the windowed parts, the oldest first, and leave all blocks their names.
    other = made.add("other", prompt[::-1], 4)
    made.drain()
    assert other.metrics.cached_tokens == 0
    assert pool.cached_blocks >= 24
    found = pool.leading(keys)
    assert found < 12
    again = made.add("again", [*prompt, 1], 4)
    made.drain()
    assert again.metrics.cached_tokens == found * SIZE
    # What was computed again has both parts, so that it is found from now on.
    later = made.add("later", [*prompt, 2], 4)
    made.drain()
    assert later.metrics.cached_tokens == 48
    finish(made)


def test_a_load_brings_all_blocks_and_the_windowed_parts_of_the_last_window() -> None:
    prompt = [(7 * at) % 50 for at in range(50)]
    made = World(num_blocks=40, slots=8, token_budget=16, fate=Fate(), window=9)
    made.add("first", prompt, 4)
    made.drain()
    made.pool.forget()
    loaded = made.add("loaded", prompt, 4)
    made.step()
    assert loaded.metrics.cached_tokens == 0
    assert len(loaded.blocks.held) == 12
    assert list(loaded.blocks.windowed_ids[:10]) == [-1] * 10
    assert min(loaded.blocks.windowed_ids[10:]) >= 0
    made.drain()
    assert loaded.metrics.loaded_tokens == 48
    finish(made)


@pytest.mark.parametrize("pipelined", [False, True])
def test_amid_whatever_may_happen(pipelined: bool) -> None:
    done = preemptions = swaps = loaded = cached = 0
    for seed in range(30):
        dice = random.Random(seed)
        rules = SchedulingRules(
            order=dice.choice(["fcfs", "priority", "slack"]),  # type: ignore[arg-type]
            preemption=dice.choice(["swap", "recompute", "auto"]),  # type: ignore[arg-type]
            watermark=dice.choice([0.0, 0.1]),
            pipelined=pipelined,
            overlap_loads=dice.random() < 0.5,
        )
        window = dice.choice([1, 2, 3, 5, 9])
        blocks = dice.choice((14, 20, 30))
        least = most_blocks(10**6, 1, SIZE, window)
        slots = dice.choice((least, least + 2, 2 * least + 3, blocks))
        made = World(
            num_blocks=blocks, slots=slots, token_budget=dice.choice((1, 5, 12, 30)), max_running=4,
            fate=RandomFate(seed), rules=rules, window=window,
        )  # fmt: skip
        prompts = [[dice.randrange(50) for _ in range(50)] for _ in range(3)]
        requests = []
        for number in range(10):
            prompt = dice.choice(prompts)[: dice.randrange(3, 4 * blocks - 15)]
            requests.append(made.add(f"r{number}", prompt, 1 + dice.randrange(12), priority=dice.randrange(3)))
            for _ in range(dice.randrange(8)):
                made.step()
                made.check()
            if dice.random() < 0.2 and made.live:
                made.abort(dice.choice(sorted(made.live)))
            if dice.random() < 0.2 and made.live:
                made.fork(made.live[dice.choice(sorted(made.live))], f"{number}-fork", dice.randrange(1, 4))
            if dice.random() < 0.3:
                made.preempt(dice.randrange(4))
            if dice.random() < 0.2:
                made.pool.forget()
        finish(made)
        done += len(made.outputs)
        preemptions += made.scheduler.counters.preemptions
        swaps += made.scheduler.counters.swaps
        loaded += made.scheduler.counters.loaded
        cached += made.scheduler.counters.device_hits
    assert done > 150
    assert min(preemptions, swaps) > 30
    assert min(loaded, cached) > 100


def test_what_is_short_is_what_fewest_are_free_of() -> None:
    for slots, expected in ((100, 20), (9, 3)):
        assert MixedBlockPool(50, slots, SIZE, 9).shortest(Amount(20, 3)) == expected
