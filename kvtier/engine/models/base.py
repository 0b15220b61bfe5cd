"""What a model is to its runner: the CausalLM protocol, the attention callback and its dense reference."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.engine.models.config import ModelConfig
from kvtier.layout import Layout

__all__ = ["Attention", "CausalLM", "DenseAttention"]

Attention = Callable[..., Tensor]
"""attention(layer, q [T, heads, head_dim], k [T, kv_heads, head_dim], v like k) -> [T, heads, head_dim], and in models
with MLA attention(layer, q [T, heads, latent + rope], row [T, latent + rope]) -> [T, heads, latent], q absorbed.

Called once per layer, in order, after RoPE: writes K and V, or the row, where they belong and attends. The arguments
may be views into one buffer (strided over T); the last axis is contiguous.
"""


class CausalLM(Protocol):
    """A decoder over a flat ragged batch; owns weights, no KV."""

    dtype: torch.dtype
    device: torch.device

    @property
    def config(self) -> ModelConfig:
        """Shapes and numerics."""
        ...

    @property
    def numerics(self) -> str:
        """What changes KV values without changing shapes, compute dtype included."""
        ...

    def layout(self, block_size: int) -> Layout:
        """Layout of the KV cache in this model's dtype."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor) -> Tensor:
        """One step over T tokens.

        Args:
            token_ids: int64 [T], any number of sequences one after the other.
            positions: int64 [T], each token's position in its own sequence.
            attention: writes KV and attends, once per layer.
            logit_rows: int64 [R], the rows of the batch whose next token is wanted; may be empty.

        Returns:
            float32 logits [R, vocab].
        """
        ...


class DenseAttention:
    """Causal attention over one whole sequence that starts at position 0: the reference for paged ones.

    Args:
        windows: per layer, how many tokens up to its own one a token attends to, None for all; empty: all.
    """

    def __init__(self, windows: Sequence[int | None] = ()) -> None:
        self._windows = tuple(windows)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Implements `Attention` for T tokens of one sequence, without a cache."""
        window = self._windows[layer] if self._windows else None
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        visible = None
        if window is not None:
            visible = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril().triu(1 - window)
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)
