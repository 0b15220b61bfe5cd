"""Checks of the kernels on a real device: each against its float64 reference on that device, in small ragged shapes."""

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.gpu.kernels import reference
from kvtier.gpu.kernels.batch import DecodeBatch, PrefillBatch
from kvtier.gpu.kernels.block_mass import block_mass, key_bounds
from kvtier.gpu.kernels.gather import gather_blocks, scatter_blocks
from kvtier.gpu.kernels.int8_product import int8_product
from kvtier.gpu.kernels.latent_decode import latent_decode
from kvtier.gpu.kernels.paged_decode import paged_decode
from kvtier.gpu.kernels.paged_prefill import most_rows, paged_prefill
from kvtier.gpu.kernels.quantized_pool import CODINGS, QuantizedPool
from kvtier.gpu.kernels.rows import LayerKV, raw_layer
from kvtier.gpu.kernels.write_kv import write_kv, write_latent
from kvtier.layout import GroupKind, LayerGroup, Layout

__all__ = ["Check", "Checked", "checks"]

_SIZE, _KV_HEADS = 16, 2
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# What codes of a row whose largest magnitude is 1 may be off by: half a step; for e4m3, of the last binade.
_HALF_STEP = {"int8": 0.5 / 127, "int8r": 1.5 / 127, "fp8": 17 / 448, "k8v4": 3.2 / 15, "int4r": 3.2 / 15}
_DECODES = ((0, 1), (14, 15), (15, 16), (16, 17), (699, 700), (4000, 4001))
_PREFILLS = ((0, 1), (0, 17), (15, 33), (300, 800), (0, 129))
_WRITTEN = 200
_PRODUCTS, _PRODUCT_SHAPE = (1, 17, 64, 333), (1000, 4100)


class Checked(NamedTuple):
    """The largest error, as a share of the largest expected magnitude, and what it may be."""

    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """False for NaN, too."""
        return self.error <= self.tolerance


class Check(NamedTuple):
    """A kernel against its reference; `run` takes the device. name: dotted, unique."""

    name: str
    run: Callable[[torch.device], Checked]


class _Span(NamedTuple):
    block_ids: tuple[int, ...]
    start: int
    stop: int


def checks() -> list[Check]:
    """All of them."""
    found = []
    for dtype, width, group in (
        (torch.bfloat16, 128, 8),
        (torch.float16, 80, 1),
        (torch.float32, 64, 3),
        (torch.bfloat16, 96, 1),
        (torch.bfloat16, 192, 8),
        (torch.bfloat16, 256, 16),
        (torch.float32, 256, 16),
    ):
        shape, name = (dtype, width, group), f"{str(dtype).removeprefix('torch.')}.{width}x{group}"
        for window, suffix in ((None, name), (100, f"{name}.window")):
            found.append(Check(f"decode.{suffix}", functools.partial(_decode, shape=shape, window=window)))
            found.append(Check(f"prefill.{suffix}", functools.partial(_prefill, shape=shape, window=window)))
        found.append(Check(f"mass.{name}", functools.partial(_mass, shape=shape)))
        found.append(Check(f"bounds.{name}", functools.partial(_bounds, shape=shape)))
    for coding in CODINGS:
        for width, group, window in ((64, 3, 100), (128, 8, None), (256, 16, None)):
            shape, name = (torch.bfloat16, width, group), f"{coding}.{width}x{group}"
            given: dict[str, Any] = {"coding": coding, "shape": shape, "window": window}
            found.append(Check(f"decode.{name}", functools.partial(_decode_coded, **given)))
            found.append(Check(f"prefill.{name}", functools.partial(_prefill_coded, **given)))
        found.append(Check(f"write.{coding}", functools.partial(_write_coded, coding=coding)))
    found += [Check(f"latent.{heads}", functools.partial(_latent, heads=heads)) for heads in (16, 128)]
    for dtype in _TOLERANCE:
        for rows in _PRODUCTS:
            name = f"product.{str(dtype).removeprefix('torch.')}.{rows}"
            found.append(Check(name, functools.partial(_product, dtype=dtype, rows=rows)))
    return [*found, Check("write.raw", _write_raw), Check("gather", _gather)]


def _decode(device: torch.device, *, shape: tuple[torch.dtype, int, int], window: int | None) -> Checked:
    spans = _spans(_DECODES)
    return _compare_decode(spans, _raw_kv(spans, shape, device), shape, window, device)


def _decode_coded(
    device: torch.device, *, coding: str, shape: tuple[torch.dtype, int, int], window: int | None
) -> Checked:
    spans = _spans(_DECODES)
    return _compare_decode(spans, _coded_kv(spans, coding, shape[1], device), shape, window, device)


def _compare_decode(
    spans: Sequence[_Span],
    kv: LayerKV,
    shape: tuple[torch.dtype, int, int],
    window: int | None,
    device: torch.device,
) -> Checked:
    dtype, width, group = shape
    q = _draw(len(spans), group * _KV_HEADS, width, dtype=dtype, device=device)
    out = torch.full_like(q, float("nan"))
    batch = DecodeBatch.make(spans, range(len(spans)), device)
    paged_decode(q, kv, batch, out, scale=width**-0.5, window=window)
    expected = reference.attention(q, kv, spans, scale=width**-0.5, window=window)
    return _checked(out, expected, _TOLERANCE[dtype])


def _prefill(device: torch.device, *, shape: tuple[torch.dtype, int, int], window: int | None) -> Checked:
    spans = _spans(_PREFILLS)
    return _compare_prefill(spans, _raw_kv(spans, shape, device), shape, window, device)


def _prefill_coded(
    device: torch.device, *, coding: str, shape: tuple[torch.dtype, int, int], window: int | None
) -> Checked:
    spans = _spans(_PREFILLS)
    return _compare_prefill(spans, _coded_kv(spans, coding, shape[1], device), shape, window, device)


def _compare_prefill(
    spans: Sequence[_Span],
    kv: LayerKV,
    shape: tuple[torch.dtype, int, int],
    window: int | None,
    device: torch.device,
) -> Checked:
    dtype, width, group = shape
    rows = list(accumulate((span.stop - span.start for span in spans), initial=0))
    q = _draw(rows.pop(), group * _KV_HEADS, width, dtype=dtype, device=device)
    out = torch.full_like(q, float("nan"))
    batch = PrefillBatch.make(spans, rows, group, device, most_rows(kv, dtype))
    paged_prefill(q, kv, batch, out, scale=width**-0.5, window=window)
    expected = reference.attention(q, kv, spans, scale=width**-0.5, window=window)
    return _checked(out, expected, _TOLERANCE[dtype])


def _mass(device: torch.device, *, shape: tuple[torch.dtype, int, int]) -> Checked:
    dtype, width, group = shape
    spans = _spans(((0, 5), (0, 64), (0, 700)))
    key = _raw_kv(spans, shape, device).key
    queries, batch = 5, DecodeBatch.make(spans, range(len(spans)), device)
    q = _draw(len(spans), queries, group * _KV_HEADS, width, dtype=dtype, device=device)
    mass = block_mass(q, key, batch.tables, batch.lengths, scale=width**-0.5)
    expected = torch.zeros_like(mass, dtype=torch.float64)
    for at, span in enumerate(spans):
        keys = reference.dense_rows(key, span.block_ids, span.stop)
        got = reference.weights(q[at], keys, span.stop - queries, width**-0.5).sum(1)
        blocks = torch.arange(span.stop, device=device) // _SIZE
        expected[at].index_add_(1, blocks, got.view(_KV_HEADS, group, -1).sum(1))
    return _checked(mass, expected, _TOLERANCE[dtype])


def _bounds(device: torch.device, *, shape: tuple[torch.dtype, int, int]) -> Checked:
    spans = _spans(((0, 3 * _SIZE),))
    key = _raw_kv(spans, shape, device).key
    ids = torch.tensor(spans[0].block_ids, dtype=torch.int32, device=device)
    least, most = key_bounds(key, ids, torch.full_like(ids, _SIZE))
    stored = key.values[ids.long()].double()
    return _checked(torch.stack((least, most)), torch.stack((stored.amin(2), stored.amax(2))), 0.0)


def _latent(device: torch.device, *, heads: int) -> Checked:
    spans, dtype = _spans(_DECODES), torch.bfloat16
    cache = torch.full((_blocks(spans), 2, _SIZE, 576), float("nan"), dtype=dtype, device=device)[:, 1]
    slots = _slots(spans, device)
    write_latent(_draw(len(slots), 576, dtype=dtype, device=device), cache, slots)
    q = _draw(len(spans), heads, 576, dtype=dtype, device=device)
    out = torch.full((len(spans), heads, 512), float("nan"), dtype=dtype, device=device)
    latent_decode(q, cache, DecodeBatch.make(spans, range(len(spans)), device), out, scale=0.05)
    expected = reference.latent_attention(q, cache, spans, latent=512, scale=0.05)
    return _checked(out, expected, _TOLERANCE[dtype])


def _product(device: torch.device, *, dtype: torch.dtype, rows: int) -> Checked:
    columns, inner = _PRODUCT_SHAPE
    x = _draw(rows, inner, dtype=dtype, device=device)
    weight = torch.randint(-127, 128, (columns, inner), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scales, bias = (_draw(columns, dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    weight = weight.to(device)
    expected = (x.double() @ weight.double().T) * scales.double() + bias.double()
    return _checked(int8_product(x, weight, scales, bias), expected, _TOLERANCE[dtype])


def _write_raw(device: torch.device) -> Checked:
    spans, shape = _spans(_PREFILLS), (torch.bfloat16, 80, 1)
    slots = _slots(spans, device)
    kv = _raw_kv(spans, shape, device)
    new = [_draw(len(slots), _KV_HEADS, 80, dtype=torch.bfloat16, device=device, seed=seed) for seed in (5, 6)]
    write_kv(new[0], new[1], kv, slots)
    stored = [rows.values[slots // _SIZE, :, slots % _SIZE] for rows in kv]
    return _checked(torch.stack(stored), torch.stack(new).double(), 0.0)


def _write_coded(device: torch.device, *, coding: str) -> Checked:
    """Rows that are read back, against the rows that were written."""
    spans = _spans(((0, _WRITTEN),))
    kv = _coded_kv(spans, coding, 128, device)
    new = [_draw(_WRITTEN, _KV_HEADS, 128, dtype=torch.bfloat16, device=device, seed=seed) for seed in (5, 6)]
    write_kv(new[0], new[1], kv, _slots(spans, device))
    stored = [reference.dense_rows(rows, spans[0].block_ids, _WRITTEN) for rows in kv]
    return _checked(torch.stack(stored), torch.stack(new).double(), _HALF_STEP[coding])


def _gather(device: torch.device) -> Checked:
    pool = torch.randint(256, (64, 2, 40_000), dtype=torch.uint8, device=device)
    ids = torch.randperm(64, device=device)[:23]
    packed = torch.empty(23, 2, 40_000, dtype=torch.uint8, pin_memory=device.type == "cuda")
    gather_blocks(pool, ids.int(), packed)
    target = torch.zeros_like(pool)
    scatter_blocks(packed, ids.int(), target)
    expected = torch.zeros_like(pool)
    expected[ids] = pool[ids]
    return _checked(target, expected.double(), 0.0)


def _spans(lengths: Sequence[tuple[int, int]]) -> list[_Span]:
    """Spans of these (start, stop), in shuffled blocks."""
    counts = [-(-stop // _SIZE) for _, stop in lengths]
    ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    firsts = accumulate(counts, initial=0)
    return [
        _Span(tuple(ids[first : first + count]), start, stop)
        for (start, stop), count, first in zip(lengths, counts, firsts, strict=False)
    ]


def _blocks(spans: Sequence[_Span]) -> int:
    return sum(len(span.block_ids) for span in spans)


def _slots(spans: Sequence[_Span], device: torch.device) -> Tensor:
    """Slots of all tokens, int64."""
    slots = [span.block_ids[at // _SIZE] * _SIZE + at % _SIZE for span in spans for at in range(span.stop)]
    return torch.tensor(slots, device=device)


def _raw_kv(spans: Sequence[_Span], shape: tuple[torch.dtype, int, int], device: torch.device) -> LayerKV:
    """Layer 1 of a raw pool of two; slots without a token are NaN."""
    dtype, width, _ = shape
    pool = torch.full((_blocks(spans), 2, 2, _KV_HEADS, _SIZE, width), float("nan"), dtype=dtype, device=device)
    slots = _slots(spans, device)
    for plane in (0, 1):
        rows = _draw(len(slots), _KV_HEADS, width, dtype=dtype, device=device, seed=plane)
        pool[slots // _SIZE, 1, plane, :, slots % _SIZE] = rows
    return raw_layer(pool[:, 1, 0], pool[:, 1, 1])


def _coded_kv(spans: Sequence[_Span], coding: str, width: int, device: torch.device) -> LayerKV:
    """Layer 1 of a coded pool of two, written by the kernel."""
    group = LayerGroup(GroupKind.GQA, (0, 1), 2, _KV_HEADS, width)
    kv = QuantizedPool(Layout(_SIZE, (group,)), _blocks(spans), coding, device).layer(1)
    slots = _slots(spans, device)
    k, v = (_draw(len(slots), _KV_HEADS, width, dtype=torch.bfloat16, device=device, seed=seed) for seed in (1, 2))
    write_kv(k, v, kv, slots)
    return kv


def _draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 9) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _checked(got: Tensor, expected: Tensor, tolerance: float) -> Checked:
    error = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    return Checked(float(error), tolerance)
