"""The engine on the real model, fp32: transformers' greedy output whatever happens around a request."""

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.api import AsyncLLM
from kvtier.engine import Engine, EngineOptions, RequestOutput
from kvtier.engine.drafting import PromptLookup
from kvtier.engine.models import LoadedModel, load_model

pytestmark = pytest.mark.model

TOKENS = 12
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(default_model: Path) -> LoadedModel:
    return load_model(default_model, torch.float32)


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    lines = (Path(__file__).parents[1] / "data/prompts.jsonl").read_text().splitlines()
    return [loaded.tokenizer.encode(json.loads(line)["prompt"]) for line in lines[:12]]


@pytest.fixture(scope="module")
def reference(default_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers.generate, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    # The end-of-sequence token is a token like any other here.
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params)
    finished: dict[str, RequestOutput] = {}
    while engine.has_work:
        finished |= {output.id: output for output in engine.step() if output.finish_reason}
    assert engine.stats().free_blocks == engine.stats().num_blocks
    return [list(finished[str(number)].token_ids) for number in range(len(prompts))]


@pytest.mark.parametrize("budget", [7, 512])
def test_all_prompts_in_one_batch(
    loaded: LoadedModel, prompts: list[list[int]], reference: list[list[int]], budget: int
) -> None:
    engine = Engine(loaded, EngineOptions(num_blocks=256, max_running=16, token_budget=budget))
    assert run(engine, prompts) == reference


def test_preempted_again_and_again(loaded: LoadedModel, prompts: list[list[int]], reference: list[list[int]]) -> None:
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=32, max_running=6))
    assert run(engine, prompts[:10]) == reference[:10]
    assert engine.stats().preemptions > 0


def test_amid_aborts(loaded: LoadedModel, prompts: list[list[int]], reference: list[list[int]]) -> None:
    engine = Engine(loaded, EngineOptions(num_blocks=64, max_running=6, token_budget=32))
    dice = random.Random(0)
    for number, prompt in enumerate(prompts[:8]):
        engine.add(f"keep-{number}", prompt, GREEDY)
        engine.add(f"drop-{number}", prompt + prompt, GREEDY)
    finished = {}
    doomed = [f"drop-{number}" for number in range(8)]
    while engine.has_work:
        finished |= {output.id: list(output.token_ids) for output in engine.step() if output.finish_reason}
        if doomed and dice.random() < 0.4:
            engine.abort(doomed.pop(dice.randrange(len(doomed))))
    assert [finished[f"keep-{number}"] for number in range(8)] == reference[:8]
    assert engine.stats().free_blocks == 64


def test_guessing_ahead(loaded: LoadedModel, prompts: list[list[int]], reference: list[list[int]]) -> None:
    # Each prompt with its own beginning of the answer again: what follows is in the prompt, more or less.
    repeated = [prompt + answer[:12] + prompt for prompt, answer in zip(prompts[:6], reference, strict=False)]
    plain = run(Engine(loaded, EngineOptions(num_blocks=256)), prompts[:6] + repeated)
    engine = Engine(loaded, EngineOptions(num_blocks=256), proposer=PromptLookup())
    assert run(engine, prompts[:6] + repeated) == plain
    assert plain[:6] == reference[:6]
    assert engine.stats().accepted_tokens > 0


def test_forked(loaded: LoadedModel, prompts: list[list[int]], reference: list[list[int]]) -> None:
    engine = Engine(loaded, EngineOptions(num_blocks=256, max_running=16))
    for number, prompt in enumerate(prompts[:4]):
        engine.add(str(number), prompt, replace(GREEDY, n=3))
    finished = {}
    while engine.has_work:
        finished |= {(output.id, output.index): list(output.token_ids) for output in engine.step()}
    assert finished == {(str(number), index): reference[number] for number in range(4) for index in range(3)}


def test_beams_are_transformers_beams(default_model: Path, loaded: LoadedModel, prompts: list[list[int]]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    engine = Engine(loaded, EngineOptions(num_blocks=256))
    for prompt in prompts[:2]:
        expected = model.generate(
            torch.tensor([prompt]), num_beams=3, num_return_sequences=3, max_new_tokens=8, do_sample=False
        )[:, len(prompt) :].tolist()
        eos = min(loaded.tokenizer.eos_ids)
        expected = [row[: row.index(eos) + 1] if eos in row else row for row in expected]
        engine.add("r", prompt, SamplingParams(max_tokens=8, beam_width=3, n=3))
        found = []
        while engine.has_work:
            found += engine.step()
        assert [list(output.token_ids) for output in found] == expected


def test_prefix_hits_at_every_length_around_a_block(loaded: LoadedModel, prompts: list[list[int]]) -> None:
    text = [token for prompt in prompts for token in prompt][:64]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    for length in (1, 15, 16, 17, 31, 32, 33, 47, 48, 49):
        engine = Engine(loaded, EngineOptions(num_blocks=32))
        cold = run(engine, [text[:length]], params)
        assert run(engine, [text[:length]], params) == cold
        assert engine.stats().device_hit_tokens == (length - 1) // 16 * 16


def test_seeds_are_reproducible_in_any_company(loaded: LoadedModel, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, top_k=40, top_p=0.95, seed=7, ignore_eos=True)
    alone = run(Engine(loaded, EngineOptions(num_blocks=256)), prompts[:1], params)[0]
    together = run(Engine(loaded, EngineOptions(num_blocks=256)), prompts, params)[0]
    other = run(
        Engine(loaded, EngineOptions(num_blocks=256)),
        prompts[:1],
        SamplingParams(max_tokens=12, temperature=0.9, top_k=40, top_p=0.95, seed=8, ignore_eos=True),
    )[0]
    assert alone == together
    assert alone != other


@pytest.fixture
def llm(default_model: Path) -> Iterator[LLM]:
    with LLM(default_model, tiering={"host": None}, config={"model": {"dtype": "float32"}}, num_blocks=64) as llm:
        yield llm


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    whole = llm.generate("The capital of France is", SamplingParams(max_tokens=24, temperature=0.0))
    stop = whole.text[8:14]
    cut = llm.generate("The capital of France is", SamplingParams(max_tokens=24, temperature=0.0, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_chat_uses_the_models_template(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=16))
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_streaming_and_cancelling(default_model: Path) -> None:
    async def scenario() -> None:
        llm = AsyncLLM(
            default_model,
            tiering={"host": {"capacity": "64MiB"}},
            config={"model": {"dtype": "float32"}},
            num_blocks=64,
        )
        try:
            cancelled = llm.generate("Once upon a time", SamplingParams(max_tokens=500, ignore_eos=True))
            async for _ in cancelled:
                break
            await cancelled.aclose()
            pieces = [output async for output in llm.generate("The capital of France is", GREEDY)]
            assert "".join(piece.delta for piece in pieces) == pieces[-1].text
            assert "Paris" in pieces[-1].text
            assert pieces[-1].finish_reason == "length"
            both = await asyncio.gather(*(collect(llm, "The capital of France is") for _ in range(2)))
            assert both == [pieces[-1].text] * 2
        finally:
            llm.close()

    async def collect(llm: AsyncLLM, prompt: str) -> str:
        return [output async for output in llm.generate(prompt, GREEDY)][-1].text

    asyncio.run(scenario())
