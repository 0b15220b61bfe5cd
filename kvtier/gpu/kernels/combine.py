# ruff: noqa: N803, PLR0913
# (kernels: constants are in capitals; arguments are pointers and strides, for which there are no structs)
"""Adds up the splits of a decode, each normalised on its own, by the logarithms of their sums."""

from typing import no_type_check

import torch
from torch import Tensor

from kvtier.gpu.kernels.batch import DecodeBatch
from kvtier.gpu.kernels.launch import Launch, ceil_div, kernel, multiprocessors, padded, tl

__all__ = ["combine", "split_count"]

_COLUMNS = 128
_MAX_SPLITS = 64
# So many programs fit onto a multiprocessor and hide each other's latencies (registers of the compiled kernels allow
# it); a split of fewer tokens than that costs more than it saves.
_PROGRAMS, _LEAST_TOKENS = 4, 256


@kernel
@no_type_check
def _combine(
    partial, sums, rows, lengths, out, splits, chunk, out_row, out_head, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS_PAD: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    reach = tl.load(lengths + sequence)
    if WINDOW > 0:
        reach = tl.minimum(reach, WINDOW)
    split = tl.arange(0, SPLITS_PAD)
    held = (split * chunk < reach) & (split < splits)
    places = (sequence.to(tl.int64) * tl.num_programs(1) + head) * splits + split
    log_sums = tl.load(sums + places, mask=held, other=float("-inf"))
    weights = tl.exp2(log_sums - tl.max(log_sums, 0))
    mask = held[:, None] & (columns < WIDTH)[None, :]
    parts = tl.load(partial + places[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    row = tl.load(rows + sequence).to(tl.int64)
    tl.store(out + row * out_row + head * out_head + columns, result.to(out.dtype.element_ty), mask=columns < WIDTH)


def combine(
    partial: Tensor, sums: Tensor, batch: DecodeBatch, out: Tensor, *, chunk: int, window: int | None
) -> Launch:
    """Write out[rows] from partial float32 [B, heads, splits, width] and sums float32 [B, heads, splits].

    chunk: tokens of a split; a sequence has as many splits as its tokens (at most `window`) fill.
    """
    sequences, heads, splits, width = partial.shape
    return Launch(
        _combine,
        (sequences, heads, ceil_div(width, _COLUMNS)),
        {
            "partial": partial,
            "sums": sums,
            "rows": batch.rows,
            "lengths": batch.lengths,
            "out": out,
            "splits": splits,
            "chunk": chunk,
            "out_row": out.stride(0),
            "out_head": out.stride(1),
        },
        {
            "WIDTH": width,
            "COLUMNS": min(_COLUMNS, padded(width)),
            "SPLITS_PAD": 1 << (splits - 1).bit_length(),
            "WINDOW": window or 0,
        },
    )


def split_count(programs: int, tokens: int, device: torch.device) -> int:
    """Into how many splits to cut contexts of `tokens`, if `programs` of them run without splits."""
    wanted = _PROGRAMS * multiprocessors(device) // max(programs, 1)
    return max(1, min(wanted, ceil_div(tokens, _LEAST_TOKENS), _MAX_SPLITS))
