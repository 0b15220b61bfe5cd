"""Several sequences of one prompt: shared blocks, randomness of their own, one request."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tiny_model import tiny_model

from kvtier import LLM, api
from kvtier.engine import AsyncEngine, Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.engine.rules import SchedulingRules
from kvtier.engine.sampler import derived_seed
from kvtier.errors import RequestError

PROMPT = [(5 * at) % 200 + 1 for at in range(30)]
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True, n=4)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def engine_of(loaded: LoadedModel, **options: Any) -> Engine:
    return Engine(loaded, EngineOptions(**{"block_size": 4, "num_blocks": 128} | options))


def finish(engine: Engine) -> dict[tuple[str, int], RequestOutput]:
    outputs = {}
    while engine.has_work:
        outputs |= {(output.id, output.index): output for output in engine.step()}
    assert engine.stats().free_blocks == engine.stats().num_blocks
    return outputs


def alone(loaded: LoadedModel, seed: int) -> tuple[int, ...]:
    engine = engine_of(loaded)
    engine.add("alone", PROMPT, SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True))
    return finish(engine)["alone", 0].token_ids


@pytest.mark.parametrize("length", [1, 3, 4, 5, 29, 30])
@pytest.mark.parametrize("blocks", [26, 128])
def test_each_sequence_is_what_its_seed_alone_would_give(loaded: LoadedModel, length: int, blocks: int) -> None:
    engine = engine_of(loaded, num_blocks=blocks, max_running=4)
    engine.add("r", PROMPT[:length], DRAWN)
    engine.add("other", PROMPT[::-1], DRAWN)
    outputs = finish(engine)
    for index in range(4):
        single = engine_of(loaded)
        seed = derived_seed(5, index) if index else 5
        single.add("s", PROMPT[:length], SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True))
        assert outputs["r", index].token_ids == finish(single)["s", 0].token_ids
        assert outputs["r", index].finish_reason == "length"
    assert len({outputs["r", index].token_ids for index in range(4)}) > 1


def test_the_prompt_lies_in_memory_once(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    engine.add("r", PROMPT, DRAWN)
    held = []
    while engine.has_work:
        engine.step()
        held.append(engine.stats().num_blocks - engine.stats().free_blocks)
    # 42 tokens: 7 full blocks of the prompt once, and per sequence the 8th, shared by two tokens, to the 11th.
    assert max(held) <= 7 + 4 * 4


def test_the_prompt_is_computed_once(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    engine.add("r", PROMPT, DRAWN)
    finish(engine)
    # Each further sequence computes the prompt's last token again, for its own first draw.
    assert engine.stats().computed_tokens == 30 + 11 + 3 * 12


def test_all_came_when_the_request_did(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    engine.add("r", PROMPT, DRAWN)
    metrics = [output.metrics for output in finish(engine).values()]
    assert len({one.arrival for one in metrics}) == 1
    assert all(one.ttft >= metrics[0].ttft > 0 for one in metrics)


@pytest.mark.parametrize("pipelined", [False, True])
def test_no_more_run_than_are_allowed_to(loaded: LoadedModel, pipelined: bool) -> None:
    expected = engine_of(loaded, max_running=32)
    engine = engine_of(loaded, max_running=3, scheduling=SchedulingRules(pipelined=pipelined))
    outputs: list[dict[tuple[str, int], RequestOutput]] = [{}, {}]
    for found, one in zip(outputs, (expected, engine), strict=True):
        one.add("r", PROMPT, replace(DRAWN, n=8))
        one.add("other", PROMPT[::-1], DRAWN)
        while one.has_work:
            found |= {(output.id, output.index): output for output in one.step()}
            assert one.stats().running <= one.options.max_running
    assert {key: output.token_ids for key, output in outputs[0].items()} == {
        key: output.token_ids for key, output in outputs[1].items()
    }
    # Those that waited found the prompt's seven full blocks, and computed its last two tokens anew.
    assert engine.stats().computed_tokens <= expected.stats().computed_tokens + 10


def test_an_abort_ends_all_and_tells_what_each_had(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    engine.add("r", PROMPT, DRAWN)
    for _ in range(5):
        engine.step()
    outputs = engine.abort("r")
    assert [(output.id, output.index, output.finish_reason) for output in outputs] == [
        ("r", index, "abort") for index in range(4)
    ]
    assert [len(output.token_ids) for output in outputs] == [5, 4, 4, 4]
    assert not engine.has_work
    assert engine.stats().free_blocks == engine.stats().num_blocks


def test_an_abort_before_the_prompt_is_there(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    engine.add("r", PROMPT, DRAWN)
    assert len(engine.abort("r")) == 4
    assert not engine.has_work


def test_the_stream_brings_all_sequences_and_ends_with_the_last(loaded: LoadedModel) -> None:
    async def collect() -> list[RequestOutput]:
        engine = AsyncEngine(engine_of(loaded))
        try:
            return [output async for output in engine.generate(PROMPT, DRAWN)]
        finally:
            engine.close()

    outputs = asyncio.run(collect())
    for index in range(4):
        own = [output for output in outputs if output.index == index]
        assert "".join(output.delta for output in own) == own[-1].text
        assert [output.finish_reason for output in own] == [None] * (len(own) - 1) + ["length"]
        assert len(own[-1].token_ids) == 12


def test_ending_the_stream_early_gives_all_blocks_back(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)

    async def part() -> None:
        serving = AsyncEngine(engine)
        try:
            async for output in serving.generate(PROMPT, DRAWN):
                if len(output.token_ids) == 3:
                    break
        finally:
            serving.close()

    asyncio.run(part())
    assert engine.stats().free_blocks == engine.stats().num_blocks


def test_a_failed_step_ends_all_sequences(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    engine.add("r", PROMPT, DRAWN)
    engine.step()
    loaded.model.fails = True  # type: ignore[attr-defined]
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    finally:
        loaded.model.fails = False  # type: ignore[attr-defined]
    assert not engine.has_work
    assert engine.stats().free_blocks == engine.stats().num_blocks


def test_each_prompt_may_have_params_of_its_own(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_load", lambda config: loaded)
    wanted = [replace(DRAWN, n=3), None, SamplingParams(beam_width=4, n=2, max_tokens=5)]
    with LLM(tiering={"host": {"capacity": "1MiB"}}, num_blocks=128, block_size=4) as llm:
        together = llm.generate([PROMPT, PROMPT[:9], PROMPT[::-1]], wanted)
        alone = [
            llm.generate([prompt], params)[0]
            for prompt, params in zip([PROMPT, PROMPT[:9], PROMPT[::-1]], wanted, strict=True)
        ]
        for output, expected in zip(together, alone, strict=True):
            assert [one.token_ids for one in output.sequences] == [one.token_ids for one in expected.sequences]
        assert [len(output.sequences) for output in together] == [3, 1, 2]
        for wrong in (wanted[:2], [DRAWN, DRAWN, "greedy"], "greedy", 5):
            with pytest.raises(RequestError, match="params"):
                llm.generate([PROMPT] * 3, wrong)  # type: ignore[arg-type]
        assert not llm.engine.has_work


@pytest.mark.parametrize("n", [0, -1, 257, 1.5])
def test_senseless_numbers_are_refused(n: int) -> None:
    with pytest.raises(RequestError, match="n="):
        SamplingParams(n=n)
