"""Loads within the step that computes from them: no step is lost, and a load that fails is as if it had not been."""

import contextlib
import random
from collections.abc import Iterator

import pytest
from kvtier_engine import Connection, connect
from patience import turns
from scheduler_device import continuation
from scheduler_world import Fate, RandomFate, World
from tiny_model import tiny_model

from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.engine.request import State
from kvtier.engine.rules import SchedulingRules
from kvtier.errors import TierUnavailable
from kvtier.layout import Span
from kvtier.store import TieredStore

PROMPT = [(7 * at) % 45 for at in range(18)]
OTHERS = [[(11 * at + 3 * number) % 45 for at in range(6)] for number in range(3)]


def world(fate: Fate, **rules: object) -> World:
    """A world whose scheduler knows what steps cost, and whose store knows the prompt."""
    made = World(num_blocks=24, max_running=4, token_budget=16, fate=fate, rules=SchedulingRules(**rules))  # type: ignore[arg-type]
    for number, prompt in enumerate([PROMPT, *OTHERS]):
        made.add(f"early-{number}", prompt, 6)
    made.drain()
    made.pool.forget()
    return made


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 1), (1e6, 2), (None, 2)])
def test_a_load_that_fits_within_the_step_costs_none(seconds: float | None, steps: int) -> None:
    made = world(Fate(copying=seconds), overlap_loads=True)
    late = made.add("late", PROMPT, 3)
    taken = 0
    while not late.num_output:
        made.step()
        taken += 1
    assert taken == steps
    assert made.overlapped == (steps == 1)
    assert late.metrics.loaded_tokens == 16
    made.drain()
    assert made.outputs["late"][1] == continuation(PROMPT, 3)


def test_it_is_off_unless_asked_for() -> None:
    made = world(Fate(copying=0.0))
    made.add("late", PROMPT, 3)
    made.drain()
    assert not made.overlapped


@pytest.mark.parametrize("arriving", [0, 1, 3])
def test_a_load_that_fails_within_the_step_is_computed(arriving: int) -> None:
    fate = Fate(copying=0.0)
    made = world(fate, overlap_loads=True)
    late = made.add("late", PROMPT, 3)
    fate.arriving = arriving
    saved = dict(made.connector.store)  # type: ignore[union-attr]
    plan = made.step()
    assert made.voided == 1
    assert not plan.transfers.saves
    assert (late.num_output, late.num_computed) == (0, 4 * arriving)
    assert late.state is State.RUNNING
    assert made.pool.leading(late.chain) == arriving
    fate.arriving = None
    made.drain()
    assert made.outputs["late"][1] == continuation(PROMPT, 3)
    assert all(made.connector.store[key] == block for key, block in saved.items())  # type: ignore[union-attr]
    assert made.pool.free_blocks == 24


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("end", ["abort", "preempt", "fail"])
def test_ended_or_preempted_while_the_step_is_under_way(end: str, good: bool) -> None:
    fate = Fate(copying=0.0)
    made = world(fate, overlap_loads=True, pipelined=end != "fail", preemption="swap")
    late = made.add("late", PROMPT, 3)
    beside = made.add("beside", OTHERS[0][::-1], 6)
    fate.arriving = None if good else 1
    if end == "fail":
        made.step(fails=True)
        made.add("late", PROMPT, 3)
        made.add("beside", OTHERS[0][::-1], 6)
    else:
        while late.loading_from is None:
            made.step()
        if end == "abort":
            made.abort("late")
        else:
            made.preempt(made.scheduler._books.running.index(late))
            assert late.state is not State.RUNNING
    fate.arriving = None
    made.drain()
    assert ("late" in made.outputs) == (end != "abort")
    for prompt, output in made.outputs.values():
        assert output == continuation(prompt, len(output))
    assert beside.metrics.preemptions == 0
    if made.under_way is not None:
        made.land(*made.under_way)
    assert made.pool.free_blocks == 24


@pytest.mark.parametrize("pipelined", [False, True])
def test_amid_failures_aborts_and_preemptions(pipelined: bool) -> None:
    overlapped = voided = 0
    for seed in range(40):
        dice = random.Random(seed)
        rules = SchedulingRules(preemption="swap", pipelined=pipelined, overlap_loads=True)
        made = World(num_blocks=14, max_running=4, token_budget=12, fate=RandomFate(seed), rules=rules)
        for number in range(12):
            made.add(f"r{number}", dice.choice([PROMPT, *OTHERS])[: dice.randrange(3, 18)], 1 + dice.randrange(8))
            for _ in range(dice.randrange(8)):
                made.step()
                made.check()
            if dice.random() < 0.2 and made.live:
                made.abort(dice.choice(sorted(made.live)))
            if dice.random() < 0.3:
                made.preempt(dice.randrange(4))
            if dice.random() < 0.5:
                made.pool.forget()
        made.drain()
        made.check_outputs()
        overlapped, voided = overlapped + made.overlapped, voided + made.voided
    assert overlapped > 50
    assert voided > 10


# ---- the engine over a real store

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
TEXTS = {str(number): [(7 * at + 11 * number) % 200 + 1 for at in range(30 + number)] for number in range(5)}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> dict[str, tuple[int, ...]]:
    return tokens(finish(Engine(loaded, EngineOptions(block_size=4, num_blocks=128)), "", TEXTS))


@contextlib.contextmanager
def tiered(loaded: LoadedModel, *, pipelined: bool = False) -> Iterator[tuple[Engine, Connection]]:
    """An engine whose every load is expected to fit within a step."""
    rules = SchedulingRules(overlap_loads=True, pipelined=pipelined)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(TieredStore(HostTier(4 << 20))))
        connection = connect(store, loaded, loaded.model.layout(4), 64, recompute_gate=False)
        stack.enter_context(contextlib.closing(connection))
        connection.scheduler._gate.copy_seconds = lambda tiers, blocks: 0.0  # type: ignore[method-assign]
        options = EngineOptions(block_size=4, num_blocks=64, token_budget=64, scheduling=rules)
        yield Engine(loaded, options, (connection.scheduler, connection.worker)), connection


def finish(engine: Engine, name: str, prompts: dict[str, list[int]]) -> dict[str, RequestOutput]:
    for number, prompt in prompts.items():
        engine.add(name + number, prompt, GREEDY)
    outputs: dict[str, RequestOutput] = {}
    for _ in turns():
        if not (engine.has_work or engine.busy):
            break
        outputs |= {output.id.removeprefix(name): output for output in engine.step()}
    else:
        raise AssertionError(f"no end in sight: {engine.stats()}")
    assert engine.stats().free_blocks == engine.stats().num_blocks
    return outputs


def tokens(outputs: dict[str, RequestOutput]) -> dict[str, tuple[int, ...]]:
    return {name: output.token_ids for name, output in outputs.items()}


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_same_tokens_and_fewer_steps(
    loaded: LoadedModel, expected: dict[str, tuple[int, ...]], pipelined: bool
) -> None:
    with tiered(loaded, pipelined=pipelined) as (engine, _):
        assert tokens(finish(engine, "a", TEXTS)) == expected
        engine.clear_device_cache()
        outputs = finish(engine, "b", TEXTS)
        assert tokens(outputs) == expected
        assert all(output.metrics.loaded_tokens for output in outputs.values())
        engine.clear_device_cache()
        # Alone: the step that loads the prompt brings the first token.
        engine.add("alone", TEXTS["1"], GREEDY)
        before = engine.stats().steps
        while not any(output.id == "alone" for output in engine.step()):
            pass
        assert engine.stats().steps - before == 1 or pipelined
        engine.abort("alone")
        finish(engine, "c", {})


def test_a_copy_that_fails_half_way(
    loaded: LoadedModel, expected: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered(loaded) as (engine, connection):
        finish(engine, "a", TEXTS)
        engine.clear_device_cache()
        view, broken = connection.worker._view, random.Random(2)

        def fails(span: Span) -> memoryview:
            if broken.random() < 0.1:
                raise TierUnavailable("injected")
            return view(span)

        monkeypatch.setattr(connection.worker, "_view", fails)
        outputs = finish(engine, "b", TEXTS)
        monkeypatch.undo()
        assert tokens(outputs) == expected
        assert any(output.metrics.loaded_tokens < 28 for output in outputs.values())
        # Nothing wrong was published or saved.
        for life in ("c", "d"):
            engine.clear_device_cache()
            assert tokens(finish(engine, life, TEXTS)) == expected
