"""Single decisions of the scheduler; tests/property has everything at once."""

import subprocess
import sys

import pytest
from scheduler_device import continuation
from scheduler_world import Fate, Stored, World

from kvtier.engine import SamplingParams
from kvtier.engine.request import Request, State
from kvtier.engine.rules import SchedulingRules
from kvtier.errors import RequestError


def world(blocks: int = 16, *, running: int = 4, budget: int = 16, hook: bool = False) -> World:
    return World(num_blocks=blocks, max_running=running, token_budget=budget, fate=Fate() if hook else None)


def stored_world(*prompts: list[int], **sizes: int) -> World:
    """A world in whose store, and nowhere else, the full blocks of `prompts` lie, which share nothing."""
    made = world(hook=True, **sizes)
    for number, prompt in enumerate(prompts):
        made.add(f"first {number}", prompt, 1)
        made.drain()
        made.pool.forget()
    assert len(made.connector.store) == sum(len(prompt) // 4 for prompt in prompts)
    return made


def load(made: World, request_id: str, prompt: list[int]) -> Request:
    """A request whose load is under way, and stays so."""
    made.connector.fate = Fate(loading=False)
    request = made.add(request_id, prompt, 2)
    made.step()
    made.step()
    assert request.state is State.LOADING
    assert request_id in {owner for owner, *_ in made.connector.load_jobs.values()}
    return request


def test_decodes_come_first_then_prefill_chunks_within_the_budget() -> None:
    made = world(budget=5)
    first = made.add("a", [1, 2, 3], 4)
    made.step()
    second = made.add("b", list(range(20)), 1)
    plan = made.step()
    assert [(span.request.id, span.start, span.stop) for span in plan.step.spans] == [("a", 3, 4), ("b", 0, 4)]
    assert plan.samples == (0,)
    assert (first.state, second.state) == (State.RUNNING, State.RUNNING)


def test_a_finished_prompt_is_found_again_but_for_its_last_token() -> None:
    made = world()
    for name, found in (("a", 0), ("b", 12)):
        request = made.add(name, list(range(16)), 1)
        made.drain()
        assert request.metrics.cached_tokens == found
        assert request.metrics.computed_tokens == 16 - found
    made.check_outputs()


def test_equal_prompts_hit_what_the_first_one_published() -> None:
    made = world(running=1)
    requests = [made.add(str(at), list(range(9)), 1) for at in range(3)]
    made.drain()
    assert [request.metrics.cached_tokens for request in requests] == [0, 8, 8]


def test_the_youngest_gives_way_and_starts_over() -> None:
    made = world(blocks=6, running=3)
    old, young = made.add("old", list(range(8)), 12), made.add("young", list(range(50, 58)), 12)
    while not young.metrics.preemptions:
        made.step()
        made.check()
    assert old.metrics.preemptions == 0
    assert young.state is State.WAITING
    made.drain()
    made.check_outputs()
    assert set(made.outputs) == {"old", "young"}


def test_few_overtake_the_one_that_does_not_fit_and_then_nobody() -> None:
    made = world(blocks=8, running=3)
    made.add("running", list(range(12)), 18)
    made.step()
    big = made.add("big", list(range(30, 46)), 2)
    small = [made.add(str(number), [number], 1) for number in range(8)]
    while "running" in made.live:
        made.step()
    assert [request.state for request in small] == [State.FINISHED] * 4 + [State.WAITING] * 4
    assert big.overtaken == 4
    made.drain()
    assert set(made.outputs) == {"running", "big", *map(str, range(8))}


def test_a_load_costs_no_budget_and_holds_up_nobody() -> None:
    prompt = list(range(13))
    made = stored_world(prompt)
    loading = load(made, "loading", prompt)
    other = made.add("other", [1, 2, 3], 2)
    while "other" in made.live:
        plan = made.step()
        assert [request.id for request in plan.requests] == ["other"]
    assert loading.state is State.LOADING
    made.connector.fate = Fate()
    made.step()
    plan = made.step()
    assert [(span.request.id, span.start) for span in plan.step.spans] == [("loading", 12)]
    made.drain()
    assert loading.metrics.loaded_tokens == 12
    assert made.outputs["loading"][1] == continuation(prompt, 2)
    assert other.metrics.loaded_tokens == 0


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_failed_load_computes_from_the_first_bad_block(good: int) -> None:
    prompt = list(range(13))
    made = stored_world(prompt)
    request = load(made, "r", prompt)
    made.connector.fate = Fate(arriving=good)
    made.step()
    plan = made.step()
    assert [(span.start, span.stop) for span in plan.step.spans] == [(4 * good, 13)]
    made.drain()
    assert request.metrics.loaded_tokens == 4 * good
    assert made.outputs["r"][1] == continuation(prompt, 2)


def test_blocks_of_an_aborted_load_stay_until_the_copy_ended() -> None:
    prompt = list(range(13))
    made = stored_world(prompt, blocks=4)
    load(made, "r", prompt)
    made.abort("r")
    made.check()
    assert made.pool.used_blocks == 3
    other = made.add("other", list(range(40, 50)), 1)
    made.step()
    assert other.state is State.WAITING
    made.connector.fate = Fate()
    made.drain()
    assert made.pool.used_blocks == 0
    made.check_outputs()


def test_a_lookup_under_way_does_not_hold_up_those_behind() -> None:
    prompt = list(range(13))
    made = stored_world(prompt)
    made.connector.fate = Fate(lookup=2)
    first, second = made.add("first again", prompt, 1), made.add("second", [1, 2], 1)
    made.step()
    assert first.state is State.WAITING
    assert second.state is State.FINISHED


def test_lossy_kv_taints_all_that_follows_but_nobody_else() -> None:
    prompt = list(range(13))
    made = stored_world(prompt)
    store = made.connector.store
    for key in store:
        store[key] = Stored([7] * 4, exact=False)
    lossy = made.add("lossy", prompt, 8)
    while "lossy" in made.live:
        plan = made.step()
        assert not any(span.exact for span in plan.step.spans)
    assert lossy.metrics.loaded_tokens > 0
    made.drain()
    strict = made.add("strict", prompt, 8)
    made.drain()
    assert strict.metrics.cached_tokens == strict.metrics.loaded_tokens == 0
    made.check_outputs()


def test_parked_loads_and_a_head_that_does_not_fit_make_progress() -> None:
    prompts = {"x": list(range(13)), "y": list(range(20, 33))}
    made = stored_world(*prompts.values(), blocks=8)
    for name, prompt in prompts.items():
        load(made, name, prompt)
    made.add("big", list(range(50, 78)), 2)
    made.connector.fate = Fate()
    made.drain(limit=60)
    assert set(made.outputs) == {"first 0", "first 1", "x", "y", "big"}
    made.check_outputs()


def test_equal_prompts_admitted_together_are_computed_once() -> None:
    made = world(budget=8)
    prompt = list(range(21))
    first, second = (made.add(name, prompt, 3) for name in ("a", "b"))
    plan = made.step()
    assert [span.request.id for span in plan.step.spans] == ["a"]
    made.drain()
    assert (first.metrics.computed_tokens, second.metrics.computed_tokens) == (21, 1)
    assert second.metrics.cached_tokens == 20
    made.check_outputs()


def test_who_waits_for_blocks_of_another_goes_on_alone_when_that_one_is_gone() -> None:
    made = world(budget=8)
    prompt = list(range(21))
    made.add("a", prompt, 3)
    second = made.add("b", prompt, 3)
    made.step()
    made.abort("a")
    made.drain()
    assert (second.metrics.cached_tokens, second.metrics.computed_tokens) == (8, 13)
    made.check_outputs()


def test_equal_prompts_share_one_load() -> None:
    prompt = list(range(13))
    made = stored_world(prompt)
    first = load(made, "x", prompt)
    second = made.add("y", prompt, 2)
    made.step()
    assert second.state is State.WAITING
    made.connector.fate = Fate()
    made.drain()
    assert (first.metrics.loaded_tokens, second.metrics.loaded_tokens) == (12, 0)
    assert second.metrics.cached_tokens == 12
    made.check_outputs()


def test_nobody_waits_for_blocks_that_may_turn_out_lossy() -> None:
    made = world(budget=8)
    prompt = list(range(21))
    lossy = SamplingParams(max_tokens=3, accept_lossy=True)
    made.scheduler.add(Request("lossy", prompt, lossy, 0, block_size=4, limit=64))
    made.scheduler.add(Request("strict", prompt, SamplingParams(max_tokens=3), 0, block_size=4, limit=64))
    made.budget = made.scheduler._token_budget = 32
    plan = made.scheduler.schedule()
    assert [span.request.id for span in plan.step.spans] == ["lossy", "strict"]


@pytest.mark.parametrize("state", list(State)[:3])
def test_abort_in_every_state_frees_everything_once(state: State) -> None:
    prompt = list(range(13))
    made = stored_world(prompt, running=1)
    if state is State.LOADING:
        request = load(made, "r", prompt)
    else:
        if state is State.WAITING:
            made.add("in front", list(range(60, 70)), 10)
        request = made.add("r", list(range(80, 90)), 10)
        made.step()
    assert request.state is state
    made.abort("r")
    made.abort("r")
    assert request.state is State.ABORTED
    made.check()
    made.connector.fate = Fate()
    made.drain()
    assert made.pool.used_blocks == 0


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    made = world(running=1, hook=True)
    made.add("fails", list(range(9)), 3)
    made.add("waits", list(range(20, 29)), 3)
    made.step(fails=True)
    assert set(made.live) == {"waits"}
    made.drain()
    assert made.outputs["waits"][1] == continuation(list(range(20, 29)), 3)
    # What the failed step was to save never reached the store.
    assert len(made.connector.store) == 2


@pytest.mark.parametrize("number", [0, 1, 2])
def test_who_is_swapped_out_before_it_copied_a_shared_tail_keeps_that_tail(number: int) -> None:
    made = World(num_blocks=24, fate=Fate(), rules=SchedulingRules(preemption="swap"))
    parent = made.add("a", list(range(6)), 9)
    made.step()
    made.fork(parent, "a-fork-1", 7)
    made.fork(parent, "a-fork-2", 7)
    made.preempt(number)
    assert made.scheduler.counters.swaps == 1
    made.drain()
    made.at_rest()
    made.check_outputs()
    assert len(made.outputs) == 3


def test_never_fits_and_id_in_use_are_refused_at_once() -> None:
    made = world(blocks=2)
    params = SamplingParams(max_tokens=2)
    with pytest.raises(RequestError, match="may grow to 9 tokens, which takes 3 blocks, the device pool has 2"):
        made.scheduler.add(Request("big", range(7), params, 0, block_size=4, limit=100))
    made.add("same", [1], 2)
    with pytest.raises(RequestError, match="'same' is in use"):
        made.add("same", [2], 2)
    assert made.scheduler.num_waiting == 1


def test_the_hook_is_asked_to_plan_every_step_even_an_empty_one() -> None:
    made = world(hook=True)
    for _ in range(3):
        assert made.step().requests == ()
    assert made.indices == [0, 1, 2]


def test_slots_without_a_token_lie_in_last_blocks_only() -> None:
    made = world()
    made.add("a", list(range(6)), 5)
    made.drain()
    counters = made.scheduler.counters
    # 6, 7, 8, 9, 10 tokens in 2, 2, 2, 3, 3 blocks.
    assert (counters.slots_held, counters.slots_reached, counters.slots_used) == (48, 48, 40)


def test_the_scheduler_needs_no_torch() -> None:
    script = "import sys, kvtier.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_blocks_that_a_load_will_write_are_announced_with_the_step_that_allocates_them() -> None:
    prompt = list(range(13))
    made = stored_world(prompt)
    made.connector.fate = Fate(starting=False)
    request = made.add("r", prompt, 2)
    plan = made.step()
    assert request.state is State.LOADING
    assert plan.step.written == set(request.blocks.ids)
    assert len(plan.step.written) == 3
