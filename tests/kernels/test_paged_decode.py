"""Paged decode against attention in float64."""

import pytest
import torch
from kernel_world import CPU, SHAPES, coded_kv, draw, raw_kv, spans_of

from kvtier.errors import FormatMismatch
from kvtier.gpu.kernels.batch import DecodeBatch
from kvtier.gpu.kernels.combine import split_count
from kvtier.gpu.kernels.paged_decode import paged_decode
from kvtier.gpu.kernels.quantized_pool import CODINGS
from kvtier.gpu.kernels.reference import attention
from kvtier.gpu.kernels.rows import raw_layer

BLOCKS = 32


def make_spans(lengths, block_size=16):
    return spans_of([(length - 1, length) for length in lengths], block_size, BLOCKS)


def decode(spans, kv, heads, dtype=torch.float32, *, window=None, splits=None):
    q = draw(len(spans), heads, kv.key.width, seed=7, dtype=dtype)
    out = torch.full_like(q, float("nan"))
    scale = kv.key.width**-0.5
    batch = DecodeBatch.make(spans, range(len(spans)), CPU)
    paged_decode(q, kv, batch, out, scale=scale, window=window, splits=splits)
    return out.double(), attention(q, kv, spans, scale=scale, window=window)


def check(result, expected, tolerance=3e-6):
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_lengths_around_a_blocks_edge():
    spans = make_spans([1, 15, 16, 17, 33])
    check(*decode(spans, raw_kv(spans), 4))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_every_head_dim(head_dim):
    spans = make_spans([40])
    check(*decode(spans, raw_kv(spans, kv_heads=1, head_dim=head_dim), 2))


@pytest.mark.parametrize("group", [1, 3, 7, 16, 20])
def test_every_number_of_queries_per_head(group):
    spans = make_spans([20])
    check(*decode(spans, raw_kv(spans, head_dim=32), 2 * group))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision(dtype, tolerance):
    spans = make_spans([40])
    check(*decode(spans, raw_kv(spans, dtype=dtype), 4, dtype), tolerance)


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_every_block_size(block_size):
    spans = make_spans([1, 6, 12], block_size)
    check(*decode(spans, raw_kv(spans, block_size=block_size), 4))


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_splits_add_up(splits):
    # 64 tokens a tile: the shorter sequences have fewer splits than the longest, or one.
    spans = make_spans([200, 65, 64, 3])
    check(*decode(spans, raw_kv(spans, kv_heads=1), 2, splits=splits))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [1, 16, 70, 500])
def test_window(window, splits):
    spans = make_spans([150, 9])
    check(*decode(spans, raw_kv(spans, kv_heads=1), 2, window=window, splits=splits))


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize(("head_dim", "splits"), [(64, 1), (96, 2)])
def test_coded_pools(coding, head_dim, splits):
    spans = make_spans([130, 17])
    kv = coded_kv(spans, coding, kv_heads=1, head_dim=head_dim)
    check(*decode(spans, kv, 3, splits=splits))


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
def test_coded_pools_of_every_shape(coding, head_dim, group):
    spans = make_spans([1, 16, 17])
    check(*decode(spans, coded_kv(spans, coding, head_dim=head_dim), 2 * group))


def test_layout_of_another_engine():
    spans = make_spans([33, 4])
    ours = raw_kv(spans)
    # [2, num_blocks, block_size, kv_heads, head_dim], as some engines have it.
    theirs = torch.stack([rows.values.transpose(1, 2).contiguous() for rows in ours])
    kv = raw_layer(theirs[0].transpose(1, 2), theirs[1].transpose(1, 2))
    check(decode(spans, kv, 4)[0], decode(spans, ours, 4)[1])


def test_rows_of_a_flat_batch_and_strided_queries():
    spans = make_spans([5, 30])
    kv = raw_kv(spans)
    fused = draw(6, 3, 4, 64, seed=3)
    q, rows = fused[:, 1], [4, 1]
    out = torch.zeros(6, 4, 64)
    paged_decode(q, kv, DecodeBatch.make(spans, rows, CPU), out, scale=0.2)
    check(out[rows].double(), attention(q[rows], kv, spans, scale=0.2))
    assert not out[[0, 2, 3, 5]].any()


def test_rotated_outputs_reach_their_rows_only():
    spans = make_spans([5, 30])
    kv = coded_kv(spans, "int4r")
    q, rows = draw(4, 4, 64, seed=3), [3, 1]
    out = torch.zeros_like(q)
    paged_decode(q, kv, DecodeBatch.make(spans, rows, CPU), out, scale=0.2)
    check(out[rows].double(), attention(q[rows], kv, spans, scale=0.2))
    assert not out[[0, 2]].any()


def test_split_count_fills_the_device_and_no_more():
    assert split_count(1, 100_000, CPU) == 4
    assert split_count(8, 100_000, CPU) == 1
    assert split_count(1, 300, CPU) == 2


@pytest.mark.parametrize(
    ("q", "out", "message"),
    [
        (torch.zeros(1, 4, 32), torch.zeros(1, 4, 32), r"queries \[1, 4, 32\].*64"),
        (torch.zeros(1, 3, 64), torch.zeros(1, 3, 64), "multiple of 2 heads"),
        (
            torch.zeros(1, 4, 64, dtype=torch.float16),
            torch.zeros(1, 4, 64, dtype=torch.float16),
            "raw KV of torch.float32",
        ),
        (torch.zeros(1, 4, 64), torch.zeros(2, 4, 64), "outputs like queries"),
    ],
)
def test_refuses_what_does_not_belong_together(q, out, message):
    spans = make_spans([5])
    with pytest.raises(FormatMismatch, match=message):
        paged_decode(q, raw_kv(spans), DecodeBatch.make(spans, [0], CPU), out, scale=1.0)
