"""What a request may want of its logits, against transformers' processors and plain definitions."""

import math

import pytest
import torch
from tiny_model import EOS, tiny_model
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
)

from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.counts import TokenCounts
from kvtier.engine.drafting import PromptLookup
from kvtier.engine.logits import adjust, is_adjusted
from kvtier.engine.logprobs import token_logprobs
from kvtier.engine.models import LoadedModel
from kvtier.engine.models.base import DenseAttention
from kvtier.engine.sampler import Draw, sample
from kvtier.errors import RequestError

VOCAB = 300
PROMPT = [(5 * at) % 200 + 1 for at in range(21)]
ROW = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 4


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def adjusted(params: SamplingParams, output: list[int]) -> torch.Tensor:
    row, counts = ROW.clone(), TokenCounts(PROMPT)
    counts.follow(PROMPT + output)
    adjust(row, params, len(output), params.ends(frozenset({EOS})), counts if params.penalized else None)
    return row


def processed(processor: LogitsProcessor, output: list[int]) -> torch.Tensor:
    return processor(torch.tensor([PROMPT + output]), ROW[None].clone())[0]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 7.0])
def test_repetition_penalty(penalty: float) -> None:
    output = [3, 3, 250]
    expected = processed(RepetitionPenaltyLogitsProcessor(penalty), output)
    assert torch.equal(adjusted(SamplingParams(repetition_penalty=penalty), output), expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    row = adjusted(SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25), [3, 3, PROMPT[0]])
    expected = ROW.clone()
    expected[3] -= 0.5 - 0.25 * 2
    expected[PROMPT[0]] -= 0.5 - 0.25
    assert torch.allclose(row, expected)


@pytest.mark.parametrize("output", [[], [4], [4, 5], [4, 5, 6]])
def test_min_tokens(output: list[int]) -> None:
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 2, [EOS, 9], device="cpu")
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({9}))
    assert torch.equal(adjusted(params, output), processed(processor, output))
    assert is_adjusted(params, len(output)) == (len(output) < 2)


def test_logit_bias() -> None:
    row = adjusted(SamplingParams(logit_bias={7: 2.5, 8: -100.0}), [])
    expected = ROW.clone()
    expected[7] += 2.5
    expected[8] -= 100
    assert torch.equal(row, expected)


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
@pytest.mark.parametrize("vocab", [VOCAB, 5 * VOCAB])
def test_min_p_keeps_what_is_likely_enough(min_p: float, vocab: int) -> None:
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 3
    kept = torch.isfinite(MinPLogitsWarper(min_p)(torch.zeros(1, 1), row[None].clone())[0])
    params = SamplingParams(temperature=1.0, min_p=min_p)
    tokens = sample(row.expand(2000, -1), [Draw(params, 3, at) for at in range(2000)])
    assert kept[tokens].all()
    probabilities = torch.softmax(row, -1) * kept
    likely = probabilities / probabilities.sum() > 0.01
    assert set(torch.nonzero(likely)[:, 0].tolist()) <= set(tokens)


def test_logprobs_are_those_of_the_plain_distribution() -> None:
    logits = torch.stack([ROW, -ROW])
    (first, second) = token_logprobs(logits, [5, 6], [3, 0])
    exact = torch.log_softmax(logits.double(), -1)
    assert math.isclose(first.logprob, exact[0, 5], abs_tol=1e-5)
    assert first.rank == int((exact[0] > exact[0, 5]).sum()) + 1
    assert [token for token, _ in first.top] == exact[0].topk(3).indices.tolist()
    assert second.top == ()
    assert math.isclose(second.logprob, exact[1, 6], abs_tol=1e-5)


def run(loaded: LoadedModel, prompt: list[int], params: SamplingParams, **options: int) -> RequestOutput:
    engine = Engine(loaded, EngineOptions(**{"block_size": 4, "num_blocks": 64} | options))
    # The prefix is cached already: what wants the prompt's logits must compute them all the same.
    for name in ("before", "r"):
        engine.add(name, prompt, params)
        while engine.has_work:
            outputs = engine.step()
    return outputs[0]


@pytest.mark.parametrize("budget", [3, 64])
def test_logprobs_of_prompt_and_output(loaded: LoadedModel, budget: int) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    output = run(loaded, PROMPT, params, token_budget=budget)
    tokens = torch.tensor(PROMPT + list(output.token_ids))
    places = torch.arange(len(tokens))
    logits = loaded.model.forward(tokens, places, DenseAttention(), places)
    exact = torch.log_softmax(logits.double(), -1)
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    assert output.prompt_logprobs[0] is None
    scores = [*output.prompt_logprobs[1:], *output.logprobs]
    assert [score.token for score in scores if score] == tokens[1:].tolist()
    for at, score in enumerate(scores):
        assert score is not None
        assert math.isclose(score.logprob, exact[at, tokens[at + 1]], abs_tol=1e-4)
        assert len(score.top) == (1 if at < len(PROMPT) - 1 else 2)
    assert output.cumulative_logprob == pytest.approx(sum(score.logprob for score in output.logprobs))


def test_an_end_that_comes_too_early_is_not_chosen(loaded: LoadedModel) -> None:
    free = run(loaded, PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    end = free.token_ids[2]
    params = SamplingParams(max_tokens=8, min_tokens=6, ignore_eos=True, stop_token_ids=frozenset({end}))
    output = run(loaded, PROMPT, params)
    assert len(output.token_ids) >= 6
    assert end not in output.token_ids[:6]


@pytest.mark.parametrize("proposer", [None, PromptLookup()])
def test_a_stop_text_that_comes_too_early_ends_nothing(loaded: LoadedModel, proposer: PromptLookup | None) -> None:
    """The output is one letter, again and again, which guesses foresee."""
    params = SamplingParams(max_tokens=9, min_tokens=6, ignore_eos=True, logit_bias={42: 100.0}, stop=("J", "JJ"))
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=64), proposer=proposer)
    engine.add("r", PROMPT, params)
    while engine.has_work:
        outputs = engine.step()
    assert loaded.tokenizer.decode([42]) == "J"
    assert (outputs[0].token_ids, outputs[0].text) == ((42,) * 7, "J" * 5)
    assert outputs[0].finish_reason == "stop"


def test_a_bias_decides(loaded: LoadedModel) -> None:
    output = run(loaded, PROMPT, SamplingParams(max_tokens=5, ignore_eos=True, logit_bias={42: 100.0}))
    assert set(output.token_ids) == {42}


def test_a_frequency_penalty_spreads_the_output(loaded: LoadedModel) -> None:
    output = run(loaded, PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, frequency_penalty=100.0))
    assert len(set(output.token_ids)) == 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.nan),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {-3: 1.0}),
        ("logit_bias", [3]),
        ("logprobs", -1),
        ("prompt_logprobs", 1.5),
        ("min_tokens", 200),
        ("ttft_target", 0),
        ("tpot_target", -1.0),
    ],
)
def test_senseless_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_tokens_that_the_model_does_not_know_are_refused(loaded: LoadedModel) -> None:
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=64))
    for params in (SamplingParams(logit_bias={9999: 1.0}), SamplingParams(stop_token_ids=frozenset({9999}))):
        with pytest.raises(RequestError, match="9999"):
            engine.add("r", PROMPT, params)
    assert not engine.has_work
