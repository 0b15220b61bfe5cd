"""Measurements of the kernels on a real device, each with the bytes that it has to move at least."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.gpu.kernels.batch import DecodeBatch, PrefillBatch
from kvtier.gpu.kernels.block_mass import block_mass
from kvtier.gpu.kernels.gather import gather_blocks
from kvtier.gpu.kernels.int8_product import int8_product
from kvtier.gpu.kernels.latent_decode import latent_decode
from kvtier.gpu.kernels.paged_decode import paged_decode
from kvtier.gpu.kernels.paged_prefill import most_rows, paged_prefill
from kvtier.gpu.kernels.quantized_pool import CODINGS, QuantizedPool
from kvtier.gpu.kernels.rows import LayerKV, raw_layer
from kvtier.gpu.kernels.write_kv import write_kv
from kvtier.layout import GroupKind, LayerGroup, Layout

__all__ = ["Measure", "Sizes", "Work", "measures", "seconds"]

_BLOCK_SIZE = 16
# More than any cache holds, and half a millisecond's work on the fastest device.
_CLEARED_BYTES = 2 << 30


class Work(NamedTuple):
    """Something to be timed: prepared, to be run any number of times.

    Args:
        run: starts it on the current stream.
        nbytes: bytes that it has to read and write at least.
        flops: multiplications and additions; 0 where only bytes count.
        peer: the same by other means, if there are any.
    """

    run: Callable[[], object]
    nbytes: int
    flops: int = 0
    peer: Callable[[], object] | None = None


class Measure(NamedTuple):
    """A measurement; `prepare` takes the device. name: dotted, unique. peer: what `Work.peer` is."""

    name: str
    prepare: Callable[[torch.device], Work]
    peer: str | None = None


class Sizes(NamedTuple):
    """What measurements are made with; the pools of the default take 3 GiB."""

    batch: int = 64
    context: int = 4096
    kv_heads: int = 8
    queries_per_head: int = 8
    head_dim: int = 128
    latent: int = 512
    rope: int = 64
    latent_heads: int = 128
    moved_blocks: int = 2048
    block_bytes: int = 128 << 10
    matrix: int = 8192


def measures(sizes: Sizes | None = None) -> list[Measure]:
    """All of them, the most important first."""
    given = sizes or Sizes()
    dense = "sdpa over contiguous kv"
    return [
        Measure("decode", functools.partial(_decode, sizes=given), dense),
        *(
            Measure(f"decode.{coding}", functools.partial(_decode_coded, sizes=given, coding=coding))
            for coding in CODINGS
        ),
        Measure("latent_decode", functools.partial(_latent, sizes=given)),
        Measure("prefill", functools.partial(_prefill, sizes=given), dense),
        Measure("write", functools.partial(_write, sizes=given), "index_put"),
        *(
            Measure(f"write.{coding}", functools.partial(_write_coded, sizes=given, coding=coding))
            for coding in CODINGS
        ),
        Measure("gather.to_device", functools.partial(_gather, sizes=given, pinned=False), "index_select"),
        Measure("gather.to_host", functools.partial(_gather, sizes=given, pinned=True), "memcpy of contiguous bytes"),
        *(
            Measure(f"product.{rows}", functools.partial(_product, sizes=given, rows=rows), "bfloat16 weights")
            for rows in (1, given.batch)
        ),
        Measure("product.prefill", functools.partial(_product, sizes=given, rows=given.context), "bfloat16 weights"),
        Measure("block_mass", functools.partial(_mass, sizes=given)),
    ]


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median duration of one run, after three that compile and warm up.

    On a CUDA device by events, its caches cold, and without the time that the host takes to launch.
    """
    for _ in range(min(3, repeats)):
        run()
    once = _on_cuda(device) if device.type == "cuda" else _on_cpu
    return statistics.median(once(run) for _ in range(repeats))


def _on_cpu(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _on_cuda(device: torch.device) -> Callable[[Callable[[], object]], float]:
    cleared = torch.empty(_CLEARED_BYTES, dtype=torch.uint8, device=device)

    def once(run: Callable[[], object]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # While the device is busy with this, the host launches what is timed: no kernel then waits for the host.
        cleared.zero_()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    return once


def _decode(device: torch.device, *, sizes: Sizes) -> Work:
    kv, batch = _raw_kv(sizes, device), _decodes(sizes, device)
    q, out = _queries(sizes, device)
    dense = [
        rows.values[batch.tables.long()].transpose(1, 2).flatten(2, 3)[:, :, : sizes.context].contiguous()
        for rows in kv
    ]

    def peer() -> Tensor:
        # The query heads of a KV head as queries: one pass over K and V.
        folded = q.view(sizes.batch, sizes.kv_heads, sizes.queries_per_head, sizes.head_dim)
        return functional.scaled_dot_product_attention(folded, dense[0], dense[1])

    return Work(
        lambda: paged_decode(q, kv, batch, out, scale=sizes.head_dim**-0.5),
        _row_bytes(kv) * sizes.batch * sizes.context,
        4 * sizes.context * q.numel(),
        peer,
    )


def _decode_coded(device: torch.device, *, sizes: Sizes, coding: str) -> Work:
    kv, batch = _coded_kv(sizes, coding, device), _decodes(sizes, device)
    q, out = _queries(sizes, device)
    return Work(
        lambda: paged_decode(q, kv, batch, out, scale=sizes.head_dim**-0.5),
        _row_bytes(kv) * sizes.batch * sizes.context,
        4 * sizes.context * q.numel(),
    )


def _latent(device: torch.device, *, sizes: Sizes) -> Work:
    batch, width = _decodes(sizes, device), sizes.latent + sizes.rope
    cache = torch.randn(_blocks(sizes), _BLOCK_SIZE, width, dtype=torch.bfloat16, device=device)
    q = torch.randn(sizes.batch, sizes.latent_heads, width, dtype=torch.bfloat16, device=device)
    out = torch.empty(sizes.batch, sizes.latent_heads, sizes.latent, dtype=torch.bfloat16, device=device)
    return Work(
        lambda: latent_decode(q, cache, batch, out, scale=width**-0.5),
        sizes.batch * sizes.context * width * 2,
        2 * sizes.batch * sizes.context * sizes.latent_heads * (width + sizes.latent),
    )


def _prefill(device: torch.device, *, sizes: Sizes) -> Work:
    """One sequence, all new."""
    one = sizes._replace(batch=1)
    kv, heads = _raw_kv(one, device), sizes.kv_heads * sizes.queries_per_head
    q = torch.randn(sizes.context, heads, sizes.head_dim, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(q)
    table = tuple(range(_blocks(one)))
    span, rows = _Span(table, 0, sizes.context), most_rows(kv, q.dtype)
    batch = PrefillBatch.make([span], [0], sizes.queries_per_head, device, rows)
    dense = [rows.values.transpose(0, 1).flatten(1, 2)[None, :, : sizes.context].contiguous() for rows in kv]
    queries = q.transpose(0, 1)[None].contiguous()

    def peer() -> Tensor:
        return functional.scaled_dot_product_attention(queries, dense[0], dense[1], is_causal=True, enable_gqa=True)

    return Work(
        lambda: paged_prefill(q, kv, batch, out, scale=sizes.head_dim**-0.5),
        _row_bytes(kv) * sizes.context + 2 * q.numel() * q.itemsize,
        2 * sizes.context * q.numel(),
        peer,
    )


def _write(device: torch.device, *, sizes: Sizes) -> Work:
    """As many tokens as a large prefill has."""
    one = sizes._replace(batch=1)
    kv, (k, v), slots = _raw_kv(one, device), _new_kv(sizes, device), _slots(one, device)

    def peer() -> None:
        for rows, x in ((kv.key, k), (kv.value, v)):
            rows.values[slots // _BLOCK_SIZE, :, slots % _BLOCK_SIZE] = x

    return Work(lambda: write_kv(k, v, kv, slots), 2 * _row_bytes(kv) * sizes.context, peer=peer)


def _write_coded(device: torch.device, *, sizes: Sizes, coding: str) -> Work:
    one = sizes._replace(batch=1)
    kv, (k, v), slots = _coded_kv(one, coding, device), _new_kv(sizes, device), _slots(one, device)
    nbytes = 2 * k.numel() * k.itemsize + _row_bytes(kv) * sizes.context
    return Work(lambda: write_kv(k, v, kv, slots), nbytes)


def _gather(device: torch.device, *, sizes: Sizes, pinned: bool) -> Work:
    """Every other block of a pool, in shuffled order; to pinned memory, bytes cross the bus once."""
    pool = torch.randint(256, (2 * sizes.moved_blocks, 1, sizes.block_bytes), dtype=torch.uint8, device=device)
    ids = (2 * torch.randperm(sizes.moved_blocks, device=device)).int()
    on_host = pinned and device.type == "cuda"
    packed = torch.empty(
        sizes.moved_blocks,
        1,
        sizes.block_bytes,
        dtype=torch.uint8,
        device="cpu" if on_host else device,
        pin_memory=on_host,
    )

    def peer() -> Tensor:
        if on_host:
            return packed.copy_(pool[: sizes.moved_blocks], non_blocking=True)
        return torch.index_select(pool, 0, ids, out=packed)

    return Work(lambda: gather_blocks(pool, ids, packed), packed.numel() * (1 if on_host else 2), peer=peer)


def _mass(device: torch.device, *, sizes: Sizes) -> Work:
    """Keys are read twice."""
    kv, batch = _raw_kv(sizes, device), _decodes(sizes, device)
    q = _queries(sizes, device)[0].unsqueeze(1)
    return Work(
        lambda: block_mass(q, kv.key, batch.tables, batch.lengths, scale=sizes.head_dim**-0.5),
        _row_bytes(kv) * sizes.batch * sizes.context,
        4 * sizes.context * q.numel(),
    )


def _product(device: torch.device, *, sizes: Sizes, rows: int) -> Work:
    """A square matrix of int8 weights."""
    width = sizes.matrix
    x, wide = (torch.randn(count, width, dtype=torch.bfloat16, device=device) for count in (rows, width))
    weight = torch.randint(-127, 128, (width, width), dtype=torch.int8, device=device)
    scales = torch.rand(width, device=device).bfloat16()
    return Work(
        lambda: int8_product(x, weight, scales),
        weight.numel() + 2 * x.numel() * x.itemsize,
        2 * rows * weight.numel(),
        lambda: functional.linear(x, wide),
    )


class _Span(NamedTuple):
    block_ids: tuple[int, ...]
    start: int
    stop: int


def _blocks(sizes: Sizes) -> int:
    return sizes.batch * -(-sizes.context // _BLOCK_SIZE)


def _decodes(sizes: Sizes, device: torch.device) -> DecodeBatch:
    """Sequences of one length, blocks shuffled over the whole pool."""
    tables = torch.randperm(_blocks(sizes), device=device).int().view(sizes.batch, -1)
    rows = torch.arange(sizes.batch, device=device, dtype=torch.int32)
    return DecodeBatch(rows, tables, torch.full_like(rows, sizes.context), sizes.context)


def _queries(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    heads = sizes.kv_heads * sizes.queries_per_head
    q = torch.randn(sizes.batch, heads, sizes.head_dim, dtype=torch.bfloat16, device=device)
    return q, torch.empty_like(q)


def _new_kv(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    new = torch.randn(2, sizes.context, sizes.kv_heads, sizes.head_dim, dtype=torch.bfloat16, device=device)
    return new[0], new[1]


def _slots(sizes: Sizes, device: torch.device) -> Tensor:
    return torch.randperm(_blocks(sizes) * _BLOCK_SIZE, device=device)[: sizes.context]


def _raw_kv(sizes: Sizes, device: torch.device) -> LayerKV:
    shape = (_blocks(sizes), 2, sizes.kv_heads, _BLOCK_SIZE, sizes.head_dim)
    pool = torch.randn(*shape, dtype=torch.bfloat16, device=device)
    return raw_layer(pool[:, 0], pool[:, 1])


def _coded_kv(sizes: Sizes, coding: str, device: torch.device) -> LayerKV:
    """Random codes; every scale is 1/64, every low 0."""
    group = LayerGroup(GroupKind.GQA, (0,), 2, sizes.kv_heads, sizes.head_dim)
    pool = QuantizedPool(Layout(_BLOCK_SIZE, (group,)), _blocks(sizes), coding, device)
    pool.memory.random_(0, 127)
    kv = pool.layer(0)
    for rows in kv:
        if rows.meta is not None:
            rows.meta.zero_()
            rows.meta[:, :, 0] = 1 / 64
    return kv


def _row_bytes(kv: LayerKV) -> int:
    """Bytes of K and V of one token, in all heads."""
    return sum(rows.heads * (rows.values.shape[3] * rows.values.itemsize + 2 * rows.code.metas) for rows in kv)
