"""Writes into paged pools: raw bytes as they are, codes as the formats have them."""

import numpy as np
import pytest
import torch
from kernel_world import draw, layout

from kvtier.errors import FormatMismatch
from kvtier.formats.rotation import rotation, span
from kvtier.gpu.kernels.quantized_pool import CODINGS, QuantizedPool
from kvtier.gpu.kernels.reference import dense_rows
from kvtier.gpu.kernels.rows import raw_layer
from kvtier.gpu.kernels.write_kv import write_kv
from kvtier.native import reference
from kvtier.native.rows import Codec, Run, record_bytes

SLOTS = torch.tensor([5, 16, 47, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_raw_rows_are_copied_and_nothing_else_is_touched(dtype):
    pool = torch.full((3, 2, 2, 3, 16, 80), float("nan"), dtype=dtype)
    fused = draw(4, 9, 80, dtype=dtype)
    k, v = fused[:, 3:6], fused[:, 6:]
    write_kv(k, v, raw_layer(pool[:, 1, 0], pool[:, 1, 1]), SLOTS)
    assert torch.equal(pool[SLOTS // 16, 1, 0, :, SLOTS % 16], k)
    assert torch.equal(pool[SLOTS // 16, 1, 1, :, SLOTS % 16], v)
    assert pool.isnan().sum() == pool.numel() - 2 * k.numel()


def test_a_negative_slot_is_skipped():
    pool = torch.zeros(2, 2, 1, 16, 64)
    k = torch.ones(2, 1, 64)
    write_kv(k, k, raw_layer(pool[:, 0], pool[:, 1]), torch.tensor([-1, 17]))
    assert pool.sum() == 128
    assert pool[1, :, :, 1].eq(1).all()


def records(codec, rows, width):
    """Scales and codes of rows float32 [n, width] by the formats' own kernels: float16 [n, metas], uint8 [n, bytes]."""
    size = record_bytes(codec, width, width, 4)
    run = Run(1, len(rows), width, width, 1, 0, 0, width * 4, 0, 0, size)
    coded = np.zeros(len(rows) * size, np.uint8)
    assert reference.encode_rows(codec, 0, rows.numpy().tobytes(), coded, run, None) == -1
    coded = coded.reshape(len(rows), size)
    metas = 4 if codec is Codec.INT4 else 2
    return coded[:, :metas].copy().view(np.float16), coded[:, metas:]


HARD = [
    pytest.param(lambda x: x, id="normal"),
    pytest.param(lambda x: x * 1e-4, id="small"),
    pytest.param(lambda x: x * 1e-9, id="below any scale"),
    pytest.param(lambda x: x * 3e3, id="large"),
    pytest.param(torch.zeros_like, id="zero"),
    pytest.param(torch.ones_like, id="constant"),
    pytest.param(lambda x: x + 50, id="far from zero"),
    pytest.param(lambda x: x.exp() ** 3, id="outliers"),
]


@pytest.mark.parametrize("shape", HARD)
@pytest.mark.parametrize(
    ("coding", "codecs"),
    [
        ("int8", (Codec.INT8, Codec.INT8)),
        ("fp8", (Codec.FP8, Codec.FP8)),
        ("k8v4", (Codec.INT8, None)),
    ],
)
def test_codes_are_those_of_the_formats(coding, codecs, shape):
    pool = QuantizedPool(layout(kv_heads=3, head_dim=48), 3, coding, "cpu")
    new = [shape(draw(4, 3, 48, seed=plane)) for plane in (1, 2)]
    write_kv(*new, pool.layer(1), SLOTS)
    for codec, x, rows in zip(codecs, new, pool.layer(1), strict=True):
        if codec is None:
            continue
        meta, codes = records(codec, x.reshape(-1, 48), 48)
        np.testing.assert_array_equal(rows.meta[SLOTS // 16, :, :, SLOTS % 16].reshape(12, -1).numpy(), meta)
        np.testing.assert_array_equal(rows.values[SLOTS // 16, :, SLOTS % 16].reshape(12, -1).numpy(), codes)
    assert not pool.layer(0).key.values.any()
    assert pool.memory.count_nonzero() <= 2 * 4 * 3 * (48 + 4)


@pytest.mark.parametrize("shape", HARD)
def test_nibbles_are_those_of_the_formats(shape):
    pool = QuantizedPool(layout(kv_heads=3, head_dim=48), 3, "int4r", "cpu")
    plain = type(pool.layer(1))(*(rows._replace(to_rotated=None, from_rotated=None) for rows in pool.layer(1)))
    new = [shape(draw(4, 3, 48, seed=plane)) for plane in (1, 2)]
    write_kv(*new, plain, SLOTS)
    for x, rows in zip(new, plain, strict=True):
        meta, codes = records(Codec.INT4, x.reshape(-1, 48), 48)
        np.testing.assert_array_equal(rows.meta[SLOTS // 16, :, :, SLOTS % 16].reshape(12, -1).numpy(), meta)
        np.testing.assert_array_equal(rows.values[SLOTS // 16, :, SLOTS % 16].reshape(12, -1).numpy(), codes)


@pytest.mark.parametrize(("coding", "worst"), [("int8", 0.02), ("int8r", 0.02), ("fp8", 0.1), ("int4r", 0.2)])
def test_what_is_written_is_read_back(coding, worst):
    pool = QuantizedPool(layout(kv_heads=2, head_dim=96), 2, coding, "cpu")
    k, v = draw(16, 2, 96, seed=1), draw(16, 2, 96, seed=2)
    write_kv(k, v, pool.layer(0), torch.arange(16, 32))
    for x, rows in zip((k, v), pool.layer(0), strict=True):
        assert (dense_rows(rows, [1], 16) - x).abs().max() < worst * x.abs().max()


def test_rotated_keys_are_the_formats_own():
    """A row that the format decodes from the pool's codes is the row that was written, rotation undone."""
    pool = QuantizedPool(layout(kv_heads=1, head_dim=96), 1, "int8r", "cpu")
    k = draw(1, 1, 96, seed=1)
    write_kv(k, k, pool.layer(0), torch.tensor([3]))
    rows = pool.layer(0).key
    size = record_bytes(Codec.INT8, 96, 96, 4)
    coded = rows.meta[0, 0, :, 3].numpy().tobytes() + rows.values[0, 0, 3].numpy().tobytes()
    raw = np.zeros(96 * 4, np.uint8)
    run = Run(1, 1, 96, 96, span(96), 0, 0, 96 * 4, 0, 0, size)
    reference.decode_rows(Codec.INT8, 0, coded, raw, run, rotation(96, span(96)).backward)
    decoded = torch.from_numpy(raw.view(np.float32))
    torch.testing.assert_close(decoded.double(), dense_rows(rows, [0], 16)[3, 0], rtol=1e-5, atol=1e-6)
    assert (decoded - k[0, 0]).abs().max() < 0.02 * k.abs().max()


def test_a_block_is_one_run_of_bytes():
    pool = QuantizedPool(layout(kv_heads=2, head_dim=64), 4, "int4r", "cpu")
    # layers * planes * heads sections of 16 rows of 32 bytes, and a float16 scale and low for each
    assert pool.block_bytes == 2 * 2 * 2 * (16 * 32 + 16 * 4)
    assert pool.memory.shape == (4, pool.block_bytes)
    key, value = pool.layer(1)
    key.values[2] = 1
    key.meta[2] = 1
    value.values[2] = 1
    value.meta[2] = 1
    half = pool.block_bytes // 2
    assert pool.memory[2, half:].count_nonzero() == 4 * (16 * 32) + 4 * 16 * 2
    assert not pool.memory[2, :half].any()
    assert not pool.memory[[0, 1, 3]].any()


@pytest.mark.parametrize("coding", CODINGS)
def test_sections_do_not_overlap(coding):
    pool = QuantizedPool(layout(kv_heads=2, head_dim=40, block_size=5), 2, coding, "cpu")
    views = [view for layer in (0, 1) for rows in pool.layer(layer) for view in (rows.values, rows.meta)]
    for number, view in enumerate(views, 1):
        view.view(torch.uint8).fill_(number)
    for number, view in enumerate(views, 1):
        assert view.view(torch.uint8).eq(number).all()


def test_refuses_what_does_not_belong_together():
    pool = torch.zeros(2, 2, 1, 16, 64)
    kv, k = raw_layer(pool[:, 0], pool[:, 1]), torch.zeros(2, 1, 64)
    with pytest.raises(FormatMismatch, match=r"\[slots, 1, 64\]"):
        write_kv(k[:1], k[:1], kv, torch.tensor([1, 2]))
    with pytest.raises(FormatMismatch, match="raw pool of torch"):
        write_kv(k.half(), k.half(), kv, torch.tensor([1, 2]))
    with pytest.raises(FormatMismatch, match="int32"):
        write_kv(k, k, kv, torch.tensor([1, 2], dtype=torch.int32))
    with pytest.raises(FormatMismatch, match="one of int8"):
        QuantizedPool(layout(), 1, "int3", "cpu")
