"""The scheduler with a sliding window: right outputs from the blocks of the window alone, under all that may happen."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_device import continuation
from scheduler_world import Fate, RandomFate, World

from kvtier.engine.rules import SchedulingRules
from kvtier.errors import CapacityError, RequestError
from kvtier.gpu.pool import BlockPool
from kvtier.hooks import NO_BLOCK

SIZE = 4


def finish(made: World) -> None:
    made.drain()
    made.check_outputs()
    if made.under_way is not None:
        made.land(*made.under_way)
        made.under_way = None
    assert made.pool.free_blocks == made.pool.num_blocks


@pytest.mark.parametrize("window", [1, 4, 9, 10])
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("budget", [1, 6, 50])
def test_the_smallest_pool_holds_any_length(window: int, pipelined: bool, budget: int) -> None:
    least = BlockPool(1, SIZE, window).most_blocks(10**6, 1)
    rules = SchedulingRules(pipelined=pipelined)
    made = World(num_blocks=least, token_budget=budget, rules=rules, window=window)
    for name in ("a", "b"):
        made.add(name, [(7 * at) % 50 for at in range(SIZE * least - 1)], 3 * SIZE)
    made.live["a"].max_tokens = made.live["b"].max_tokens = 150
    finish(made)
    assert [len(output) for _, output in made.outputs.values()] == [150 - SIZE * least + 1] * 2
    assert not made.live


def test_a_window_that_is_found_leaves_room_for_what_follows() -> None:
    made = World(num_blocks=4, token_budget=16, window=9)
    for name, length in (("first", 16), ("longer", 40)):
        made.add(name, [(7 * at) % 50 for at in range(length)], 1).max_tokens = length + 1
        made.drain()
    assert made.scheduler.counters.device_hits
    finish(made)


def test_what_outgrows_the_pool_is_refused() -> None:
    made = World(num_blocks=3, window=9)
    with pytest.raises(RequestError, match="may grow to 23 tokens, which takes 4 blocks, the device pool has 3"):
        made.scheduler.add(World(num_blocks=9).add("long", [1] * 20, 3))
    made.add("fits", [1] * 9, 3)
    finish(made)


def test_steps_hold_no_more_than_windows() -> None:
    made = World(num_blocks=40, max_running=3, token_budget=8, window=10)
    most = made.pool.most_blocks(10**6, 8)
    for number in range(3):
        made.add(f"{number}", [(5 * at + number) % 50 for at in range(80)], 40)
    peak = 0
    while made.live:
        made.step()
        peak = max(peak, made.pool.used_blocks)
    assert peak <= 3 * most
    made.check_outputs()


def test_a_prefix_is_found_without_its_beginning_and_loaded_without_it() -> None:
    prompt = [(7 * at) % 50 for at in range(50)]
    made = World(num_blocks=14, token_budget=16, fate=Fate(), window=9)
    made.add("first", prompt, 4)
    made.drain()
    # The oldest names are gone: others took their blocks.
    made.add("other", prompt[::-1][:24], 2)
    made.drain()
    again = made.add("again", prompt, 4)
    made.drain()
    assert again.metrics.cached_tokens + again.metrics.loaded_tokens == 48
    made.pool.forget()
    loaded = made.add("loaded", prompt, 4)
    made.step()
    assert loaded.metrics.cached_tokens == 0
    assert (loaded.blocks.gone, len(loaded.blocks.held)) == (10, 2)
    made.drain()
    assert loaded.metrics.loaded_tokens == 48
    for _, output in made.outputs.values():
        assert len(output) in (2, 4)
    finish(made)


@pytest.mark.parametrize("pipelined", [False, True])
def test_amid_whatever_may_happen(pipelined: bool) -> None:
    done = preemptions = loaded = 0
    for seed in [*range(25), 201, 594]:
        dice = random.Random(seed)
        rules = SchedulingRules(
            order=dice.choice(["fcfs", "priority", "slack"]),  # type: ignore[arg-type]
            preemption=dice.choice(["swap", "recompute", "auto"]),  # type: ignore[arg-type]
            watermark=dice.choice([0.0, 0.1]),
            pipelined=pipelined,
            overlap_loads=dice.random() < 0.5,
        )
        sizes = {"num_blocks": dice.choice((8, 10, 14, 20)), "token_budget": dice.choice((1, 5, 12, 30))}
        window = dice.choice([1, 2, 3, 5, 9])
        made = World(**sizes, max_running=4, fate=RandomFate(seed), rules=rules, window=window)  # type: ignore[arg-type]
        prompts = [[dice.randrange(50) for _ in range(50)] for _ in range(3)]
        for number in range(10):
            prompt = dice.choice(prompts)[: dice.randrange(3, 4 * sizes["num_blocks"] - 15)]
            made.add(f"r{number}", prompt, 1 + dice.randrange(12), priority=dice.randrange(3))
            for _ in range(dice.randrange(8)):
                made.step()
                made.pool.check()
            if dice.random() < 0.2 and made.live:
                made.abort(dice.choice(sorted(made.live)))
            if dice.random() < 0.2 and made.live:
                made.fork(made.live[dice.choice(sorted(made.live))], f"{number}-fork", dice.randrange(1, 4))
            if dice.random() < 0.3:
                made.preempt(dice.randrange(4))
            if dice.random() < 0.3:
                made.pool.forget()
        finish(made)
        done += len(made.outputs)
        preemptions += made.scheduler.counters.preemptions
        loaded += made.scheduler.counters.loaded
    assert done > 150
    assert preemptions > 30
    assert loaded > 100


# ---- the pool

KEYS = [bytes([at]) * 32 for at in range(12)]


@settings(max_examples=50)
@given(
    there=st.lists(st.booleans(), min_size=12, max_size=12),
    wanted=st.integers(0, 12),
    window=st.integers(1, 40),
)
def test_a_match_has_all_that_is_read_and_is_the_longest(there: list[bool], wanted: int, window: int) -> None:
    pool = BlockPool(12, SIZE, window)
    blocks = pool.allocate(12)
    for block, key, named in zip(blocks, KEYS, there, strict=True):
        if named:
            pool.publish(block, key, exact=True)
    pool.release(blocks)
    # Token 4 * n attends to itself and the `window - 1` before it.
    fits = [n for n in range(wanted + 1) if all(there[at // SIZE] for at in range(max(0, 4 * n - window + 1), 4 * n))]
    found = pool.match(KEYS[:wanted])
    assert len(found) == max(fits) == pool.leading(KEYS[:wanted])
    gone = found.count(NO_BLOCK)
    assert found == [NO_BLOCK] * gone + blocks[gone : len(found)]
    assert gone == max(0, 4 * len(found) - window + 1) // SIZE
    assert pool.used_blocks == len(found) - gone


def test_windows_are_checked() -> None:
    with pytest.raises(CapacityError, match="window of 0 tokens"):
        BlockPool(4, SIZE, 0)


def test_continuation_forgets_what_is_behind() -> None:
    assert continuation([1, 2, 3, 4], 5, 100) == continuation([1, 2, 3, 4], 5)
    assert continuation([9, 8, 7, 6], 5, 1) == continuation([1, 2, 3, 6], 5, 1)
