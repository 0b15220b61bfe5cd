"""Llama (Touvron et al., arXiv:2302.13971): eager torch over a flat ragged batch."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.engine.models.base import Attention
from kvtier.engine.models.linear import Linear, linear
from kvtier.engine.models.rope import Rotation, inverse_frequencies, rotation
from kvtier.engine.models.weights import Weights
from kvtier.layout import Layout

__all__ = ["LlamaModel"]


class _Layer(NamedTuple):
    input_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Llama decoder. Implements `kvtier.engine.models.base.CausalLM`.

    Args:
        weights: an open checkpoint; needed only while constructing.
        dtype: of weights, activations and KV: float32, bfloat16 or float16.
        device: where the weights live and `forward` runs.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self.config = weights.config
        self.dtype = dtype
        self.device = device
        self._frequencies = inverse_frequencies(self.config).to(device)
        embedding_shape = (self.config.vocab, self.config.hidden)
        with torch.inference_mode():
            self._embedding = weights.take("model.embed_tokens.weight", embedding_shape, dtype, device)
            self._layers = [self._load_layer(weights, index) for index in range(self.config.layers)]
            self._norm = weights.take("model.norm.weight", (self.config.hidden,), dtype, device)
            tied = self.config.tied
            head = self._embedding if tied else weights.take("lm_head.weight", embedding_shape, dtype, device)
            self._head = linear(head)

    @property
    def numerics(self) -> str:
        """What changes KV values without changing shapes, compute dtype included."""
        return f"{self.config.numerics};compute={_dtype_name(self.dtype)}"

    def layout(self, block_size: int) -> Layout:
        """Layout of the KV cache in this model's dtype."""
        return Layout(block_size, self.config.layer_groups(_dtype_name(self.dtype)))

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor) -> Tensor:
        """One step over T tokens: see `CausalLM.forward`. Returns float32 logits [R, vocab]."""
        hidden = functional.embedding(token_ids, self._embedding)
        turn = rotation(positions, self._frequencies, self.dtype)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, hidden, turn, attention)
            if index == last:
                # Beyond the last attention only the rows whose logits are wanted matter.
                hidden, attended = hidden[logit_rows], attended[logit_rows]
                if not len(logit_rows):
                    return hidden.new_empty((0, self.config.vocab), dtype=torch.float32)
            hidden = hidden + layer.output(attended)
            hidden = hidden + self._mlp(layer, hidden)
        return self._head(self._normed(hidden, self._norm)).float()

    def _attend(self, index: int, layer: _Layer, hidden: Tensor, turn: Rotation, attention: Attention) -> Tensor:
        config, (cos, sin) = self.config, turn
        heads, kv_heads = config.heads, config.kv_heads
        qkv = layer.qkv(self._normed(hidden, layer.input_norm)).view(len(hidden), -1, config.head_dim)
        # Q and K lie side by side, so one rotation turns both.
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        qk = qk * cos + qk.roll(config.head_dim // 2, -1) * sin
        q, k = torch.split(qk, [heads, kv_heads], dim=1)
        return attention(index, q, k, v).reshape(len(hidden), -1)

    def _mlp(self, layer: _Layer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(functional.silu(gate) * up)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        # Rounding to the model's dtype before the weight is applied is what the checkpoints were trained with.
        normed = functional.rms_norm(hidden.float(), (self.config.hidden,), None, self.config.rms_eps)
        return normed.to(self.dtype) * weight

    def _load_layer(self, weights: Weights, index: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{index}."
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(f"{prefix}{name}.weight", shape, self.dtype, self.device)

        qkv = [
            take("self_attn.q_proj", q_rows, config.hidden),
            take("self_attn.k_proj", kv_rows, config.hidden),
            take("self_attn.v_proj", kv_rows, config.hidden),
        ]
        gate_up = [take(f"mlp.{name}_proj", config.intermediate, config.hidden) for name in ("gate", "up")]
        return _Layer(
            input_norm=take("input_layernorm", config.hidden),
            qkv=linear(torch.cat(qkv)),
            output=linear(take("self_attn.o_proj", config.hidden, q_rows)),
            mlp_norm=take("post_attention_layernorm", config.hidden),
            gate_up=linear(torch.cat(gate_up)),
            down=linear(take("mlp.down_proj", config.hidden, config.intermediate)),
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
