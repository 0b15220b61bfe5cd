# ruff: noqa: N803, PLR0913
# (kernels: constants are in capitals; arguments are pointers and strides, for which there are no structs)
"""Paged decode: one new token per sequence against all KV in its blocks.

    program (sequence, KV head, split)     one tile: the query heads of a KV head, padded to 16 rows, so that K and V
                                           are read once for all of them
    split                                  `chunk` tokens of the context; `combine` adds the splits up

Split-KV after Flash-Decoding (Dao et al. 2023), paging after PagedAttention (Kwon et al., arXiv:2309.06180), the
folding of query heads after FlashInfer (Ye et al., arXiv:2501.01005). KV may be coded (`kvtier.gpu.kernels.rows`).
"""

from typing import Any, no_type_check

import torch
from torch import Tensor

from kvtier.errors import FormatMismatch
from kvtier.gpu.kernels.attend import (
    attend_tile,
    finish,
    load_queries,
    load_tile,
    scores,
    store_rows,
    token_places,
)
from kvtier.gpu.kernels.batch import DecodeBatch
from kvtier.gpu.kernels.combine import combine, split_count
from kvtier.gpu.kernels.launch import Launch, ceil_div, compute_dtype, kernel, padded, tl
from kvtier.gpu.kernels.rows import LayerKV, Rows

__all__ = [
    "LOG2_E",
    "check_attention",
    "constants",
    "decode_launches",
    "paged_decode",
    "pointers",
    "rotated_queries",
    "tile_tokens",
    "unrotate",
]

LOG2_E = 1.4426950408889634


@kernel
@no_type_check
def _decode(
    q, rows, tables, lengths, key, key_meta, value, value_meta, out, partial, sums, scale, chunk, table_stride,
    q_row, q_head, out_row, out_head, key_block, key_head, key_token, key_meta_block, key_meta_head, value_block,
    value_head, value_token, value_meta_block, value_meta_head, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    KEY_CODE: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_CODE: tl.constexpr, VALUE_PAD: tl.constexpr,
    COMPUTE: tl.constexpr
):  # fmt: skip
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + sequence)
    oldest = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    begin = oldest + split * chunk
    if begin >= length:
        return
    end = tl.minimum(begin + chunk, length)
    key_width: tl.constexpr = WIDTH // 2 if KEY_CODE == 3 else WIDTH
    value_width: tl.constexpr = WIDTH // 2 if VALUE_CODE == 3 else WIDTH
    row = tl.load(rows + sequence).to(tl.int64)
    member = tl.arange(0, M)
    held = member < GROUP
    heads = kv_head * GROUP + member
    queries = row * q_row + heads * q_head
    first = load_queries(q, queries, held, False, WIDTH, KEY_PAD, KEY_CODE, COMPUTE)
    second = load_queries(q, queries, held, True, WIDTH, KEY_PAD, KEY_CODE, COMPUTE) if KEY_CODE == 3 else first
    q_sum = tl.sum(first.to(tl.float32), 1) + tl.sum(second.to(tl.float32), 1)
    peak = tl.full([M], float("-inf"), tl.float32)
    total, lift = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VALUE_PAD], tl.float32)
    acc_high = tl.zeros([M, VALUE_PAD if VALUE_CODE == 3 else 1], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    key += kv_head * key_head
    value += kv_head * value_head
    for start in range(begin, end, N):
        tokens = start + tl.arange(0, N)
        seen = tokens < end
        key_at, blocks, inside = token_places(table, tokens, seen, key_block, key_token, BLOCK_SIZE)
        keys = load_tile(key, key_at, seen, key_width, KEY_PAD)
        meta_at = blocks * key_meta_block + kv_head * key_meta_head + inside
        product = scale * scores(first, second, q_sum, keys, key_meta, meta_at, seen, KEY_CODE, BLOCK_SIZE, COMPUTE)
        values = load_tile(value, blocks * value_block + inside * value_token, seen, value_width, VALUE_PAD)
        meta_at = blocks * value_meta_block + kv_head * value_meta_head + inside
        acc, acc_high, lift, peak, total = attend_tile(
            product, seen[None, :], values, value_meta, meta_at, seen, acc, acc_high, lift, peak, total, VALUE_CODE,
            BLOCK_SIZE, COMPUTE
        )  # fmt: skip
    low, high, log_sum = finish(acc, acc_high, lift, peak, total)
    if not SPLIT:
        store_rows(out, row * out_row + heads * out_head, held, low, high, WIDTH, VALUE_PAD, VALUE_CODE)
    else:
        places = (sequence.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * tl.num_programs(2) + split
        store_rows(partial, places * WIDTH, held, low, high, WIDTH, VALUE_PAD, VALUE_CODE)
        tl.store(sums + places, log_sum, mask=held)


def paged_decode(
    q: Tensor,
    kv: LayerKV,
    batch: DecodeBatch,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    splits: int | None = None,
) -> None:
    """Attend with one query token per sequence.

    Args:
        q: [T, heads, width], float32, bfloat16 or float16; for raw KV in KV's dtype. Any strides but over width.
        kv: one layer of a pool; the new tokens' K and V are in it. Its KV heads divide `heads`.
        batch: which rows of `q` attend to what.
        out: like `q`; the batch's rows are written.
        scale: of the scores, usually width ** -0.5.
        window: attend to the last so many tokens, None for all.
        splits: programs that share one sequence and KV head; None for as many as fill the device.

    Raises:
        FormatMismatch: tensors that do not belong together. Nothing was written.
    """
    check_attention(q, kv, batch.tables, out)
    turned = rotated_queries(q, kv.key)
    written = out if kv.value.from_rotated is None else torch.empty_like(out, dtype=torch.float32)
    for launch in decode_launches(turned, kv, batch, written, scale=scale, window=window, splits=splits):
        launch.run()
    unrotate(written, kv.value, batch.rows, out)


def decode_launches(
    q: Tensor, kv: LayerKV, batch: DecodeBatch, out: Tensor, *, scale: float, window: int | None, splits: int | None
) -> list[Launch]:
    """The kernels that `paged_decode` starts, for queries that are rotated like the keys."""
    sequences, heads, width, kv_heads = len(batch.rows), q.shape[1], q.shape[2], kv.key.heads
    tile = tile_tokens(kv)
    reach = min(batch.longest, window or batch.longest)
    if splits is None:
        splits = split_count(sequences * kv_heads, reach, q.device)
    chunk = ceil_div(ceil_div(max(reach, 1), splits), tile) * tile
    splits = max(1, ceil_div(reach, chunk))
    partial = sums = None
    if splits > 1:
        partial = torch.empty(sequences, heads, splits, width, dtype=torch.float32, device=q.device)
        sums = torch.empty(sequences, heads, splits, dtype=torch.float32, device=q.device)
    decode = Launch(
        _decode,
        (sequences, kv_heads, splits),
        {
            **pointers(q, kv, batch.tables, batch.lengths, out),
            "rows": batch.rows,
            "partial": partial,
            "sums": sums,
            "scale": scale * LOG2_E,
            "chunk": chunk,
        },
        constants(q, kv, window) | {"M": padded(heads // kv_heads), "N": tile, "SPLIT": splits > 1},
        warps=4,
        stages=3 if q.dtype.itemsize == 2 else 2,
    )
    if partial is None or sums is None:
        return [decode]
    return [decode, combine(partial, sums, batch, out, chunk=chunk, window=window)]


def pointers(q: Tensor, kv: LayerKV, tables: Tensor, lengths: Tensor, out: Tensor) -> dict[str, Any]:
    """Arguments that decode and prefill share."""
    return {
        "q": q,
        "tables": tables,
        "lengths": lengths,
        "key": kv.key.values,
        "key_meta": kv.key.meta,
        "value": kv.value.values,
        "value_meta": kv.value.meta,
        "out": out,
        "table_stride": tables.stride(0),
        "q_row": q.stride(0),
        "q_head": q.stride(1),
        "out_row": out.stride(0),
        "out_head": out.stride(1),
        **kv.key.strides("key"),
        **kv.value.strides("value"),
    }


def constants(q: Tensor, kv: LayerKV, window: int | None) -> dict[str, Any]:
    """Compiled-in values that decode and prefill share."""
    return {
        "GROUP": q.shape[1] // kv.key.heads,
        "WIDTH": kv.key.width,
        "BLOCK_SIZE": kv.key.block_size,
        "WINDOW": window or 0,
        "KEY_CODE": int(kv.key.code),
        "KEY_PAD": kv.key.pad,
        "VALUE_CODE": int(kv.value.code),
        "VALUE_PAD": kv.value.pad,
        "COMPUTE": compute_dtype(q.dtype),
    }


def tile_tokens(kv: LayerKV) -> int:
    """Tokens of a tile: 16 KiB of K, so that several programs fit onto a multiprocessor.

    Fewer of codes, whose decoding takes registers, and of float32, whose products do not run on tensor cores.
    """
    itemsize = kv.key.values.itemsize
    most = {1: 64, 2: 128, 4: 16}[itemsize]
    return min(max(16, (16 << 10) // (kv.key.pad * itemsize)), most)


def rotated_queries(q: Tensor, key: Rows) -> Tensor:
    """Queries as the stored keys are rotated: q·k is what it was, and no key needs to be turned back."""
    if key.from_rotated is None:
        return q
    # q·k = q·(stored @ from_rotated) = (q @ from_rotated^T)·stored
    return torch.matmul(q.float(), key.from_rotated.T).to(q.dtype)


def unrotate(written: Tensor, value: Rows, rows: Tensor, out: Tensor) -> None:
    """Turn sums of rotated V rows back into `out`, once per output row instead of once per token.

    rows: int, which rows of the flat batch were written.
    """
    if value.from_rotated is not None:
        at = rows.long()
        out[at] = torch.matmul(written[at], value.from_rotated).to(out.dtype)


def check_attention(q: Tensor, kv: LayerKV, tables: Tensor, out: Tensor) -> None:
    """Raise `FormatMismatch` for queries, KV, block tables and outputs that do not belong together."""
    if q.dim() != 3 or q.shape[2] != kv.key.width or q.shape[1] % kv.key.heads or q.stride(2) != 1:
        raise FormatMismatch(
            f"queries {list(q.shape)} of strides {list(q.stride())}: expected [T, heads, {kv.key.width}] with a "
            f"multiple of {kv.key.heads} heads and stride 1 over width"
        )
    if kv.key_dot_dtype not in (None, q.dtype) or out.shape != q.shape or out.stride(2) != 1:
        raise FormatMismatch(
            f"queries {list(q.shape)} {q.dtype}, outputs {list(out.shape)}, raw KV of {kv.key_dot_dtype}: expected "
            f"outputs like queries, and both like KV"
        )
    if not q.device == out.device == kv.key.values.device:
        raise FormatMismatch(f"queries on {q.device}, outputs on {out.device}, KV on {kv.key.values.device}")
    if tables.dtype != torch.int32 or tables.dim() != 2 or tables.stride(1) != 1:
        raise FormatMismatch(f"block tables {list(tables.shape)} of {tables.dtype}: expected int32 [B, blocks]")
