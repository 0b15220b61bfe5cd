# ruff: noqa: N803, PLR0913
# (kernels: constants are in capitals; arguments are pointers and strides, for which there are no structs)
"""New K and V into a paged pool, coded on the way: one launch per layer, one program per token.

The codes are those of `kvtier.native.rows`: scales are the nearest float16, or the next where a code would pass its
limit; rounding is to even. FP8 is coded by integer operations, which every device has. A row with a value that is not
finite gets a scale that is not: it decodes to what it was, NaN or infinity, and only in its own token and head.
"""

from typing import Any, no_type_check

import torch
from torch import Tensor

from kvtier.errors import FormatMismatch
from kvtier.gpu.kernels.launch import Launch, kernel, tl
from kvtier.gpu.kernels.rows import Code, LayerKV, Rows, raw_rows

__all__ = ["write_kv", "write_latent", "write_launch"]


@kernel
@no_type_check
def _to_even(x):
    # The nearest integer of |x| < 2**22: what is below 1 does not fit into the mantissa any more.
    return (x + 12582912.0) - 12582912.0


@kernel
@no_type_check
def _half_scale(span, top: tl.constexpr, room: tl.constexpr):
    """Steps float32 that are float16 numbers, for codes up to `top`, and their inverses."""
    half = tl.div_rn(span, tl.full(span.shape, top, tl.float32)).to(tl.float16)
    short = half.to(tl.float32) * room < span
    half = (half.to(tl.int16, bitcast=True) + short.to(tl.int16)).to(tl.float16, bitcast=True)
    wide = half.to(tl.float32)
    inverse = tl.div_rn(tl.full(span.shape, 1.0, tl.float32), tl.where(wide > 0, wide, 1.0))
    return half, tl.where(wide > 0, inverse, 0.0)


@kernel
@no_type_check
def _fp8_bits(x):
    """float8_e4m3fn of float32, as uint8; rounds to nearest even, |x| at most 460."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.abs(x)
    kept = magnitude.to(tl.int32, bitcast=True)
    normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - 960
    # Below the smallest normal, 2**-6, codes count steps of 2**-9: the last bit of a float32 in [2**14, 2**15).
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@kernel
@no_type_check
def _write(
    source, row, stride, codes, at, code_head, meta, meta_at, meta_head, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    WIDTH: tl.constexpr, PAD: tl.constexpr, CODE: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """One token's rows, one per head, into their slot."""
    heads, columns = tl.arange(0, HEADS_PAD).to(tl.int64), tl.arange(0, PAD)
    held = heads < HEADS
    half: tl.constexpr = WIDTH // 2 if CODE == 3 else WIDTH
    mask = held[:, None] & (columns < half)[None, :]
    load_at = source + row + heads[:, None] * stride + columns[None, :]
    store_at = codes + at + (heads * code_head)[:, None] + columns[None, :]
    x = tl.load(load_at, mask=mask, other=0.0)
    if CODE == 0:
        tl.store(store_at, x, mask=mask)
    else:
        x = x.to(tl.float32)
        scale_at = meta + meta_at + heads * meta_head
        if CODE == 3:
            high = tl.load(load_at + half, mask=mask, other=0.0).to(tl.float32)
            far = float("inf")
            least = tl.minimum(tl.min(tl.where(mask, x, far), 1), tl.min(tl.where(mask, high, far), 1))
            most = tl.maximum(tl.max(tl.where(mask, x, -far), 1), tl.max(tl.where(mask, high, -far), 1))
            # Adding zero turns -0 into 0; the heads beyond the last one have no elements.
            low = (tl.where(held, least, 0.0) + 0.0).to(tl.float16)
            wide = low.to(tl.float32)
            scale, inverse = _half_scale(tl.maximum(tl.where(held, most, 0.0) - wide, 0.0), 15.0, 15.49)
            first = _to_even(tl.clamp((x - wide[:, None]) * inverse[:, None], 0.0, 15.0)).to(tl.uint8)
            second = _to_even(tl.clamp((high - wide[:, None]) * inverse[:, None], 0.0, 15.0)).to(tl.uint8)
            tl.store(store_at, first | (second << 4), mask=mask)
            tl.store(scale_at + BLOCK_SIZE, low, mask=held)
        elif CODE == 2:
            scale, inverse = _half_scale(tl.max(tl.abs(x), 1), 448.0, 460.0)
            tl.store(store_at, _fp8_bits(x * inverse[:, None]), mask=mask)
        else:
            scale, inverse = _half_scale(tl.max(tl.abs(x), 1), 127.0, 127.49)
            tl.store(store_at, _to_even(x * inverse[:, None]).to(tl.int8).to(tl.uint8, bitcast=True), mask=mask)
        tl.store(scale_at, scale, mask=held)


@kernel
@no_type_check
def _write_kv(
    k, v, slots, key, key_meta, value, value_meta, k_row, k_head, v_row, v_head, key_block, key_head, key_token,
    key_meta_block, key_meta_head, value_block, value_head, value_token, value_meta_block, value_meta_head,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_CODE: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_CODE: tl.constexpr, VALUE_PAD: tl.constexpr,
    PLANES: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, inside = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    _write(
        k, token * k_row, k_head, key, block * key_block + inside * key_token, key_head, key_meta,
        block * key_meta_block + inside, key_meta_head, HEADS, HEADS_PAD, WIDTH, KEY_PAD, KEY_CODE, BLOCK_SIZE
    )  # fmt: skip
    if PLANES == 2:
        _write(
            v, token * v_row, v_head, value, block * value_block + inside * value_token, value_head, value_meta,
            block * value_meta_block + inside, value_meta_head, HEADS, HEADS_PAD, WIDTH, VALUE_PAD, VALUE_CODE,
            BLOCK_SIZE
        )  # fmt: skip


def write_kv(k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
    """Write K and V of new tokens into one layer of a pool.

    Args:
        k: [T, kv_heads, width], a float; for raw rows in the pool's dtype. Any strides but over width.
        v: like k.
        kv: where to.
        slots: int64 [T], block id times block size plus place in the block; a negative one is skipped.

    Raises:
        FormatMismatch: tensors that do not belong together. Nothing was written.
    """
    for x, rows in ((k, kv.key), (v, kv.value)):
        _check(x, rows, slots)
    write_launch(_rotated(k, kv.key), _rotated(v, kv.value), kv, slots).run()


def write_latent(row: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write latent rows [T, width] of new tokens into one layer of an MLA pool [num_blocks, block_size, width].

    Raises:
        FormatMismatch: tensors that do not belong together. Nothing was written.
    """
    rows = raw_rows(cache.unsqueeze(1))
    _check(row.unsqueeze(1), rows, slots)
    write_launch(row.unsqueeze(1), None, LayerKV(rows, rows), slots).run()


def write_launch(k: Tensor, v: Tensor | None, kv: LayerKV, slots: Tensor) -> Launch:
    """The kernel that `write_kv` starts, for K and V that are rotated already; without V, K alone."""
    heads = kv.key.heads
    arguments: dict[str, Any] = {
        "k": k,
        "v": v,
        "slots": slots,
        "key": kv.key.values,
        "key_meta": kv.key.meta,
        "value": kv.value.values,
        "value_meta": kv.value.meta,
        "k_row": k.stride(0),
        "k_head": k.stride(1),
        "v_row": 0 if v is None else v.stride(0),
        "v_head": 0 if v is None else v.stride(1),
        **kv.key.strides("key"),
        **kv.value.strides("value"),
    }
    return Launch(
        _write_kv,
        (len(slots),),
        arguments,
        {
            "HEADS": heads,
            "HEADS_PAD": 1 << (heads - 1).bit_length(),
            "WIDTH": kv.key.width,
            "BLOCK_SIZE": kv.key.block_size,
            "KEY_CODE": int(kv.key.code),
            "KEY_PAD": kv.key.pad,
            "VALUE_CODE": int(kv.value.code),
            "VALUE_PAD": kv.value.pad,
            "PLANES": 1 if v is None else 2,
        },
        # A code is a product, rounded, and then rounded to an integer by a sum: at once, ties would go another way.
        fused=False,
    )


def _rotated(x: Tensor, rows: Rows) -> Tensor:
    return x if rows.to_rotated is None else torch.matmul(x.float(), rows.to_rotated)


def _check(x: Tensor, rows: Rows, slots: Tensor) -> None:
    if x.shape != (len(slots), rows.heads, rows.width) or x.stride(2) != 1 or slots.dtype != torch.int64:
        raise FormatMismatch(
            f"{list(x.shape)} of strides {list(x.stride())} for slots {list(slots.shape)} {slots.dtype}: expected "
            f"[slots, {rows.heads}, {rows.width}] with stride 1 over width, and int64 slots"
        )
    if rows.code is Code.RAW and x.dtype != rows.values.dtype:
        raise FormatMismatch(f"new KV of {x.dtype} for a raw pool of {rows.values.dtype}")
    if not x.device == rows.values.device == slots.device:
        raise FormatMismatch(f"new KV on {x.device}, pool on {rows.values.device}, slots on {slots.device}")
