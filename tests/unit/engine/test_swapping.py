"""Requests that lose their blocks, on a real decoder and a real store: the same tokens, and nothing computed twice."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from kvtier_engine import Connection, connect
from patience import turns
from tiny_model import tiny_model

from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.engine.request import State
from kvtier.engine.rules import SchedulingRules
from kvtier.formats import fidelity
from kvtier.hooks import TransferResults
from kvtier.store import StoreOptions, TieredStore

BLOCK = 4
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = {f"r{number}": [(11 * at + 29 * number) % 200 + 1 for at in range(9 + 2 * number)] for number in range(6)}
TOKENS = sum(len(prompt) + 23 for prompt in PROMPTS.values())
SWAP = SchedulingRules(preemption="swap")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


class Stack:
    """Engine, connector, host and a tier below, with blocks for about two of the six requests."""

    def __init__(self, loaded: LoadedModel, rules: SchedulingRules, *, host: int = 1 << 20, **options: Any) -> None:
        self.below = HostTier(1 << 20, name="below")
        self.store = TieredStore(HostTier(host), [self.below], options=StoreOptions(**options))
        layout = loaded.model.layout(BLOCK)
        self.connection: Connection = connect(self.store, loaded, layout, 64, recompute_gate=False)
        self.engine = Engine(
            loaded,
            EngineOptions(block_size=BLOCK, num_blocks=20, max_running=4, scheduling=rules),
            (self.connection.scheduler, self.connection.worker),
        )
        self.scheduler = self.engine._scheduler
        self.outputs: dict[str, RequestOutput] = {}

    def add(self, prompts: Mapping[str, list[int]], params: SamplingParams = PARAMS) -> None:
        for name, prompt in prompts.items():
            self.engine.add(name, prompt, params)

    def finish(self) -> dict[str, RequestOutput]:
        for _ in turns():
            if not (self.engine.has_work or self.engine.busy):
                return self.outputs
            self.outputs |= {output.id: output for output in self.engine.step()}
        raise AssertionError(f"no progress: {self.engine.stats()}")

    def step_until(self, state: State) -> str:
        """Step until some request is in a state; which one."""
        for _ in turns():
            self.outputs |= {output.id: output for output in self.engine.step()}
            for name in PROMPTS:
                request = self.scheduler.get(name)
                if request is not None and request.state is state:
                    return name
        raise AssertionError(f"never {state}")

    @property
    def reservations(self) -> int:
        return self.store.stats()["host"]["reservations"]

    def close(self) -> None:
        self.connection.close()
        self.store.close()


@pytest.fixture(scope="module")
def undisturbed(loaded: LoadedModel) -> dict[str, tuple[int, ...]]:
    outputs = {}
    for name, prompt in PROMPTS.items():
        engine = Engine(loaded, EngineOptions(block_size=BLOCK, num_blocks=64))
        engine.add(name, prompt, PARAMS)
        while engine.has_work:
            outputs |= {output.id: output.token_ids for output in engine.step()}
    return outputs


@contextlib.contextmanager
def stack(loaded: LoadedModel, rules: SchedulingRules, **options: Any) -> Iterator[Stack]:
    made = Stack(loaded, rules, **options)
    with contextlib.closing(made):
        yield made
        assert made.reservations == 0
        assert made.engine.stats().free_blocks == 20


def tokens(outputs: Mapping[str, RequestOutput]) -> dict[str, tuple[int, ...]]:
    return {name: output.token_ids for name, output in outputs.items()}


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("order", ["fcfs", "priority", "slack", "longest_prefix"])
def test_swapped_requests_go_on_where_they_were(
    loaded: LoadedModel, undisturbed: dict[str, tuple[int, ...]], order: Any, *, pipelined: bool
) -> None:
    with stack(loaded, replace(SWAP, order=order, pipelined=pipelined)) as made:
        made.add(PROMPTS)
        assert tokens(made.finish()) == undisturbed
        counters = made.scheduler.counters
        assert counters.swaps == counters.preemptions > 0
        assert counters.computed == TOKENS


def test_recomputed_requests_have_the_same_output(loaded: LoadedModel, undisturbed: dict[str, tuple[int, ...]]) -> None:
    with stack(loaded, SchedulingRules(preemption="recompute")) as made:
        made.add(PROMPTS)
        assert tokens(made.finish()) == undisturbed
        counters = made.scheduler.counters
        assert (counters.swaps, counters.loaded) == (0, 0)
        assert counters.computed > TOKENS


def test_auto_swaps_what_comes_back_sooner_and_computes_what_does_not(
    loaded: LoadedModel, undisturbed: dict[str, tuple[int, ...]]
) -> None:
    swaps = []
    for tokens_per_second in (1e9, 1.0):
        made = Stack(loaded, SchedulingRules())
        connection = connect(made.store, loaded, loaded.model.layout(BLOCK), 64)
        made.engine = Engine(
            loaded,
            EngineOptions(block_size=BLOCK, num_blocks=20, max_running=4),
            (connection.scheduler, connection.worker),
        )
        gate = connection.scheduler._gate
        gate._prefill.observe(1000, 1000 / tokens_per_second)
        gate._prefill.observe = lambda *_: None  # type: ignore[method-assign]
        gate.link.observe(1 << 20, 0.01)
        made.add(PROMPTS)
        assert tokens(made.finish()) == undisturbed
        swaps.append(made.engine._scheduler.counters.swaps)
        connection.close()
        made.close()
    assert swaps[0] == 0 < swaps[1]


def test_swapping_loses_nothing_to_a_lossy_host(loaded: LoadedModel, undisturbed: dict[str, tuple[int, ...]]) -> None:
    assert fidelity("int8") < fidelity("raw")
    with stack(loaded, SWAP, formats={"host": "int8"}, accept_lossy=True) as made:
        made.add(PROMPTS)
        assert tokens(made.finish()) == undisturbed
        assert made.scheduler.counters.swaps > 0
        assert made.scheduler.counters.computed == TOKENS


def test_what_is_private_is_no_block_of_any_tier(loaded: LoadedModel) -> None:
    with stack(loaded, SWAP) as made:
        made.add(PROMPTS)
        made.step_until(State.SWAPPED)
        assert made.reservations > 0
        made.store.flush()
        named = made.store.stats()
        assert named["host"]["blocks"] == named["below"]["blocks"]
        assert made.store.clear() is None
        assert made.reservations > 0
        made.finish()


@pytest.mark.parametrize("state", [State.SWAPPING_OUT, State.SWAPPED, State.LOADING])
def test_private_objects_go_with_an_aborted_request(
    loaded: LoadedModel, undisturbed: dict[str, tuple[int, ...]], state: State
) -> None:
    with stack(loaded, SWAP) as made:
        made.add(PROMPTS)
        name = made.step_until(state)
        made.engine.abort(name)
        outputs = made.finish()
        outputs.pop(name, None)
        assert tokens(outputs) == {other: output for other, output in undisturbed.items() if other != name}


def test_they_go_with_the_connection_too(loaded: LoadedModel) -> None:
    made = Stack(loaded, SWAP)
    made.add(PROMPTS)
    made.step_until(State.SWAPPED)
    assert made.reservations > 0
    made.connection.close()
    assert made.reservations == 0
    made.store.close()


def test_a_damaged_private_object_is_computed_again(
    loaded: LoadedModel, undisturbed: dict[str, tuple[int, ...]]
) -> None:
    with stack(loaded, SWAP) as made:
        made.add(PROMPTS)
        name = made.step_until(State.SWAPPED)
        swap = made.connection.scheduler._swaps.get(name)
        assert swap is not None
        for handle, _ in swap.objects:
            made.store.host.buffer(handle)[0] ^= 1
        assert tokens(made.finish()) == undisturbed
        assert made.scheduler.counters.computed > TOKENS


@pytest.mark.parametrize("host", [1 << 12, 1 << 15])
def test_a_host_that_is_too_small_costs_time_only(
    loaded: LoadedModel, undisturbed: dict[str, tuple[int, ...]], host: int
) -> None:
    with stack(loaded, SWAP, host=host) as made:
        made.add(PROMPTS)
        assert tokens(made.finish()) == undisturbed
        assert made.scheduler.counters.swaps > 0


def test_a_copy_that_fails_on_the_way_out_costs_time_only(
    loaded: LoadedModel, undisturbed: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with stack(loaded, SWAP) as made:
        completed = made.connection.scheduler.completed
        leaving: set[int] = set()
        planned = made.connection.scheduler.plan

        def plan(step: Any) -> Any:
            made_plan = planned(step)
            leaving.update(made_plan.evacuations)
            return made_plan

        def fail(results: TransferResults) -> Any:
            lost = leaving & set(results.finished)
            kept = tuple(job for job in results.finished if job not in lost)
            return completed(replace(results, finished=kept, failed=results.failed | dict.fromkeys(lost, 0)))

        monkeypatch.setattr(made.connection.scheduler, "plan", plan)
        monkeypatch.setattr(made.connection.scheduler, "completed", fail)
        made.add(PROMPTS)
        assert tokens(made.finish()) == undisturbed
        assert leaving
