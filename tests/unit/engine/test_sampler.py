import math

import numpy as np
import pytest
import torch

from kvtier.engine import SamplingParams
from kvtier.engine.sampler import Draw, derived_seed, sample, uniforms
from kvtier.errors import ModelError

VOCAB = 3000
LOGITS = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)) * 3

FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.0, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=5.0, top_p=0.95),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=10 * VOCAB),
]


def reference(row: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Probabilities float64 [vocab] by the definition: temperature, then top_k, then top_p of what is left."""
    logits = row.double().numpy() / params.temperature
    order = np.argsort(-logits)
    weights = np.exp(logits[order] - logits[order[0]])
    if params.top_k:
        weights[params.top_k :] = 0
    weights /= weights.sum()
    before = np.cumsum(weights) - weights
    weights[before >= params.top_p] = 0
    probabilities = np.zeros(len(order))
    probabilities[order] = weights / weights.sum()
    return probabilities


@pytest.mark.parametrize("params", FILTERS)
def test_distribution(params: SamplingParams) -> None:
    expected = reference(LOGITS[0], params)
    count = 4000
    tokens = []
    for first in range(0, count, 200):
        rows = LOGITS[0].expand(200, -1)
        tokens += sample(rows, [Draw(params, 11, at) for at in range(first, first + 200)])
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[expected == 0].any()
    # Pearson's statistic over the tokens that should come up often enough, the rest as one bin.
    often = expected * count >= 8
    wanted = np.append(expected[often], max(expected[~often].sum(), 1e-12)) * count
    found = np.append(counts[often], counts[~often].sum())
    if wanted[-1] < 8:
        wanted, found = wanted[:-1], found[:-1]
    degrees = len(wanted)
    assert ((found - wanted) ** 2 / wanted).sum() < degrees + 6 * math.sqrt(2 * degrees)


def test_alone_or_in_a_mixed_batch() -> None:
    params = [*FILTERS, SamplingParams()]
    draws = [Draw(params[at % len(params)], 5 + at, at) for at in range(40)]
    logits = torch.cat([LOGITS] * 7)[:40]
    together = sample(logits, draws)
    assert together == [sample(logits[at : at + 1], [draws[at]])[0] for at in range(40)]
    assert together[::-1] == sample(logits.flip(0), draws[::-1])


@pytest.mark.parametrize("limit", [{"top_p": 0.3}, {"top_p": 0.99}, {"top_k": 20}, {"top_k": 900}, {"min_p": 0.02}])
def test_what_is_as_likely_as_others_is_drawn_alike_in_any_batch(limit: dict[str, float]) -> None:
    """In bfloat16 many logits are equal, and other rows may want to see more of a vocabulary than this one."""
    row = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    row[0, :700] += 4
    flat = torch.zeros(1, VOCAB)
    for other in ({"top_p": 0.99}, {"top_k": 1500}):
        for seed in range(100):
            draws = [Draw(SamplingParams(temperature=1.0, **one), seed, 0) for one in (limit, other)]  # type: ignore[arg-type]
            assert sample(torch.cat([row, flat]), draws)[0] == sample(row, draws[:1])[0]


@pytest.mark.parametrize("vocab", [8200, 8207, 20_000])
@pytest.mark.parametrize("top_k", [1, 40, 512, 600])
def test_the_likeliest_of_a_large_vocabulary(vocab: int, top_k: int) -> None:
    """The same limits as by hand; equals, of which bfloat16 has many, by their ids."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(top_k)).bfloat16().float()
    logits[1, -7:] = logits[1].max()
    logits[2] = logits[2].sort().values
    order = torch.argsort(logits, dim=-1, descending=True, stable=True)
    params = SamplingParams(temperature=50.0, top_k=top_k)
    for row in range(4):
        drawn = sample(logits[row].expand(100, -1), [Draw(params, seed, 0) for seed in range(100)])
        assert set(drawn) <= set(order[row, :top_k].tolist())
        # One draw falls to the same token wherever the row is.
        weights = torch.softmax(logits[row] / 50.0, -1)[order[row, :top_k]].double()
        mass = weights.cumsum(0)
        points = torch.from_numpy(uniforms(list(range(100)), [0] * 100)) * mass[-1]
        assert drawn == order[row, torch.searchsorted(mass, points, right=True).clamp(max=top_k - 1)].tolist()


def test_of_equals_the_first_tokens_are_the_likeliest() -> None:
    for top_k in (1, 5, 512, 700):
        draws = [Draw(SamplingParams(temperature=1.0, top_k=top_k), seed, 0) for seed in range(100)]
        assert max(sample(torch.zeros(100, VOCAB), draws)) < top_k


def test_greedy_takes_the_largest() -> None:
    assert sample(LOGITS, [Draw(SamplingParams(), 0, 0)] * 6) == LOGITS.argmax(dim=-1).tolist()


def test_another_seed_or_position_draws_differently() -> None:
    params = SamplingParams(temperature=3.0)
    tokens = sample(LOGITS[0].expand(50, -1), [Draw(params, seed, at) for seed in range(5) for at in range(10)])
    assert len(set(tokens)) > 40


@pytest.mark.parametrize("temperature", [1e-30, 5e-324, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    chosen = sample(LOGITS[:1], [Draw(SamplingParams(temperature=temperature), 1, 1)])[0]
    assert 0 <= chosen < VOCAB
    if temperature < 1:
        assert chosen == int(LOGITS[0].argmax())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonsense_from_the_model_is_an_error(bad: float) -> None:
    logits = LOGITS.clone()
    logits[2, 5] = bad
    with pytest.raises(ModelError, match="not finite"):
        sample(logits, [Draw(SamplingParams(), 0, 0)] * 6)


def test_uniforms_are_uniform_and_independent_of_neighbouring_seeds() -> None:
    values = np.stack([uniforms([seed] * 2000, range(2000)) for seed in range(8)])
    assert values.min() >= 0
    assert values.max() < 1
    assert np.abs(values.mean(axis=1) - 0.5).max() < 5 / math.sqrt(12 * 2000)
    assert np.abs(np.corrcoef(values) - np.eye(8)).max() < 0.12
    assert np.abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.04


def test_derived_seeds_differ() -> None:
    assert len({derived_seed(seed, number) for seed in range(100) for number in range(100)}) == 10_000


@pytest.mark.parametrize("least", [5e-324, 1e-310, 1e-45])
@pytest.mark.parametrize("top_k", [0, 1, 2, 3 * VOCAB])
@pytest.mark.parametrize("temperature", [5e-324, 5.0, 1e30])
def test_limits_of_next_to_nothing_keep_the_likeliest(least: float, top_k: int, temperature: float) -> None:
    likeliest = LOGITS.argmax(dim=-1).tolist()
    for limits in ({"top_p": least}, {"top_p": least, "min_p": least}, {"top_p": least, "min_p": 1.0}):
        params = SamplingParams(temperature=temperature, top_k=top_k, **limits)
        chosen = sample(LOGITS, [Draw(params, seed, 0) for seed in range(6)])
        # So hot that float32 tells no probabilities apart, any of the likeliest is as good.
        assert chosen == likeliest or (temperature == 1e30 and all(0 <= token < VOCAB for token in chosen))
