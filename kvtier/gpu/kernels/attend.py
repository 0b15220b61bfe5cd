# ruff: noqa: N803, PLR0913
# (kernels: constants are in capitals; arguments are pointers and strides, for which there are no structs)
"""Device code that the attention kernels share: a tile of keys, its scores, a step of the online softmax.

M    rows of a tile: query heads of one KV head, for one or more query tokens, padded
N    tokens of a tile
Scores are in units of log2, so that exp2 serves. Scales of coded rows are applied to scores and probabilities, where
there is one per column, never to the elements: codes of 8 bits and fewer are exact in bfloat16.
"""

from typing import no_type_check

from kvtier.gpu.kernels.launch import kernel, tl

__all__ = ["attend_tile", "finish", "load_queries", "load_tile", "scores", "store_rows", "token_places"]

_INT8 = tl.constexpr(1)
_FP8 = tl.constexpr(2)
_INT4 = tl.constexpr(3)


@kernel
@no_type_check
def load_queries(
    q,
    rows,
    held,
    second: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    CODE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Queries [M, PAD] that meet the first (second: the high) nibbles of keys; all of them if keys are no nibbles.

    rows: offsets of the rows, int64 [M]. held: which of them there are, bool [M].
    """
    half: tl.constexpr = WIDTH // 2 if CODE == _INT4 else WIDTH
    columns = tl.arange(0, PAD)
    at = rows[:, None] + columns[None, :] + (half if second else 0)
    return tl.load(q + at, mask=held[:, None] & (columns < half)[None, :], other=0.0).to(COMPUTE)


@kernel
@no_type_check
def token_places(table, tokens, seen, block, token, BLOCK_SIZE: tl.constexpr):
    """Offsets int64 [N] of the rows of `tokens` int32 [N], and their block ids and places inside of a block."""
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    inside = tokens % BLOCK_SIZE
    return blocks * block + inside * token, blocks, inside


@kernel
@no_type_check
def load_tile(values, places, seen, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Rows [N, PAD] as stored. What is not seen is 0: slots without a token may hold NaN."""
    columns = tl.arange(0, PAD)
    mask = seen[:, None] & (columns < WIDTH)[None, :]
    return tl.load(values + places[:, None] + columns[None, :], mask=mask, other=0)


@kernel
@no_type_check
def decoded(codes, CODE: tl.constexpr, COMPUTE: tl.constexpr):
    """Codes as numbers, up to their scale. FP8 comes out 256 times too small: e4m3 bits moved into a float16."""
    if CODE == _INT8:
        numbers = codes.to(tl.int8, bitcast=True).to(COMPUTE)
    elif CODE == _FP8:
        wide = codes.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = bits.to(tl.float16, bitcast=True).to(COMPUTE)
    else:
        numbers = codes.to(COMPUTE)
    return numbers


@kernel
@no_type_check
def load_scale(meta, places, seen, CODE: tl.constexpr):
    """Scales float32 [N] of rows whose float16 lie at `places`."""
    scale = tl.load(meta + places, mask=seen, other=0.0).to(tl.float32)
    if CODE == _FP8:
        scale = scale * 256.0
    return scale


@kernel
@no_type_check
def scores(
    q, q_high, q_sum, keys, meta, places, seen, CODE: tl.constexpr, BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr
):
    """Products float32 [M, N] of queries with keys [N, PAD] as stored. q_sum: float32 [M], sums of the queries."""
    if CODE == _INT4:
        product = tl.dot(q, tl.trans((keys & 15).to(COMPUTE)), input_precision="ieee")
        product = tl.dot(q_high, tl.trans((keys >> 4).to(COMPUTE)), product, input_precision="ieee")
        low = tl.load(meta + places + BLOCK_SIZE, mask=seen, other=0.0).to(tl.float32)
        product = product * load_scale(meta, places, seen, CODE)[None, :] + q_sum[:, None] * low[None, :]
    else:
        product = tl.dot(q, tl.trans(decoded(keys, CODE, COMPUTE)), input_precision="ieee")
        if CODE != 0:
            product = product * load_scale(meta, places, seen, CODE)[None, :]
    return product


@kernel
@no_type_check
def attend_tile(
    product,
    visible,
    values,
    meta,
    places,
    seen,
    acc,
    acc_high,
    lift,
    peak,
    total,
    CODE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One step of the online softmax (Milakov and Gimelshein, arXiv:1805.02867).

    product: scores float32 [M, N]. visible: bool [M, N]. values: V as stored [N, PAD]. State: acc float32 [M, PAD] (of
    low and high nibbles), lift float32 [M] (what every element gets from the lows), peak and total float32 [M].
    """
    product = tl.where(visible, product, float("-inf"))
    highest = tl.maximum(peak, tl.max(product, 1))
    # A row that has seen nothing yet stays at -inf, and -inf - -inf is NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(product - base[:, None])
    kept = tl.exp2(peak - base)
    total = total * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None]
    if CODE == _INT4:
        low = tl.load(meta + places + BLOCK_SIZE, mask=seen, other=0.0).to(tl.float32)
        lift = lift * kept + tl.sum(weights * low[None, :], 1)
        scaled = (weights * load_scale(meta, places, seen, CODE)[None, :]).to(COMPUTE)
        acc = tl.dot(scaled, (values & 15).to(COMPUTE), acc, input_precision="ieee")
        acc_high = tl.dot(scaled, (values >> 4).to(COMPUTE), acc_high * kept[:, None], input_precision="ieee")
    else:
        if CODE != 0:
            weights = weights * load_scale(meta, places, seen, CODE)[None, :]
        acc = tl.dot(weights.to(COMPUTE), decoded(values, CODE, COMPUTE), acc, input_precision="ieee")
    return acc, acc_high, lift, highest, total


@kernel
@no_type_check
def finish(acc, acc_high, lift, peak, total):
    """Outputs float32 [M, PAD] (two) and the logarithm (base 2) of the sum of exponentials [M]."""
    whole = tl.where(total == 0.0, 1.0, total)
    lifted = (lift / whole)[:, None]
    return acc / whole[:, None] + lifted, acc_high / whole[:, None] + lifted, peak + tl.log2(whole)


@kernel
@no_type_check
def store_rows(out, rows, held, first, second, WIDTH: tl.constexpr, PAD: tl.constexpr, CODE: tl.constexpr):
    """Write outputs [M, PAD] (of nibbles: two of them, side by side) to rows at offsets int64 [M]."""
    half: tl.constexpr = WIDTH // 2 if CODE == _INT4 else WIDTH
    columns = tl.arange(0, PAD)
    mask = held[:, None] & (columns < half)[None, :]
    at = out + rows[:, None] + columns[None, :]
    tl.store(at, first.to(out.dtype.element_ty), mask=mask)
    if CODE == _INT4:
        tl.store(at + half, second.to(out.dtype.element_ty), mask=mask)
