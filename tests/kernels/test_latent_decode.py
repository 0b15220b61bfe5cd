"""MLA decode against absorbed attention in float64."""

import pytest
import torch
from kernel_world import CPU, all_slots, draw, spans_of

from kvtier.errors import FormatMismatch
from kvtier.gpu.kernels.batch import DecodeBatch
from kvtier.gpu.kernels.latent_decode import latent_decode
from kvtier.gpu.kernels.reference import latent_attention
from kvtier.gpu.kernels.write_kv import write_latent


def case(lengths, *, latent=64, rope=16, block_size=16, dtype=torch.float32):
    """Spans and layer 1 of an MLA pool [num_blocks, layers, block_size, width], stale slots NaN."""
    spans = spans_of([(length - 1, length) for length in lengths], block_size, 32)
    pool = torch.full((32, 2, block_size, latent + rope), float("nan"), dtype=dtype)
    slots = all_slots(spans, block_size)
    pool[slots // block_size, 1, slots % block_size] = draw(len(slots), latent + rope, seed=1, dtype=dtype)
    return spans, pool[:, 1]


def decode(spans, cache, heads, latent, *, splits=None):
    q = draw(len(spans), heads, cache.shape[2], seed=5, dtype=cache.dtype)
    out = torch.full((len(spans), heads, latent), float("nan"), dtype=cache.dtype)
    batch = DecodeBatch.make(spans, range(len(spans)), CPU)
    latent_decode(q, cache, batch, out, scale=0.1, splits=splits)
    return out.double(), latent_attention(q, cache, spans, latent=latent, scale=0.1)


def check(result, expected, tolerance=3e-6):
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_lengths_around_a_blocks_edge():
    spans, cache = case([1, 15, 16, 17, 33])
    check(*decode(spans, cache, 4, 64))


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (96, 32), (40, 8)])
def test_every_width(latent, rope):
    spans, cache = case([40], latent=latent, rope=rope)
    check(*decode(spans, cache, 16, latent))


@pytest.mark.parametrize("heads", [1, 16, 40, 128])
def test_every_number_of_heads(heads):
    spans, cache = case([20, 3])
    check(*decode(spans, cache, heads, 64))


@pytest.mark.parametrize("splits", [2, 5])
def test_splits_add_up(splits):
    spans, cache = case([200, 64, 65, 3])
    check(*decode(spans, cache, 4, 64, splits=splits))


def test_bfloat16():
    spans, cache = case([40], dtype=torch.bfloat16)
    check(*decode(spans, cache, 4, 64), 2e-2)


def test_written_rows_are_attended_to():
    spans, cache = case([18, 4])
    last = all_slots(spans, 16)[[17, 21]]
    row = draw(2, 80, seed=9)
    write_latent(row, cache, last)
    assert torch.equal(cache[last // 16, last % 16], row)
    check(*decode(spans, cache, 4, 64))


def test_refuses_what_does_not_belong_together():
    spans, cache = case([5])
    batch = DecodeBatch.make(spans, [0], CPU)
    with pytest.raises(FormatMismatch, match=r"expected \[T, heads, latent"):
        latent_decode(torch.zeros(1, 4, 72), cache, batch, torch.zeros(1, 4, 64), scale=1.0)
    with pytest.raises(FormatMismatch, match="outputs"):
        latent_decode(torch.zeros(1, 4, 80), cache, batch, torch.zeros(1, 4, 81), scale=1.0)
    with pytest.raises(FormatMismatch, match="expected the same of all"):
        latent_decode(torch.zeros(1, 4, 80).half(), cache, batch, torch.zeros(1, 4, 64).half(), scale=1.0)
