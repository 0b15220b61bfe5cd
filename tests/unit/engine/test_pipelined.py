"""Steps that are planned while another one runs: the same tokens, one step later, whatever ends meanwhile."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from patience import turns
from tiny_model import TinyModel, tiny_model

from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.drafting import PromptLookup
from kvtier.engine.models import LoadedModel
from kvtier.engine.pipeline import Pipeline, Ran
from kvtier.engine.plan import StepPlan
from kvtier.engine.rules import SchedulingRules
from kvtier.errors import ConfigError
from kvtier.hooks import Step, TransferPlan, TransferResults

PIPELINED = SchedulingRules(pipelined=True)
PROMPTS = {f"r{number}": [(11 * at + 29 * number) % 200 + 1 for at in range(3 + 7 * number)] for number in range(6)}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def engine_of(loaded: LoadedModel, rules: SchedulingRules, **options: Any) -> Engine:
    chosen = {"block_size": 4, "num_blocks": 64, "token_budget": 16, "scheduling": rules} | options
    return Engine(loaded, EngineOptions(**chosen))


def finish(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in turns():
        if not (engine.has_work or engine.busy):
            assert engine.stats().free_blocks == engine.stats().num_blocks
            return outputs
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
    raise AssertionError(f"no progress: {engine.stats()}")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=1.5, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=frozenset(range(60))),
        SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True, repetition_penalty=1.5, logprobs=2),
        SamplingParams(max_tokens=9, temperature=1.0, seed=5, ignore_eos=True, n=3),
        SamplingParams(max_tokens=9, ignore_eos=True, beam_width=3, n=3),
    ],
)
@pytest.mark.parametrize("blocks", [64, 20])
def test_the_same_outputs(loaded: LoadedModel, params: SamplingParams, blocks: int) -> None:
    found = []
    for rules in (SchedulingRules(), PIPELINED):
        engine = engine_of(loaded, rules, num_blocks=blocks)
        for name, prompt in PROMPTS.items():
            engine.add(name, prompt, params)
        ends = [output for outputs in finish(engine).values() for output in outputs if output.finish_reason]
        found.append({(end.id, end.index): (end.token_ids, end.finish_reason, end.text) for end in ends})
    assert found[0] == found[1]
    assert len(found[0]) == len(PROMPTS) * params.n


def test_each_token_comes_one_step_late(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, PIPELINED)
    engine.add("r", PROMPTS["r1"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert engine.step() == []
    for count in (1, 2, 3):
        (output,) = engine.step()
        assert len(output.token_ids) == count
    assert not engine.has_work


def test_abort_while_its_step_runs(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, PIPELINED)
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert [output.finish_reason for output in engine.abort("r1")] == ["abort"]
    outputs = finish(engine)
    assert {name for name, ends in outputs.items() if ends[-1].finish_reason == "length"} == PROMPTS.keys() - {"r1"}


@pytest.fixture
def failing(loaded: LoadedModel) -> Iterator[TinyModel]:
    model = loaded.model
    assert isinstance(model, TinyModel)
    yield model
    model.fails = False


def test_a_failed_step_takes_its_requests_and_the_planned_ones_start_over(
    loaded: LoadedModel, failing: TinyModel
) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    alone = engine_of(loaded, SchedulingRules())
    alone.add("late", PROMPTS["r2"], params)
    expected = finish(alone)["late"][-1].token_ids
    engine = engine_of(loaded, PIPELINED)
    engine.add("early", PROMPTS["r1"], params)
    engine.step()
    engine.step()
    assert engine._pipeline is not None
    running = engine._pipeline._running
    assert running is not None
    running[1].result(10)
    failing.fails = True
    engine.step()
    engine.add("late", PROMPTS["r2"], params)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    failing.fails = False
    outputs = finish(engine)
    assert outputs["late"][-1].token_ids == expected
    assert "early" not in outputs


def test_the_next_step_is_planned_while_one_runs() -> None:
    started, go = threading.Event(), threading.Event()

    def run(plan: StepPlan) -> Ran:
        started.set()
        assert go.wait(10)
        return Ran(plan, [], TransferResults(), 0.0)

    pipeline, plan = Pipeline(run), StepPlan(Step(0, (), frozenset()), (), (), (), TransferPlan())
    assert pipeline.wait() is None
    pipeline.start(plan)
    assert started.wait(10)
    assert pipeline.plan is plan
    assert not pipeline.busy
    go.set()
    ran = pipeline.wait()
    assert ran is not None
    assert ran.plan is plan
    assert pipeline.plan is None


def test_guesses_and_pipelined_steps_exclude_each_other(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        Engine(loaded, EngineOptions(scheduling=PIPELINED), proposer=PromptLookup())
