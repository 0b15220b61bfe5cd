"""Attention over coded pools, by torch and by kernels: the same bytes, and what float64 makes of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_world import draw, layout, spans_of
from test_write_kv import HARD, records
from tiny_model import tiny_model

from kvtier.engine import Engine, EngineOptions, SamplingParams, runner
from kvtier.errors import FormatMismatch
from kvtier.gpu import DevicePool
from kvtier.gpu.attention import make_attention
from kvtier.gpu.coded import CodedAttention, encode_rows
from kvtier.gpu.graphs import DecodeBuffers
from kvtier.gpu.kernels import reference
from kvtier.gpu.kernels.rows import Code
from kvtier.gpu.triton_attention import TritonAttention, make_triton_attention
from kvtier.native.rows import Codec

CODED = ["int8", "int8r", "fp8", "int4r"]
PAST = [(0, 40), (0, 7), (0, 20)]
MIXED = [(40, 41), (7, 8), (20, 25)]
WINDOWS = (None, 12)
CONFIG = SimpleNamespace(heads=6, windows=WINDOWS, softmax_scale=32**-0.5)


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
    attention, outputs = make(pool, CONFIG), []
    for number, lengths in enumerate((PAST, MIXED)):
        spans = [
            span._replace(start=start, stop=stop)
            for span, (start, stop) in zip(spans_of(MIXED, 16, 32), lengths, strict=True)
        ]
        tokens = sum(span.stop - span.start for span in spans)
        attention.plan(spans)
        outputs.clear()
        for layer in (0, 1):
            q, k, v = draw(tokens, 10, 32, seed=9 * number + layer, dtype=dtype).split([6, 2, 2], 1)
            out = attention(layer, q, k, v)
            expected = reference.attention(
                q, pool.layer(layer), spans, scale=CONFIG.softmax_scale, window=WINDOWS[layer]
            )
            outputs.append((out, expected))
    return pool, outputs


@pytest.mark.parametrize("coding", CODED)
def test_torch_and_kernels_write_the_same_and_attend_alike(coding):
    (ours, torched), (theirs, launched) = (stepped(make, coding) for make in (make_attention, make_triton_attention))
    assert torch.equal(ours.tensor, theirs.tensor)
    for (out, expected), (other, _) in zip(torched, launched, strict=True):
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other, out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("coding", CODED)
def test_keys_and_values_are_decoded_into_the_dtype_of_the_model(coding):
    for out, expected in stepped(make_attention, coding, torch.bfloat16)[1]:
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("code", [Code.INT8, Code.FP8, Code.INT4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_spoils_its_own_row_only(code, value):
    pool = DevicePool(layout(head_dim=32), 2, "cpu", {Code.INT8: "int8", Code.FP8: "fp8", Code.INT4: "int4r"}[code])
    attention = CodedAttention(pool, 2)
    attention.plan([SimpleNamespace(block_ids=(1,), start=0, stop=3)])
    q, k, v = (draw(3, 2, 32, seed=seed) for seed in (1, 2, 3))
    k[1, 0, 5] = value
    attention(0, q, k, v)
    keys = reference.dense_rows(pool.layer(0).key, [1], 3)
    assert not keys[1, 0].isfinite().any()
    keys[1, 0] = 0
    assert keys.isfinite().all()


@pytest.mark.parametrize("coding", ["k8v4", "raw"])
def test_only_pools_of_one_code_are_for_torch(coding):
    with pytest.raises(FormatMismatch, match=r"expected one code|expected a coded one"):
        CodedAttention(DevicePool(layout(), 2, "cpu", coding), 4)


def generate(loaded, make, monkeypatch):
    made = []

    def chosen(pool, config):
        made.append(make(pool, config))
        return made[-1]

    monkeypatch.setattr(runner, "make_attention", chosen)
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=64, token_budget=16, kv_format="int4r"))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add("long", [(7 * at) % 200 + 1 for at in range(21)], params)
    engine.add("short", [5, 6, 7], params)
    outputs = {}
    while engine.has_work:
        outputs |= {output.id: output.token_ids for output in engine.step()}
    return made[0], engine._runner._pool.tensor, outputs


def test_the_engine_says_the_same_over_torch_and_over_kernels(monkeypatch):
    loaded = tiny_model()
    torched, launched = (generate(loaded, make, monkeypatch) for make in (make_attention, make_triton_attention))
    assert (type(torched[0]), type(launched[0])) == (CodedAttention, TritonAttention)
    assert torched[2] == launched[2]


def test_a_decode_graph_plan_attends_to_codes():
    pools = [DevicePool(layout(head_dim=32), 32, "cpu", "int4r") for _ in range(2)]
    static, planned = (make_triton_attention(pool, CONFIG) for pool in pools)
    buffers = DecodeBuffers(4, 4, pools[0].device)
    static.plan_decode(buffers, 64)
    for at in range(3):
        span = spans_of([(at, at + 1)], 16, 32)
        buffers.fill(span, [1], 16)
        planned.plan(span)
        q, k, v = draw(4, 10, 32, seed=at).split([6, 2, 2], 1)
        torch.testing.assert_close(static(0, q, k, v)[:1], planned(0, q[:1], k[:1], v[:1]))
    assert torch.equal(*(pool.tensor for pool in pools))
