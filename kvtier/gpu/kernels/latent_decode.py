# ruff: noqa: N803, PLR0913
# (kernels: constants are in capitals; arguments are pointers and strides, for which there are no structs)
"""MLA decode: one new token per sequence against its latents, which are K and V at once.

    program (sequence, tile of heads, split)     up to 64 heads share every latent row that is read; the row's first
                                                 `latent` elements are also the values

The absorbed form of DeepSeek-V2 (arXiv:2405.04434): queries come multiplied into the latent space, and outputs are left
in it. Split-KV after Flash-Decoding (Dao et al. 2023). What is cached is the latent after its norm and the rope key
after RoPE.
"""

from typing import no_type_check

import torch
from torch import Tensor

from kvtier.errors import FormatMismatch
from kvtier.gpu.kernels.attend import attend_tile, finish, load_tile, store_rows, token_places
from kvtier.gpu.kernels.batch import DecodeBatch
from kvtier.gpu.kernels.combine import combine, split_count
from kvtier.gpu.kernels.launch import (
    Launch,
    ceil_div,
    compute_dtype,
    has_large_shared_memory,
    kernel,
    padded,
    tl,
)
from kvtier.gpu.kernels.paged_decode import LOG2_E

__all__ = ["latent_decode", "latent_launches"]


@kernel
@no_type_check
def _decode(
    q, rows, tables, lengths, cache, out, partial, sums, scale, chunk, table_stride, q_row, q_head, out_row, out_head,
    block, token, HEADS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    # Tiles of heads follow one another: the second one finds the latents in the device's cache.
    tile, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    begin = split * chunk
    if begin >= length:
        return
    end = tl.minimum(begin + chunk, length)
    row = tl.load(rows + sequence).to(tl.int64)
    heads = tile * M + tl.arange(0, M)
    held = heads < HEADS
    queries = q + row * q_row + heads * q_head
    columns, rope = tl.arange(0, LATENT_PAD), tl.arange(0, ROPE_PAD)
    mask = held[:, None] & (columns < LATENT)[None, :]
    q_latent = tl.load(queries[:, None] + columns[None, :], mask=mask, other=0.0).to(COMPUTE)
    mask = held[:, None] & (rope < ROPE)[None, :]
    q_rope = tl.load(queries[:, None] + LATENT + rope[None, :], mask=mask, other=0.0).to(COMPUTE)
    peak = tl.full([M], float("-inf"), tl.float32)
    total, lift = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    acc, unused = tl.zeros([M, LATENT_PAD], tl.float32), tl.zeros([M, 1], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    for start in range(begin, end, N):
        tokens = start + tl.arange(0, N)
        seen = tokens < end
        places, _, _ = token_places(table, tokens, seen, block, token, BLOCK_SIZE)
        latents = load_tile(cache, places, seen, LATENT, LATENT_PAD).to(COMPUTE)
        ropes = load_tile(cache + LATENT, places, seen, ROPE, ROPE_PAD).to(COMPUTE)
        product = tl.dot(q_rope, tl.trans(ropes), input_precision="ieee")
        product = scale * tl.dot(q_latent, tl.trans(latents), product, input_precision="ieee")
        acc, unused, lift, peak, total = attend_tile(
            product, seen[None, :], latents, cache, places, seen, acc, unused, lift, peak, total, 0, BLOCK_SIZE, COMPUTE
        )
    result, unused, log_sum = finish(acc, unused, lift, peak, total)
    if not SPLIT:
        store_rows(out, row * out_row + heads * out_head, held, result, result, LATENT, LATENT_PAD, 0)
    else:
        at = (sequence.to(tl.int64) * HEADS + heads) * tl.num_programs(2) + split
        store_rows(partial, at * LATENT, held, result, result, LATENT, LATENT_PAD, 0)
        tl.store(sums + at, log_sum, mask=held)


def latent_decode(
    q: Tensor,
    cache: Tensor,
    batch: DecodeBatch,
    out: Tensor,
    *,
    scale: float,
    splits: int | None = None,
) -> None:
    """Attend with one query token per sequence over latents.

    Args:
        q: [T, heads, latent + rope] in the cache's dtype: absorbed queries, then their rope part. Any strides but over
            the last axis.
        cache: [num_blocks, block_size, latent + rope], one layer of an MLA pool; the new tokens are in it.
        batch: which rows of `q` attend to what.
        out: [T, heads, latent], like `q`; the batch's rows are written.
        scale: of the scores; that of the model, which does not follow from these shapes.
        splits: programs that share one sequence and tile of heads; None for as many as fill the device.

    Raises:
        FormatMismatch: tensors that do not belong together. Nothing was written.
    """
    _check(q, cache, batch.tables, out)
    for launch in latent_launches(q, cache, batch, out, scale=scale, splits=splits):
        launch.run()


def latent_launches(
    q: Tensor, cache: Tensor, batch: DecodeBatch, out: Tensor, *, scale: float, splits: int | None
) -> list[Launch]:
    """The kernels that `latent_decode` starts."""
    sequences, heads, width = len(batch.rows), q.shape[1], q.shape[2]
    latent = out.shape[2]
    tile_heads = min(padded(heads), _most_heads(q))
    tiles = ceil_div(heads, tile_heads)
    # 32 rows of 512 latents: 32 KiB of shared memory per stage, beside the 72 KiB of 64 queries.
    tile = max(16, min(64, (32 << 10) // (padded(latent) * q.dtype.itemsize)))
    if splits is None:
        splits = split_count(sequences * tiles, batch.longest, q.device)
    chunk = ceil_div(ceil_div(max(batch.longest, 1), splits), tile) * tile
    splits = max(1, ceil_div(batch.longest, chunk))
    partial = sums = None
    if splits > 1:
        partial = torch.empty(sequences, heads, splits, latent, dtype=torch.float32, device=q.device)
        sums = torch.empty(sequences, heads, splits, dtype=torch.float32, device=q.device)
    decode = Launch(
        _decode,
        (tiles, sequences, splits),
        {
            "q": q,
            "rows": batch.rows,
            "tables": batch.tables,
            "lengths": batch.lengths,
            "cache": cache,
            "out": out,
            "partial": partial,
            "sums": sums,
            "scale": scale * LOG2_E,
            "chunk": chunk,
            "table_stride": batch.tables.stride(0),
            "q_row": q.stride(0),
            "q_head": q.stride(1),
            "out_row": out.stride(0),
            "out_head": out.stride(1),
            "block": cache.stride(0),
            "token": cache.stride(1),
        },
        {
            "HEADS": heads,
            "M": tile_heads,
            "N": tile,
            "LATENT": latent,
            "LATENT_PAD": padded(latent),
            "ROPE": width - latent,
            "ROPE_PAD": padded(width - latent),
            "BLOCK_SIZE": cache.shape[1],
            "SPLIT": splits > 1,
            "COMPUTE": compute_dtype(q.dtype),
        },
        warps=8 if tile_heads > 32 else 4,
        stages=3 if q.dtype.itemsize == 2 else 1,
    )
    if partial is None or sums is None:
        return [decode]
    return [decode, combine(partial, sums, batch, out, chunk=chunk, window=None)]


def _most_heads(q: Tensor) -> int:
    """Heads of a tile: their queries lie in shared memory, 72 KiB for 64 of them in 16 bits."""
    if q.dtype.itemsize > 2:
        return 16
    return 64 if has_large_shared_memory(q.device) else 16


def _check(q: Tensor, cache: Tensor, tables: Tensor, out: Tensor) -> None:
    if q.dim() != 3 or cache.dim() != 3 or q.shape[2] != cache.shape[2] or q.stride(2) != 1 or cache.stride(2) != 1:
        raise FormatMismatch(
            f"queries {list(q.shape)}, cache {list(cache.shape)}: expected [T, heads, latent + rope] and "
            f"[num_blocks, block_size, latent + rope] with stride 1 over the last axis"
        )
    if out.dim() != 3 or out.shape[:2] != q.shape[:2] or not 0 < out.shape[2] <= q.shape[2] or out.stride(2) != 1:
        raise FormatMismatch(f"outputs {list(out.shape)} for queries {list(q.shape)}: expected [T, heads, latent]")
    if not q.dtype == cache.dtype == out.dtype or not q.device == cache.device == out.device:
        raise FormatMismatch(
            f"queries of {q.dtype} on {q.device}, cache of {cache.dtype} on {cache.device}, outputs of {out.dtype} on "
            f"{out.device}: expected the same of all"
        )
    if tables.dtype != torch.int32 or tables.dim() != 2 or tables.stride(1) != 1:
        raise FormatMismatch(f"block tables {list(tables.shape)} of {tables.dtype}: expected int32 [B, blocks]")
