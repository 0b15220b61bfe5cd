"""Paged prefill against attention in float64."""

import pytest
import torch
from kernel_world import CPU, SHAPES, coded_kv, draw, raw_kv, spans_of

from kvtier.errors import CapacityError, FormatMismatch
from kvtier.gpu.kernels.batch import MOST_ROWS, PrefillBatch, tile_shape
from kvtier.gpu.kernels.paged_prefill import most_rows, paged_prefill
from kvtier.gpu.kernels.quantized_pool import CODINGS
from kvtier.gpu.kernels.reference import attention


def prefill(spans, kv, group, dtype=torch.float32, *, window=None, most=MOST_ROWS):
    counts = [span.stop - span.start for span in spans]
    q = draw(sum(counts), group * kv.key.heads, kv.key.width, seed=7, dtype=dtype)
    out = torch.full_like(q, float("nan"))
    scale = kv.key.width**-0.5
    rows = [sum(counts[:at]) for at in range(len(counts))]
    paged_prefill(q, kv, PrefillBatch.make(spans, rows, group, CPU, most), out, scale=scale, window=window)
    return out.double(), attention(q, kv, spans, scale=scale, window=window)


def check(result, expected, tolerance=3e-6):
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(0, 1)], id="first token"),
        pytest.param([(0, 15), (0, 16), (0, 17)], id="empty prefix, around a block's edge"),
        pytest.param([(16, 20), (15, 33), (31, 32), (0, 2)], id="ragged"),
        pytest.param([(100, 170)], id="several tiles of queries and of keys"),
        pytest.param([(1, 66)], id="a tile's edge"),
    ],
)
def test_spans(lengths):
    spans = spans_of(lengths, 16, 32)
    check(*prefill(spans, raw_kv(spans), 2))


@pytest.mark.parametrize("head_dim", [80, 96, 128, 192, 256])
def test_every_head_dim(head_dim):
    spans = spans_of([(13, 20)], 16, 32)
    check(*prefill(spans, raw_kv(spans, kv_heads=1, head_dim=head_dim), 2))


@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_every_number_of_queries_per_head(group):
    # With 3 and 7 a tile has rows left over.
    spans = spans_of([(5, 48)], 16, 32)
    check(*prefill(spans, raw_kv(spans, head_dim=32), group))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision(dtype, tolerance):
    spans = spans_of([(20, 31)], 16, 32)
    check(*prefill(spans, raw_kv(spans, dtype=dtype), 2, dtype), tolerance)


@pytest.mark.parametrize("window", [1, 16, 50])
def test_window(window):
    # Rows of one tile see nothing at all of its first or last keys.
    spans = spans_of([(70, 150), (0, 9)], 16, 32)
    check(*prefill(spans, raw_kv(spans, kv_heads=1), 1, window=window))


@pytest.mark.parametrize("block_size", [1, 5])
def test_every_block_size(block_size):
    spans = spans_of([(3, 8), (0, 6)], block_size, 32)
    check(*prefill(spans, raw_kv(spans, block_size=block_size), 2))


@pytest.mark.parametrize("coding", CODINGS)
def test_coded_pools(coding):
    spans = spans_of([(60, 90), (0, 5)], 16, 32)
    check(*prefill(spans, coded_kv(spans, coding, kv_heads=1, head_dim=96), 3))


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
def test_coded_pools_of_every_shape(coding, head_dim, group):
    # An empty prefix and tokens that fill a block, tokens on both sides of a block's edge, one token after it.
    spans = spans_of([(0, 16), (15, 17), (16, 17)], 16, 32)
    check(*prefill(spans, coded_kv(spans, coding, head_dim=head_dim), group))


def test_other_rows_of_the_flat_batch_are_left_alone():
    spans = spans_of([(4, 9)], 16, 32)
    kv = coded_kv(spans, "int4r")
    q, out = draw(8, 4, 64, seed=2), torch.zeros(8, 4, 64)
    paged_prefill(q, kv, PrefillBatch.make(spans, [2], 2, CPU), out, scale=0.2)
    check(out[2:7].double(), attention(q[2:7], kv, spans, scale=0.2))
    assert not out[[0, 1, 7]].any()


@pytest.mark.parametrize(("group", "most", "rows"), [(3, 16, 16), (20, 16, 32), (2, 64, 64), (1, 128, 64)])
def test_tiles_of_fewer_rows(group, most, rows):
    assert tile_shape(43, group, most) == (rows, rows // group)
    spans = spans_of([(5, 48), (0, 3)], 16, 32)
    check(*prefill(spans, raw_kv(spans, head_dim=32), group, most=most))


def test_wide_tiles_have_as_many_rows_as_registers_hold():
    spans = spans_of([(0, 3)], 16, 32)
    wide, narrow = (raw_kv(spans, head_dim=width) for width in (192, 128))
    codes = {coding: coded_kv(spans, coding, head_dim=256) for coding in ("int8", "int4r", "k8v4")}
    assert [most_rows(kv, torch.float32) for kv in (wide, narrow)] == [32, 128]
    assert most_rows(wide, torch.bfloat16) == 128
    assert [most_rows(kv, torch.bfloat16) for kv in codes.values()] == [128, 64, 64]


def test_refuses_what_does_not_fit_a_tile():
    spans = spans_of([(0, 3)], 16, 32)
    kv = raw_kv(spans, kv_heads=1)
    with pytest.raises(CapacityError, match="129 query heads"):
        PrefillBatch.make(spans, [0], 129, CPU)
    q = torch.zeros(3, 64, 64)
    with pytest.raises(FormatMismatch, match="plan the batch for these heads"):
        paged_prefill(q, kv, PrefillBatch.make(spans, [0], 1, CPU), torch.zeros_like(q), scale=1.0)
