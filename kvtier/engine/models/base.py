"""What a model is to its runner: the CausalLM protocol, the attention callback and its dense reference."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.engine.models.config import ModelConfig
from kvtier.layout import Layout

__all__ = ["Attention", "CausalLM", "DenseAttention"]

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attention(layer, q [T, heads, head_dim], k [T, kv_heads, head_dim], v like k) -> [T, heads, head_dim].

Called once per layer, in order, after RoPE: writes K and V where they belong and attends. The arguments
may be views into one buffer (strided over T); head_dim is contiguous.
"""


class CausalLM(Protocol):
    """A decoder over a flat ragged batch; owns weights, no KV."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

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
    """Causal attention over one whole sequence that starts at position 0: the reference for paged ones."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Implements `Attention` for T tokens of one sequence, without a cache."""
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)
