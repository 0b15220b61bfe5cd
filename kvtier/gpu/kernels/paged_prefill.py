# ruff: noqa: N803, PLR0913
# (kernels: constants are in capitals; arguments are pointers and strides, for which there are no structs)
"""Paged prefill: several new tokens per sequence, causal, against the cached prefix and one another.

    program (tile, KV head)     new tokens [first, first + M // GROUP) of one sequence, times the query heads of the KV
                                head, as rows of one tile; the KV that its last token sees, tile by tile

After FlashAttention-2 (Dao, arXiv:2307.08691); the ragged batch is cut into tiles on the host, longest first, so that
no program starts without work. KV may be coded (`kvtier.gpu.kernels.rows`).
"""

from typing import no_type_check

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
from kvtier.gpu.kernels.batch import MOST_ROWS, PrefillBatch
from kvtier.gpu.kernels.launch import Launch, has_large_shared_memory, kernel, tl
from kvtier.gpu.kernels.paged_decode import (
    LOG2_E,
    check_attention,
    constants,
    pointers,
    rotated_queries,
    tile_tokens,
    unrotate,
)
from kvtier.gpu.kernels.rows import Code, LayerKV

__all__ = ["most_rows", "paged_prefill", "prefill_launch"]

_WIDE = 128


@kernel
@no_type_check
def _prefill(
    q, tiles, rows, counts, tables, lengths, key, key_meta, value, value_meta, out, scale, table_stride,
    q_row, q_head, out_row, out_head, key_block, key_head, key_token, key_meta_block, key_meta_head, value_block,
    value_head, value_token, value_meta_block, value_meta_head, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, KEY_CODE: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_CODE: tl.constexpr, VALUE_PAD: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence, begin = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    length, count = tl.load(lengths + sequence), tl.load(counts + sequence)
    key_width: tl.constexpr = WIDTH // 2 if KEY_CODE == 3 else WIDTH
    value_width: tl.constexpr = WIDTH // 2 if VALUE_CODE == 3 else WIDTH
    member = tl.arange(0, M)
    new = begin + member // GROUP
    held = (member // GROUP < M // GROUP) & (new < count)
    position = length - count + new
    row = (tl.load(rows + sequence) + new).to(tl.int64)
    heads = kv_head * GROUP + member % GROUP
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
    # [oldest token that the tile's first query sees, one past the one that its last query sees)
    oldest = tl.maximum(length - count + begin + 1 - WINDOW, 0) if WINDOW > 0 else 0
    end = length - count + tl.minimum(begin + M // GROUP, count)
    for start in range(oldest, end, N):
        tokens = start + tl.arange(0, N)
        seen = tokens < end
        visible = tokens[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (tokens[None, :] > position[:, None] - WINDOW)
        key_at, blocks, inside = token_places(table, tokens, seen, key_block, key_token, BLOCK_SIZE)
        keys = load_tile(key, key_at, seen, key_width, KEY_PAD)
        meta_at = blocks * key_meta_block + kv_head * key_meta_head + inside
        product = scale * scores(first, second, q_sum, keys, key_meta, meta_at, seen, KEY_CODE, BLOCK_SIZE, COMPUTE)
        values = load_tile(value, blocks * value_block + inside * value_token, seen, value_width, VALUE_PAD)
        meta_at = blocks * value_meta_block + kv_head * value_meta_head + inside
        acc, acc_high, lift, peak, total = attend_tile(
            product, visible & seen[None, :], values, value_meta, meta_at, seen, acc, acc_high, lift, peak, total,
            VALUE_CODE, BLOCK_SIZE, COMPUTE
        )  # fmt: skip
    low, high, _ = finish(acc, acc_high, lift, peak, total)
    store_rows(out, row * out_row + heads * out_head, held, low, high, WIDTH, VALUE_PAD, VALUE_CODE)


def paged_prefill(
    q: Tensor, kv: LayerKV, batch: PrefillBatch, out: Tensor, *, scale: float, window: int | None = None
) -> None:
    """Attend with the new tokens of several sequences, each to all tokens up to itself.

    Args:
        q: [T, heads, width], float32, bfloat16 or float16; for raw KV in KV's dtype. Any strides but over width.
        kv: one layer of a pool; the new tokens' K and V are in it. Its KV heads divide `heads`.
        batch: which rows of `q` attend to what; planned for `heads` / KV heads and `most_rows`.
        out: like `q`; the batch's rows are written.
        scale: of the scores, usually width ** -0.5.
        window: a token attends to itself and the `window - 1` before it, None for all.

    Raises:
        FormatMismatch: tensors that do not belong together. Nothing was written.
    """
    check_attention(q, kv, batch.tables, out)
    group = q.shape[1] // kv.key.heads
    if group > batch.tile_rows:
        raise FormatMismatch(
            f"{group} query heads per KV head in tiles of {batch.tile_rows} rows: plan the batch for these heads"
        )
    turned = rotated_queries(q, kv.key)
    written = out if kv.value.from_rotated is None else torch.empty_like(out, dtype=torch.float32)
    prefill_launch(turned, kv, batch, written, scale=scale, window=window).run()
    unrotate(written, kv.value, batch.all_rows, out)


def prefill_launch(
    q: Tensor, kv: LayerKV, batch: PrefillBatch, out: Tensor, *, scale: float, window: int | None
) -> Launch:
    """The kernel that `paged_prefill` starts, for queries that are rotated like the keys."""
    return Launch(
        _prefill,
        (len(batch.tiles), kv.key.heads),
        {
            **pointers(q, kv, batch.tables, batch.lengths, out),
            "tiles": batch.tiles,
            "rows": batch.rows,
            "counts": batch.counts,
            "scale": scale * LOG2_E,
        },
        constants(q, kv, window) | {"M": batch.tile_rows, "N": min(tile_tokens(kv), 64)},
        warps=8 if batch.tile_rows > 64 or _is_heavy(kv, q.dtype) else 4,
        stages=_stages(q, kv.key.width),
    )


def most_rows(kv: LayerKV, dtype: torch.dtype) -> int:
    """Query rows of a tile at most, for queries of a dtype: the sums of more would not fit into registers."""
    if _is_heavy(kv, dtype):
        return 32
    halves = Code.INT4 in (kv.key.code, kv.value.code)
    return 64 if halves and kv.key.width > _WIDE else MOST_ROWS


def _is_heavy(kv: LayerKV, dtype: torch.dtype) -> bool:
    """Whether tiles are wide and no tensor core multiplies them."""
    return dtype is torch.float32 and kv.key.width > _WIDE


def _stages(q: Tensor, width: int) -> int:
    """Buffers of K and V. Beside 128 rows of wide queries there is room for one where shared memory is small."""
    if width > _WIDE and not has_large_shared_memory(q.device):
        return 1
    return 3 if q.dtype.itemsize == 2 else 2
