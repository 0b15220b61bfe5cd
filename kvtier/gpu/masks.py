"""Masks that are added to attention scores before their softmax."""

import torch
from torch import Tensor

__all__ = ["causal_mask"]


def causal_mask(query_tokens: int, context: int, heads: int, like: Tensor, window: int | None = None) -> Tensor:
    """0 and -inf, [query_tokens * heads, columns >= context], for every chunk of every prefill.

    rows      r query tokens of a chunk, the last ones      a slice [-r * heads :, -n :] is the mask of a chunk
    columns   n tokens that its last one sees, the last     of r query tokens, the last of which sees n

    Args:
        query_tokens: most tokens of a chunk.
        context: most tokens that one may see.
        heads: query heads that are folded into the rows of each token.
        like: a tensor of the scores' dtype and device.
        window: tokens up to its own one that a token sees, None for all.
    """
    # A power of two: seldom rebuilt, and slices of even lengths stay aligned for CUDA kernels.
    columns = 1 << max(context - 1, 15).bit_length()
    hidden = torch.ones(query_tokens, columns, dtype=torch.bool).triu(columns - query_tokens + 1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(columns - query_tokens - window)
    mask = torch.zeros(query_tokens, columns, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(heads, 0).to(like.device)
