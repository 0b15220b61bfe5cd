# ruff: noqa: N803, PLR0913
# (kernels: constants are in capitals; arguments are pointers and strides, for which there are no structs)
"""Products with int8 weights and 16- or 32-bit rows (W8A16): weights cross the bus as they are, one byte each.

Codes become numbers of the rows' dtype in registers, exactly, on their way into the product; a scale per output column
multiplies its sum. Few rows leave most of a device idle if each program takes whole weight rows: there the inner
dimension is split, every split writes its own float32 sums, and a second kernel adds them up in their order, so that a
product is the same each time.
"""

from typing import Any, no_type_check

import torch
from torch import Tensor

from kvtier.errors import FormatMismatch
from kvtier.gpu.kernels.combine import split_count
from kvtier.gpu.kernels.launch import Launch, ceil_div, compute_dtype, kernel, padded, tl

__all__ = ["int8_product", "product_launches"]

# Up to so many rows are one tile, and weights are read once.
_FEW_ROWS = 64
_SUM_COLUMNS = 256


@kernel
@no_type_check
def _product(
    x, weight, scales, bias, out, partial, rows, columns, inner, chunk, x_row, weight_row, out_row, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.program_id(1) * N + tl.arange(0, N)
    first, last = tl.program_id(2) * chunk, tl.minimum((tl.program_id(2) + 1) * chunk, inner)
    row_held, column_held = row < rows, column < columns
    x_at = row.to(tl.int64)[:, None] * x_row
    weight_at = column.to(tl.int64)[None, :] * weight_row
    total = tl.zeros([M, N], tl.float32)
    for begin in range(first, last, K):
        place = begin + tl.arange(0, K)
        inside = place < last
        left = tl.load(x + x_at + place[None, :], mask=row_held[:, None] & inside[None, :], other=0.0)
        codes = tl.load(weight + weight_at + place[:, None], mask=column_held[None, :] & inside[:, None], other=0)
        total = tl.dot(left.to(COMPUTE), codes.to(COMPUTE), total, input_precision="ieee")
    held = row_held[:, None] & column_held[None, :]
    if SPLIT:
        at = (tl.program_id(2).to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
        tl.store(partial + at, total, mask=held)
    else:
        result = _finished(total, scales, bias, column[None, :], column_held[None, :])
        at = row.to(tl.int64)[:, None] * out_row + column[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=held)


@kernel
@no_type_check
def _sum(
    partial, scales, bias, out, rows, columns, splits, out_row, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    held = column < columns
    total = tl.zeros([COLUMNS], tl.float32)
    for split in range(splits):
        total += tl.load(partial + (split * rows + row) * columns + column, mask=held, other=0.0)
    result = _finished(total, scales, bias, column, held)
    tl.store(out + row * out_row + column, result.to(out.dtype.element_ty), mask=held)


@kernel
@no_type_check
def _finished(total, scales, bias, column, held):
    """Sums of codes, scaled and shifted, float32."""
    result = total * tl.load(scales + column, mask=held, other=0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + column, mask=held, other=0.0).to(tl.float32)
    return result


def int8_product(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, splits: int | None = None
) -> Tensor:
    """Multiply rows by int8 weights: x @ (weight * scales).T + bias.

    Args:
        x: [T, in], float32, bfloat16 or float16; stride 1 over in.
        weight: int8 [out, in], stride 1 over in.
        scales: [out], in the dtype of `x`.
        bias: [out], likewise.
        splits: of the inner dimension, at most; None: as many as fill the device.

    Returns:
        [T, out], in the dtype of `x`; sums are float32, rounded once.

    Raises:
        FormatMismatch: tensors that do not belong together.
    """
    _check(x, weight, scales, bias)
    out = x.new_empty((len(x), len(weight)))
    for launch in product_launches(x, weight, scales, bias, out, splits):
        launch.run()
    return out


def product_launches(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, splits: int | None = None
) -> list[Launch]:
    """The kernels that `int8_product` starts."""
    (rows, inner), columns = x.shape, len(weight)
    tile, launching = _tile(x)
    programs = ceil_div(columns, tile["N"])
    if splits is None:
        splits = split_count(programs, inner, x.device) if rows <= _FEW_ROWS else 1
    steps = ceil_div(inner, tile["K"])
    chunk = ceil_div(steps, min(splits, steps)) * tile["K"]
    splits = ceil_div(inner, chunk)
    partial = x.new_empty((splits, rows, columns), dtype=torch.float32) if splits > 1 else None
    finishing = {"scales": scales, "bias": bias, "out": out, "out_row": out.stride(0), "partial": partial}
    product = Launch(
        _product,
        (ceil_div(rows, tile["M"]), programs, splits),
        {
            "x": x,
            "weight": weight,
            "rows": rows,
            "columns": columns,
            "inner": inner,
            "chunk": chunk,
            "x_row": x.stride(0),
            "weight_row": weight.stride(0),
            **finishing,
        },
        {**tile, "SPLIT": partial is not None, "COMPUTE": compute_dtype(x.dtype)},
        **launching,
    )
    if partial is None:
        return [product]
    arguments = {"rows": rows, "columns": columns, "splits": splits, **finishing}
    return [product, Launch(_sum, (rows, ceil_div(columns, _SUM_COLUMNS)), arguments, {"COLUMNS": _SUM_COLUMNS})]


def _tile(x: Tensor) -> tuple[dict[str, int], dict[str, Any]]:
    """Rows, columns and inner steps of a tile, and how its kernel is launched."""
    if x.dtype is torch.float32:  # no tensor cores: sums take the registers
        return {"M": min(padded(len(x)), 32), "N": 64, "K": 32}, {"warps": 4, "stages": 2}
    if len(x) <= _FEW_ROWS:
        return {"M": padded(len(x)), "N": 64, "K": 128}, {"warps": 4, "stages": 3}
    return {"M": 128, "N": 128, "K": 64}, {"warps": 8, "stages": 3}


def _check(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or weight.dtype != torch.int8:
        raise FormatMismatch(
            f"rows {list(x.shape)} for weights {list(weight.shape)} of {weight.dtype}: expected [T, in] and int8 "
            f"[out, in]"
        )
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise FormatMismatch(f"strides {x.stride()} of rows, {weight.stride()} of weights: expected 1 over in")
    for name, vector in (("scales", scales), ("bias", bias)):
        if vector is not None and (vector.shape != weight.shape[:1] or vector.dtype != x.dtype):
            raise FormatMismatch(
                f"{name} {list(vector.shape)} of {vector.dtype}: expected [{len(weight)}] of {x.dtype}, the rows' dtype"
            )
