"""What the kernels compute, in torch and float64: for tests and checks, never for serving."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvtier.gpu.batches import AttentionSpan
from kvtier.gpu.kernels.rows import Code, LayerKV, Rows

__all__ = ["attention", "dense_rows", "latent_attention", "weights"]


def dense_rows(rows: Rows, blocks: Sequence[int], tokens: int) -> Tensor:
    """The first `tokens` rows of a sequence, decoded: float64 [tokens, kv_heads, width]."""
    picked = torch.tensor(list(blocks), device=rows.values.device)
    stored = _decode(rows, picked).transpose(1, 2).flatten(0, 1)[:tokens]
    return stored if rows.from_rotated is None else stored @ rows.from_rotated.double()


def _decode(rows: Rows, blocks: Tensor) -> Tensor:
    values = rows.values[blocks]
    if rows.code is Code.RAW:
        return values.double()
    if rows.meta is None:
        raise ValueError(f"{rows.code.name} rows without scales")
    meta = rows.meta[blocks].double().unsqueeze(-1)
    if rows.code is Code.INT8:
        return values.view(torch.int8).double() * meta[:, :, 0]
    if rows.code is Code.FP8:
        return values.contiguous().view(torch.float8_e4m3fn).double() * meta[:, :, 0]
    return torch.cat((values & 15, values >> 4), -1).double() * meta[:, :, 0] + meta[:, :, 1]


def weights(q: Tensor, keys: Tensor, start: int, scale: float, window: int | None = None) -> Tensor:
    """Attention weights float64 [heads, T, S] of q [T, heads, width], tokens `start`.. of keys [S, kv_heads, width]."""
    group = q.shape[1] // keys.shape[1]
    product = torch.einsum("thd,shd->hts", q.double(), keys.double().repeat_interleave(group, 1)) * scale
    age = start + torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(keys), device=q.device)[None]
    hidden = (age < 0) | (age >= (math.inf if window is None else window))
    return product.masked_fill(hidden, -math.inf).softmax(-1)


def attention(
    q: Tensor, kv: LayerKV, spans: Sequence[AttentionSpan], *, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of the spans' new tokens, one span after the other: float64, like q [T, heads, width]."""
    pieces, first = [], 0
    for span in spans:
        rows = q[first : first + span.stop - span.start]
        keys, values = (dense_rows(one, span.block_ids, span.stop) for one in kv)
        got = weights(rows, keys, span.start, scale, window)
        pieces.append(torch.einsum("hts,shd->thd", got, values.repeat_interleave(q.shape[1] // values.shape[1], 1)))
        first += len(rows)
    return torch.cat(pieces)


def latent_attention(q: Tensor, cache: Tensor, spans: Sequence[AttentionSpan], *, latent: int, scale: float) -> Tensor:
    """Absorbed MLA attention, float64 [T, heads, latent], over one layer of a pool [num_blocks, block_size, width]."""
    pieces, first = [], 0
    for span in spans:
        rows = q[first : first + span.stop - span.start]
        keys = cache[torch.tensor(list(span.block_ids), device=cache.device)].flatten(0, 1)[: span.stop].double()
        got = weights(rows, keys.unsqueeze(1), span.start, scale)
        pieces.append(torch.einsum("hts,sd->thd", got, keys[:, :latent]))
        first += len(rows)
    return torch.cat(pieces)
