"""Orders, victims, classes, chunks that keep their time, on a simulated clock; nothing starves."""

from collections.abc import Sequence
from typing import Any

import pytest
from scheduler_device import continuation
from scheduler_world import Fate, World

from kvtier.engine.plan import Draft, StepPlan
from kvtier.engine.request import Request, State
from kvtier.engine.rules import SchedulingRules
from kvtier.errors import ConfigError

ORDERS = ["fcfs", "priority", "slack", "longest_prefix"]


def seconds(plan: StepPlan) -> float:
    """A step's time: 1, and per decode 0.05, and per prompt token 0.1."""
    decodes = sum(span.stop - span.start == 1 for span in plan.step.spans)
    return 1 + 0.05 * decodes + 0.1 * (plan.num_tokens - decodes)


def world(*, hook: bool = True, blocks: int = 24, running: int = 4, budget: int = 16, **rules: Any) -> World:
    fate = Fate() if hook else None
    return World(
        num_blocks=blocks, max_running=running, token_budget=budget, fate=fate, rules=SchedulingRules(**rules),
        cost=seconds,
    )  # fmt: skip


def prompt(number: int, length: int) -> list[int]:
    return [(number + at * at) % 97 + 1000 * number for at in range(length)]


def firsts(made: World, requests: Sequence[Request]) -> list[str]:
    """Ids in the order in which they got their first tokens."""
    made.drain()
    return [request.id for request in sorted(requests, key=lambda one: one.metrics.first_token or 0.0)]


def test_fcfs_computes_who_came_first() -> None:
    made = world(running=1)
    assert firsts(made, [made.add(name, prompt(at, 9), 2) for at, name in enumerate("abc")]) == list("abc")


def test_priority_computes_the_better_class_first() -> None:
    made = world(running=1, order="priority")
    requests = [made.add(name, prompt(at, 9), 2, priority=at % 2) for at, name in enumerate("abcd")]
    assert firsts(made, requests) == ["a", "c", "b", "d"]


@pytest.mark.parametrize("order", ["priority", "slack", "longest_prefix"])
def test_a_fork_that_lost_its_blocks_comes_before_who_came_after_its_parent(order: Any) -> None:
    made = world(order=order, ageing=5.0, preemption="recompute")
    parent = made.add("a", prompt(1, 9), 12)
    for _ in range(3):
        made.step()
    later = made.add("later", prompt(2, 9), 2)
    for _ in range(3):
        made.step()
    fork = made.fork(parent, "a-fork", 12)
    made.preempt(made.scheduler._books.running.index(fork))
    assert fork.state is State.WAITING
    assert fork.rank < later.rank
    made.drain()
    made.check_outputs()


def test_slack_computes_first_what_must_start_first() -> None:
    made = world(running=1, order="slack")
    # The step model learns what prefill costs.
    for number in range(12):
        made.add(f"warm-{number}", prompt(50 + number, 5 + number), 2)
    made.drain()
    requests = [
        made.add("late", prompt(1, 8), 1, ttft_target=20.0),
        made.add("never", prompt(2, 8), 1),
        made.add("soon", prompt(3, 8), 1, ttft_target=10.0),
        made.add("long", prompt(4, 60), 1, ttft_target=15.0),  # 15 - 6 of prefill: before 10 - 0.8
    ]
    assert firsts(made, requests) == ["long", "soon", "late", "never"]


@pytest.mark.parametrize(
    ("old", "first"),
    [
        ({"tpot_target": 2.0}, "old"),  # its next token is due before the other's first
        ({"ttft_target": 1.0, "tpot_target": 500.0}, "new"),  # its first one was due long ago, and is there
        ({"ttft_target": 1.0}, "new"),
        ({}, "new"),
    ],
)
def test_slack_of_who_has_begun_is_that_of_its_next_token(old: dict[str, float], first: str) -> None:
    made = world(running=1, order="slack", ageing=1000.0, preemption="recompute")
    begun = made.add("old", prompt(1, 9), 12, **old)
    while begun.num_output < 3:
        made.step()
    other = made.add("new", prompt(2, 9), 3, ttft_target=25.0)
    made.preempt(0)
    assert begun.state is State.WAITING
    while not made.scheduler.num_running:
        made.step()
    assert (begun if first == "old" else other).state is State.RUNNING
    made.drain()
    made.check_outputs()


def test_longest_prefix_computes_first_what_is_cached() -> None:
    made = world(running=1, order="longest_prefix")
    cached = prompt(1, 20)
    made.add("before", cached, 1)
    made.drain()
    requests = [made.add("new", prompt(2, 20), 1), made.add("half", [*cached[:9], 1], 1), made.add("all", cached, 1)]
    assert firsts(made, requests) == ["all", "half", "new"]


@pytest.mark.parametrize("order", ORDERS)
def test_nobody_starves_under_a_stream_of_better_requests(order: Any) -> None:
    made = world(order=order, ageing=20.0, blocks=16, running=2)
    favoured = prompt(7, 20)
    poor = made.add("poor", prompt(1, 20), 12, priority=3)
    number = 0
    while "poor" in made.live:
        assert number < 300, f"{order}: starved"
        for _ in range(2):
            if len(made.live) < 8:
                number += 1
                made.add(f"rich-{number}", [*favoured, number], 2, priority=0, ttft_target=1.0)
        made.step()
        made.check()
    assert poor.state is State.FINISHED
    made.drain()
    made.check_outputs()


@pytest.mark.parametrize("blocks", [24, 96])
def test_a_better_class_under_full_load_waits_two_decodes_and_a_chunk_at_most(blocks: int) -> None:
    """Whether it is blocks that are missing, or places."""
    excesses = []
    for arrival in range(20, 60, 2):
        idle = world(order="priority", victims="class", ageing=1000.0)
        alone = idle.add("high", prompt(5, 24), 2)
        idle.drain()
        made = world(order="priority", victims="class", ageing=1000.0, blocks=blocks)
        for number in range(16):
            made.add(f"low-{number}", prompt(10 + number, 16), 40, priority=1)
        for _ in range(arrival):
            made.step()
        assert made.scheduler.num_waiting > 4
        high = made.add("high", prompt(5, 24), 2, priority=0)
        made.drain()
        made.check_outputs()
        excesses.append(high.metrics.ttft - alone.metrics.ttft)
    assert max(excesses) <= 2 * (1 + 0.05 * 4) + (1 + 0.1 * 16)


def test_a_class_is_no_reason_where_the_order_knows_none() -> None:
    made = world(running=1)
    made.add("low", prompt(1, 9), 8, priority=1)
    made.step()
    high = made.add("high", prompt(2, 9), 2, priority=0)
    while "low" in made.live:
        made.step()
        assert high.state is State.WAITING or "low" not in made.live
    assert made.scheduler.counters.preemptions == 0


@pytest.mark.parametrize(("victims", "expected"), [("fifo", "c-fork"), ("class", "b"), ("slack", "c"), ("cost", "d")])
def test_who_gives_way(victims: Any, expected: str) -> None:
    made = world(victims=victims, budget=64, running=5)
    first = made.add("a", prompt(1, 8), 30, priority=9, tpot_target=900.0)
    made.add("b", prompt(2, 14), 20, priority=8, tpot_target=1.5)
    made.add("c", prompt(3, 16), 9, tpot_target=100.0)
    made.add("d", prompt(4, 9), 20, tpot_target=1.5)
    made.step()
    # Long, but most of it is somebody else's too, and of c likewise.
    made.fork(made.live["c"], "c-fork", 6, tpot_target=1.5)
    made.step()
    taken = made.pool.allocate(made.pool.free_blocks)
    assert made.scheduler._room.make(first, first.blocks.capacity_tokens + 1, Draft(1))
    assert [request.id for request in made.live.values() if request.metrics.preemptions] == [expected]
    made.pool.release(taken)
    made.drain()
    made.check_outputs()
    made.at_rest()


def test_chunks_leave_decodes_their_time() -> None:
    made = world(hook=False, blocks=200, budget=64, running=8)
    for number in range(10):
        made.add(f"warm-{number}", prompt(50 + number, 10 + 7 * number), 6 + number)
        made.step()
    made.drain()
    made.add("fast", prompt(1, 8), 60, tpot_target=4.0)
    made.step()
    made.add("long", prompt(2, 300), 2)
    costs, chunks = [], []
    while "long" in made.live:
        plan = made.step()
        costs.append(seconds(plan))
        chunks.append(max(span.stop - span.start for span in plan.step.spans))
    assert max(costs) <= 4.0 * 1.05
    assert max(chunks) >= 25  # nor is time given away: 1 + 0.05 + 0.1 * 29 < 4
    made.drain()
    made.check_outputs()


def guess(made: World, names: str, count: int) -> None:
    """Right guesses for all of these."""
    for name in names:
        made.draft(made.live[name], continuation(made.live[name].tokens, count))


def test_a_guess_takes_no_decodes_token() -> None:
    made = world(hook=False, budget=5)
    for at, name in enumerate("abc"):
        made.add(name, prompt(at, 5), 12)
    while min(request.num_output for request in made.live.values()) == 0:
        made.step()
    guess(made, "abc", 4)
    plan = made.step()
    assert sorted(span.stop - span.start for span in plan.step.spans) == [1, 1, 3]
    made.drain()
    made.check_outputs()


def test_nobody_gives_way_to_a_guess() -> None:
    """Of two blocks that are free, one is for the token that the other request is sure to get."""
    made = world(hook=False, blocks=7, budget=32)
    made.add("a", prompt(1, 9), 9)
    made.add("b", prompt(2, 8), 9)
    made.step()
    assert (made.pool.free_blocks, len(made.live["b"].blocks.ids)) == (2, 2)
    guess(made, "ab", 8)
    plan = made.step()
    assert [span.stop - span.start for span in plan.step.spans] == [7, 4]
    assert made.scheduler.counters.preemptions == 0
    made.drain()
    made.check_outputs()


def test_a_target_that_cannot_be_met_does_not_stop_prefill() -> None:
    made = world(hook=False, blocks=200, budget=64, running=8)
    for number in range(10):
        made.add(f"warm-{number}", prompt(50 + number, 10 + 7 * number), 6 + number)
        made.step()
    made.drain()
    made.add("fast", prompt(1, 8), 90, tpot_target=0.5)
    made.step()
    long = made.add("long", prompt(2, 100), 2)
    made.drain()
    assert long.state is State.FINISHED


def test_a_swapped_request_comes_back_with_head_room_and_is_then_left_alone() -> None:
    made = world(blocks=12, running=3, residency=8)
    old, young = made.add("old", prompt(1, 8), 30), made.add("young", prompt(2, 8), 30)
    while young.state is not State.SWAPPED:
        made.step()
    assert made.scheduler.counters.swaps == 1
    while young.state is not State.RUNNING:
        made.step()
    assert young.metrics.loaded_tokens > 0
    resumed = made.scheduler._books.step
    while young.metrics.preemptions == 1 and "young" in made.live:
        made.step()
    assert "young" not in made.live or made.scheduler._books.step - resumed >= 8
    made.drain()
    assert made.outputs["old"][1] == continuation(prompt(1, 8), 30)
    made.at_rest()
    assert old.metrics.preemptions == 0
    assert made.scheduler.counters.computed == 2 * (8 + 29)
    made.check_outputs()


def test_no_request_comes_back_in_a_step_that_preempted() -> None:
    made = world(blocks=10, running=4)
    for number in range(5):
        made.add(str(number), prompt(number, 8), 20)
    before = 0
    while made.live:
        active = {request.id for request in made.live.values() if request.table is not None}
        made.step()
        counters = made.scheduler.counters
        came = {request.id for request in made.live.values() if request.table is not None} - active
        assert counters.preemptions == before or not came
        before = counters.preemptions
    assert before > 0
    made.check_outputs()


def test_who_waits_has_its_kv_brought_closer_a_few_at_a_time() -> None:
    made = world(running=1, prefetch_ahead=2)
    for number in range(5):
        made.add(str(number), prompt(number, 8), 4)
    made.step()
    assert made.connector.prefetched == ["1", "2"]
    made.drain()


def test_a_watermark_keeps_blocks_free_beside_others_but_not_alone() -> None:
    for watermark, admitted in ((0.0, True), (0.5, False)):
        made = world(blocks=12, watermark=watermark)
        made.add("a", prompt(1, 8), 4)
        made.step()
        other = made.add("b", prompt(2, 18), 2)
        made.step()
        assert (other.state is State.RUNNING) == admitted
        made.drain()


@pytest.mark.parametrize(
    "wrong",
    [{"order": "lifo"}, {"victims": "oldest"}, {"preemption": "never"}, {"ageing": 0.0}, {"watermark": 1.0},
     {"residency": -1}, {"prefetch_ahead": -1}],
)  # fmt: skip
def test_rules_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SchedulingRules(**wrong)
