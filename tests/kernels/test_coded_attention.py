"""Attention over coded pools, by torch and by kernels: the same bytes, and what float64 makes of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_world import draw, layout, spans_of
from test_triton_attention import generate
from test_write_kv import HARD, records
from tiny_model import tiny_model

from kvtier.engine import Engine, EngineOptions, SamplingParams, runner
from kvtier.gpu import DevicePool
from kvtier.gpu.attention import make_attention
from kvtier.gpu.coded import CodedAttention, encode_rows
from kvtier.gpu.kernels import reference
from kvtier.gpu.kernels.rows import Code
from kvtier.gpu.triton_attention import TritonAttention, make_triton_attention
from kvtier.native.rows import Codec

CODED = ["int8", "int8r", "fp8", "int4r"]
PAST = [(0, 40), (0, 7), (0, 20)]
MIXED = [(40, 41), (7, 8), (20, 25)]
CONFIG = SimpleNamespace(heads=6, windows=(), softmax_scale=32**-0.5)


@pytest.mark.parametrize("shape", HARD)
@pytest.mark.parametrize("code", [Code.INT8, Code.FP8, Code.INT4])
def test_codes_are_those_of_the_formats(code, shape):
    rows = shape(draw(12, 48, seed=1))
    codes, meta = encode_rows(rows, code)
    expected_meta, expected = records(Codec[code.name], rows, 48)
    np.testing.assert_array_equal(meta.numpy(), expected_meta)
    np.testing.assert_array_equal(codes.numpy(), expected)


def stepped(make, coding, dtype=torch.float32):
    """A pool after two steps, and what each layer's attention gave in the second."""
    pool = DevicePool(layout(head_dim=32, dtype=str(dtype).removeprefix("torch.")), 32, "cpu", coding)
    pool.tensor.fill_(255)  # NaN, wherever a float is read
    attention = make(pool, CONFIG)
    outputs = []
    for number, lengths in enumerate((PAST, MIXED)):
        spans = [
            span._replace(start=start, stop=stop)
            for span, (start, stop) in zip(spans_of(MIXED, 16, 32), lengths, strict=True)
        ]
        tokens = sum(span.stop - span.start for span in spans)
        attention.plan(spans)
        outputs = []
        for layer in (0, 1):
            q, k, v = draw(tokens, 10, 32, seed=9 * number + layer, dtype=dtype).split([6, 2, 2], 1)
            expected = None
            out = attention(layer, q, k, v)
            expected = reference.attention(q, pool.layer(layer), spans, scale=CONFIG.softmax_scale)
            outputs.append((out, expected))
    return pool, outputs


@pytest.mark.parametrize("coding", CODED)
def test_torch_and_kernels_write_the_same_and_attend_alike(coding):
    (ours, torched), (theirs, launched) = (stepped(make, coding) for make in (make_attention, make_triton_attention))
    assert torch.equal(ours.tensor, theirs.tensor)
    for (out, expected), (other, _) in zip(torched, launched, strict=True):
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other, out, rtol=1e-4, atol=1e-5)
