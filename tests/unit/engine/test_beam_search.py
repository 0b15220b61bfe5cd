"""Beam search against transformers' own, on a small model with random weights."""

import time
from pathlib import Path

import pytest
import torch
from tiny_model import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.engine.models.registry import MODELS
from kvtier.engine.models.weights import load_weights
from kvtier.errors import RequestError

EOS = 0
TOKENS = 10
PROMPTS = [[(7 * at + 3 * number) % 60 + 1 for at in range(length)] for number, length in enumerate((1, 5, 16, 23))]


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=EOS, bos_token_id=None, initializer_range=0.6,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def loaded(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("model")
    reference.save_pretrained(path)
    weights = load_weights(path)
    model = MODELS["LlamaForCausalLM"](weights, torch.float32, torch.device("cpu"))
    return LoadedModel(model, weights.config, tiny_tokenizer(), "beams")


def expected(
    reference: LlamaForCausalLM, prompt: list[int], width: int, **settings: float
) -> tuple[list[list[int]], list[float]]:
    found = reference.generate(
        torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=TOKENS, do_sample=False,
        pad_token_id=EOS, eos_token_id=EOS, return_dict_in_generate=True, output_scores=True, **settings,
    )  # fmt: skip
    rows = found.sequences[:, len(prompt) :].tolist()
    sequences = [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]
    return sequences, found.sequences_scores.tolist()


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[RequestOutput]]:
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params)
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason is not None
            found.setdefault(output.id, []).append(output)
    assert engine.stats().free_blocks == engine.stats().num_blocks
    return [found[str(number)] for number in range(len(prompts))]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(("penalty", "blocks"), [(1.0, 128), (0.0, 128), (2.0, 20)])
def test_the_same_sequences_and_scores(
    reference: LlamaForCausalLM, loaded: LoadedModel, width: int, penalty: float, blocks: int
) -> None:
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=blocks, max_running=8))
    params = SamplingParams(max_tokens=TOKENS, beam_width=width, n=width, length_penalty=penalty)
    for prompt, outputs in zip(PROMPTS, run(engine, PROMPTS, params), strict=True):
        sequences, scores = expected(reference, prompt, width, length_penalty=penalty)
        assert [list(output.token_ids) for output in outputs] == sequences
        ranked = [output.cumulative_logprob / len(output.token_ids) ** penalty for output in outputs]  # type: ignore[operator]
        assert ranked == pytest.approx(scores, abs=1e-4)
        assert [output.index for output in outputs] == list(range(width))
        assert all((output.finish_reason == "stop") == (output.token_ids[-1] == EOS) for output in outputs)


def test_masks_and_penalties_as_transformers_has_them(reference: LlamaForCausalLM, loaded: LoadedModel) -> None:
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=128))
    params = SamplingParams(max_tokens=TOKENS, beam_width=3, n=3, min_tokens=4, repetition_penalty=1.4)
    for prompt, outputs in zip(PROMPTS, run(engine, PROMPTS, params), strict=True):
        sequences, _ = expected(reference, prompt, 3, min_new_tokens=4, repetition_penalty=1.4)
        assert [list(output.token_ids) for output in outputs] == sequences


def test_a_beam_tells_what_became_of_the_request(loaded: LoadedModel) -> None:
    """Not of itself alone: most beams begin half-way."""
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=64))
    params = SamplingParams(max_tokens=TOKENS, beam_width=4, n=4, ignore_eos=True)
    run(engine, PROMPTS[3:], params)
    before = time.perf_counter()
    (outputs,) = run(engine, PROMPTS[3:], params)
    for output in outputs:
        metrics = output.metrics
        assert metrics.first_token is not None
        assert metrics.latest_token is not None
        assert before < metrics.arrival < metrics.first_token < metrics.latest_token
        assert (metrics.cached_tokens, metrics.computed_tokens) == (20, 3)
        assert metrics.output_tokens == TOKENS


def test_an_abort_ends_all_beams(loaded: LoadedModel) -> None:
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=64))
    engine.add("r", PROMPTS[2], SamplingParams(max_tokens=TOKENS, beam_width=4, ignore_eos=True))
    for _ in range(4):
        assert engine.step() == []
    assert engine.abort("r")
    assert not engine.has_work
    assert engine.stats().free_blocks == 64


def test_what_beams_cannot_do_is_refused() -> None:
    for settings in ({"n": 3}, {"temperature": 1.0}, {"stop": ("x",)}, {"logprobs": 1}):
        with pytest.raises(RequestError, match=next(iter(settings))):
            SamplingParams(beam_width=2, **settings)  # type: ignore[arg-type]


def test_more_beams_than_the_pool_holds_tails_for(reference: LlamaForCausalLM, loaded: LoadedModel) -> None:
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=24, max_running=4))
    params = SamplingParams(max_tokens=TOKENS, beam_width=16, n=4)
    sequences, _ = expected(reference, PROMPTS[1], 16)
    (outputs,) = run(engine, PROMPTS[1:2], params)
    assert [list(output.token_ids) for output in outputs] == sequences[:4]
    assert engine.stats().preemptions > 0
