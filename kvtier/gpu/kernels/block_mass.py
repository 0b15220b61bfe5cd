# ruff: noqa: N803, PLR0913
# (kernels: constants are in capitals; arguments are pointers and strides, for which there are no structs)
"""What scorers of blocks need: the attention that each block got, and bounds of its keys.

block_mass     H2O (Zhang et al., arXiv:2306.14048) and SnapKV (Li et al., arXiv:2404.14469): attention weights of the
               last queries, summed per KV head and block. Two passes, so that no weight is ever stored: the logarithm
               of each row's sum, then the weights against it
key_bounds     Quest (Tang et al., arXiv:2406.10774): element-wise minimum and maximum of a block's keys, per KV head
"""

from typing import Any, no_type_check

import torch
from torch import Tensor

from kvtier.errors import FormatMismatch
from kvtier.gpu.kernels.attend import load_queries, load_tile, scores, token_places
from kvtier.gpu.kernels.batch import tile_shape
from kvtier.gpu.kernels.launch import Launch, ceil_div, compute_dtype, kernel, tl
from kvtier.gpu.kernels.paged_decode import LOG2_E, rotated_queries
from kvtier.gpu.kernels.rows import Code, Rows

__all__ = ["block_mass", "bounds_launch", "key_bounds", "mass_launches"]


@kernel
@no_type_check
def _tile_scores(
    q, sequence, kv_head, first_query, first_token, tables, length, key, key_meta, scale, table_stride, q_sequence,
    q_token, q_head, key_block, key_head, key_token, key_meta_block, key_meta_head, COUNT: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODE: tl.constexpr, PAD: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """Scores [M, N], -inf where a query does not see a token."""
    member, tokens = tl.arange(0, M), first_token + tl.arange(0, N)
    new = first_query + member // GROUP
    held = (member // GROUP < M // GROUP) & (new < COUNT)
    rows = sequence * q_sequence + new * q_token + (kv_head * GROUP + member % GROUP) * q_head
    first = load_queries(q, rows, held, False, WIDTH, PAD, CODE, COMPUTE)
    second = load_queries(q, rows, held, True, WIDTH, PAD, CODE, COMPUTE) if CODE == 3 else first
    q_sum = tl.sum(first.to(tl.float32), 1) + tl.sum(second.to(tl.float32), 1)
    seen = tokens < length
    table = tables + sequence * table_stride
    places, blocks, inside = token_places(table, tokens, seen, key_block, key_token, BLOCK_SIZE)
    keys = load_tile(key + kv_head * key_head, places, seen, WIDTH // 2 if CODE == 3 else WIDTH, PAD)
    meta_at = blocks * key_meta_block + kv_head * key_meta_head + inside
    product = scale * scores(first, second, q_sum, keys, key_meta, meta_at, seen, CODE, BLOCK_SIZE, COMPUTE)
    visible = held[:, None] & (tokens[None, :] <= (length - COUNT + new)[:, None])
    return tl.where(visible, product, float("-inf"))


@kernel
@no_type_check
def _log_sums(
    q, tables, lengths, key, key_meta, sums, scale, table_stride, q_sequence, q_token, q_head, key_block, key_head,
    key_token, key_meta_block, key_meta_head, COUNT: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE: tl.constexpr,
    PAD: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    sequence, kv_head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + sequence)
    peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    first_query = tile * (M // GROUP)
    for first_token in range(0, length, N):
        product = _tile_scores(
            q, sequence, kv_head, first_query, first_token, tables, length, key, key_meta, scale, table_stride,
            q_sequence, q_token, q_head, key_block, key_head, key_token, key_meta_block, key_meta_head, COUNT, GROUP, M,
            N, WIDTH, BLOCK_SIZE, CODE, PAD, COMPUTE
        )  # fmt: skip
        highest = tl.maximum(peak, tl.max(product, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(product - base[:, None]), 1)
        peak = highest
    # A row that there is not weighs nothing against +inf.
    log_sum = tl.where(total == 0.0, float("inf"), peak + tl.log2(tl.where(total == 0.0, 1.0, total)))
    at = ((sequence * tl.num_programs(1) + kv_head) * TILES + tile) * M + tl.arange(0, M)
    tl.store(sums + at, log_sum)


@kernel
@no_type_check
def _mass(
    q, tables, lengths, key, key_meta, sums, mass, scale, columns, table_stride, q_sequence, q_token, q_head, key_block,
    key_head, key_token, key_meta_block, key_meta_head, COUNT: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE: tl.constexpr,
    PAD: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    # One program per block: N is the block size, or the power of two above it.
    at, kv_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + sequence)
    inside = tl.arange(0, N) < BLOCK_SIZE
    got = tl.zeros([M], tl.float32)
    if at * BLOCK_SIZE < length:
        for tile in range(TILES):
            product = _tile_scores(
                q, sequence, kv_head, tile * (M // GROUP), at * BLOCK_SIZE, tables, length, key, key_meta, scale,
                table_stride, q_sequence, q_token, q_head, key_block, key_head, key_token, key_meta_block,
                key_meta_head, COUNT, GROUP, M, N, WIDTH, BLOCK_SIZE, CODE, PAD, COMPUTE
            )  # fmt: skip
            row = ((sequence * tl.num_programs(1) + kv_head) * TILES + tile) * M + tl.arange(0, M)
            weights = tl.exp2(product - tl.load(sums + row)[:, None])
            got += tl.sum(tl.where(inside[None, :], weights, 0.0), 1)
    tl.store(mass + (sequence * tl.num_programs(1) + kv_head) * columns + at, tl.sum(got, 0))


@kernel
@no_type_check
def _bounds(
    key, ids, counts, least, most, key_block, key_head, key_token, WIDTH: tl.constexpr, PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    at, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tokens, columns = tl.arange(0, N), tl.arange(0, PAD)
    seen = tokens < tl.minimum(tl.load(counts + at), BLOCK_SIZE)
    mask = seen[:, None] & (columns < WIDTH)[None, :]
    places = tl.load(ids + at).to(tl.int64) * key_block + kv_head * key_head + tokens * key_token
    keys = tl.load(key + places[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    out = (at * tl.num_programs(1) + kv_head) * WIDTH + columns
    low = tl.min(tl.where(seen[:, None], keys, float("inf")), 0)
    high = tl.max(tl.where(seen[:, None], keys, -float("inf")), 0)
    tl.store(least + out, low, mask=columns < WIDTH)
    tl.store(most + out, high, mask=columns < WIDTH)


def block_mass(q: Tensor, key: Rows, tables: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
    """Attention weights of each sequence's last queries, summed per KV head and block.

    Args:
        q: [B, Q, heads, width], the queries of the last Q tokens of each sequence; a float, raw keys' dtype.
        key: keys of one layer. Their heads divide `heads`.
        tables: int32 [B, N].
        lengths: int32 [B], tokens; each at least Q.
        scale: of the scores.

    Returns:
        float32 [B, kv_heads, N]; a row sums to Q times the query heads of a KV head. Blocks without tokens got 0.

    Raises:
        FormatMismatch: tensors that do not belong together.
    """
    if q.dim() != 4 or q.shape[3] != key.width or q.shape[2] % key.heads or q.stride(3) != 1 or len(q) != len(tables):
        raise FormatMismatch(
            f"queries {list(q.shape)} for {len(tables)} block tables: expected [{len(tables)}, Q, heads, {key.width}] "
            f"with a multiple of {key.heads} heads"
        )
    if tables.dtype != torch.int32 or lengths.dtype != torch.int32 or tables.stride(1) != 1:
        raise FormatMismatch(f"block tables of {tables.dtype}, lengths of {lengths.dtype}: expected int32")
    if key.code is Code.RAW and q.dtype != key.values.dtype:
        raise FormatMismatch(f"queries of {q.dtype}, raw keys of {key.values.dtype}: expected the same")
    mass = torch.empty(len(q), key.heads, tables.shape[1], dtype=torch.float32, device=q.device)
    for launch in mass_launches(rotated_queries(q, key), key, tables, lengths, mass, scale=scale):
        launch.run()
    return mass


def mass_launches(q: Tensor, key: Rows, tables: Tensor, lengths: Tensor, mass: Tensor, *, scale: float) -> list[Launch]:
    """The kernels that `block_mass` starts, for queries that are rotated like the keys."""
    sequences, count, heads, _ = q.shape
    group = heads // key.heads
    # In float32 no tensor core multiplies: what a tile holds lies in registers.
    most, tokens = (64, 64) if q.dtype.itemsize == 2 else (16, 16)
    rows, _ = tile_shape(count, group, most)
    tiles = ceil_div(count, rows // group)
    sums = torch.empty(sequences, key.heads, tiles, rows, dtype=torch.float32, device=q.device)
    arguments: dict[str, Any] = {
        "q": q,
        "tables": tables,
        "lengths": lengths,
        "key": key.values,
        "key_meta": key.meta,
        "sums": sums,
        "scale": scale * LOG2_E,
        "table_stride": tables.stride(0),
        "q_sequence": q.stride(0),
        "q_token": q.stride(1),
        "q_head": q.stride(2),
        **key.strides("key"),
    }
    constants = {
        "COUNT": count,
        "TILES": tiles,
        "GROUP": group,
        "M": rows,
        "WIDTH": key.width,
        "BLOCK_SIZE": key.block_size,
        "CODE": int(key.code),
        "PAD": key.pad,
        "COMPUTE": compute_dtype(q.dtype),
    }
    block = max(16, 1 << (key.block_size - 1).bit_length())
    return [
        Launch(_log_sums, (sequences, key.heads, tiles), arguments, constants | {"N": tokens}),
        Launch(
            _mass,
            (tables.shape[1], key.heads, sequences),
            arguments | {"mass": mass, "columns": tables.shape[1]},
            constants | {"N": block},
        ),
    ]


def key_bounds(key: Rows, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Element-wise minimum and maximum of raw keys, per block and KV head.

    Args:
        key: raw keys of one layer.
        ids: int32 [n], blocks.
        counts: int32 [n], how many of a block's tokens count, at least 1.

    Returns:
        float32 [n, kv_heads, width], twice.

    Raises:
        FormatMismatch: coded keys, or ids and counts of other types or lengths.
    """
    if key.code is not Code.RAW:
        raise FormatMismatch(f"keys coded as {key.code.name}: bounds are those of raw keys; take them before coding")
    if ids.dtype != torch.int32 or counts.dtype != torch.int32 or ids.shape != counts.shape:
        raise FormatMismatch(
            f"ids {list(ids.shape)} of {ids.dtype}, counts {list(counts.shape)} of {counts.dtype}: expected int32 [n]"
        )
    least = torch.empty(len(ids), key.heads, key.width, dtype=torch.float32, device=ids.device)
    most = torch.empty_like(least)
    bounds_launch(key, ids, counts, least, most).run()
    return least, most


def bounds_launch(key: Rows, ids: Tensor, counts: Tensor, least: Tensor, most: Tensor) -> Launch:
    """The kernel that `key_bounds` starts."""
    strides = key.strides("key")
    return Launch(
        _bounds,
        (len(ids), key.heads),
        {
            "key": key.values,
            "ids": ids,
            "counts": counts,
            "least": least,
            "most": most,
            **{name: strides[name] for name in ("key_block", "key_head", "key_token")},
        },
        {
            "WIDTH": key.width,
            "PAD": key.pad,
            "BLOCK_SIZE": key.block_size,
            "N": 1 << (key.block_size - 1).bit_length(),
        },
    )
