"""The decoder of the Llama family: eager torch over a flat ragged batch; what its members differ in is config.

Llama (Touvron et al., arXiv:2302.13971), Mistral (arXiv:2310.06825), Mixtral (arXiv:2401.04088), Qwen2 and Qwen2-MoE
(arXiv:2407.10671), Qwen3 and Qwen3-MoE (arXiv:2505.09388).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.engine.models.base import Attention
from kvtier.engine.models.config import ExpertsConfig
from kvtier.engine.models.experts import Experts, MixtureMlp, SharedExpert
from kvtier.engine.models.layers import add_rms_norm, rms_norm, rotate
from kvtier.engine.models.linear import Linear, WeightFormat, linear
from kvtier.engine.models.loader import Loader, gated_mlp
from kvtier.engine.models.rope import Rotation, inverse_frequencies, rotation
from kvtier.engine.models.weights import Weights
from kvtier.layout import Layout

__all__ = ["Decoder"]


class _HeadNorms(NamedTuple):
    q: Tensor
    k: Tensor


class _Layer(NamedTuple):
    qkv: Linear
    head_norms: _HeadNorms | None
    output: Linear
    mlp_norm: Tensor
    mlp: Linear
    next_norm: Tensor  # the next layer's first norm, or the last norm of all


class Decoder:
    """Implements `kvtier.engine.models.base.CausalLM`.

    Args:
        weights: an open checkpoint; needed only while constructing.
        dtype: of weights, activations and KV: float32, bfloat16 or float16.
        device: where the weights live and `forward` runs.
        quantize: how matrices are kept; embedding, norms and routers always are in `dtype`.
    """

    def __init__(
        self, weights: Weights, dtype: torch.dtype, device: torch.device, quantize: WeightFormat = "auto"
    ) -> None:
        self.config = config = weights.config
        self.dtype = dtype
        self.device = device
        self._quantize = quantize
        self._frequencies = inverse_frequencies(config).to(device)
        load = Loader(weights, dtype, device, quantize)
        with torch.inference_mode():
            self._embedding = load.tensor("model.embed_tokens.weight", config.vocab, config.hidden)
            self._first_norm = load.tensor("model.layers.0.input_layernorm.weight", config.hidden)
            self._layers = [self._load_layer(load, index) for index in range(config.layers)]
            if config.tied:
                self._head = linear(self._embedding, quantize=quantize)
            else:
                self._head = load.product(["lm_head"], [config.vocab], config.hidden)
        load.check_biases()

    @property
    def numerics(self) -> str:
        """What changes KV values without changing shapes, compute dtype and weight format included."""
        text = f"{self.config.numerics};compute={_dtype_name(self.dtype)}"
        return text if self._quantize == "auto" else f"{text};weights={self._quantize}"

    def layout(self, block_size: int) -> Layout:
        """Layout of the KV cache in this model's dtype."""
        return Layout(block_size, self.config.layer_groups(_dtype_name(self.dtype)))

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor) -> Tensor:
        """One step over T tokens: see `CausalLM.forward`. Returns float32 logits [R, vocab]."""
        eps = self.config.rms_eps
        hidden = functional.embedding(token_ids, self._embedding)
        normed = rms_norm(hidden, self._first_norm, eps)
        turn = rotation(positions, self._frequencies, self.dtype, self.config.rotation_scale)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, normed, turn, attention)
            if index == last:
                # Beyond the last attention only the rows whose logits are wanted matter.
                hidden, attended = hidden[logit_rows], attended[logit_rows]
                if not len(logit_rows):
                    return hidden.new_empty((0, self.config.vocab), dtype=torch.float32)
            hidden, normed = add_rms_norm(hidden, layer.output(attended), layer.mlp_norm, eps)
            hidden, normed = add_rms_norm(hidden, layer.mlp(normed), layer.next_norm, eps)
        return self._head(normed).float()

    def _attend(self, index: int, layer: _Layer, normed: Tensor, turn: Rotation, attention: Attention) -> Tensor:
        config = self.config
        heads, kv_heads = config.heads, config.kv_heads
        qkv = layer.qkv(normed).view(normed.shape[0], -1, config.head_dim)
        # Q and K lie side by side, so one rotation turns both.
        qk, v = torch.split_with_sizes(qkv, [heads + kv_heads, kv_heads], 1)
        if layer.head_norms is not None:
            q, k = torch.split_with_sizes(qk, [heads, kv_heads], 1)
            norms = layer.head_norms
            qk = torch.cat((rms_norm(q, norms.q, config.rms_eps), rms_norm(k, norms.k, config.rms_eps)), dim=1)
        q, k = torch.split_with_sizes(rotate(qk, turn), [heads, kv_heads], 1)
        return attention(index, q, k, v).reshape(normed.shape[0], -1)

    def _load_layer(self, load: Loader, index: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{index}."
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        attention = f"{prefix}self_attn."
        names = [f"{attention}{name}_proj" for name in "qkv"]
        following = f"model.layers.{index + 1}.input_layernorm" if index + 1 < config.layers else "model.norm"
        return _Layer(
            qkv=load.product(names, [q_rows, kv_rows, kv_rows], config.hidden, bias=config.qkv_bias),
            head_norms=_HeadNorms(
                load.tensor(f"{attention}q_norm.weight", config.head_dim),
                load.tensor(f"{attention}k_norm.weight", config.head_dim),
            )
            if config.qk_norm
            else None,
            output=load.product([f"{attention}o_proj"], [config.hidden], q_rows, bias=config.output_bias),
            mlp_norm=load.tensor(f"{prefix}post_attention_layernorm.weight", config.hidden),
            mlp=self._load_mlp(load, index, prefix),
            next_norm=load.tensor(f"{following}.weight", config.hidden),
        )

    def _load_mlp(self, load: Loader, index: int, prefix: str) -> Linear:
        config = self.config
        if config.experts is not None and index in config.experts.layers:
            return _mixture(load, prefix, config.experts, config.hidden)
        return gated_mlp(load, f"{prefix}mlp.", config.hidden, config.intermediate)


def _mixture(load: Loader, prefix: str, config: ExpertsConfig, hidden: int) -> MixtureMlp:
    names, width = config.names, config.intermediate
    block = f"{prefix}{names.block}."
    experts = [f"{block}experts.{expert}." for expert in range(config.count)]
    shared = None
    if config.shared_intermediate:
        shared = SharedExpert(
            gated_mlp(load, f"{block}shared_expert.", hidden, config.shared_intermediate),
            load.product([f"{block}shared_expert_gate"], [1], hidden, exact=True),
        )
    return MixtureMlp(
        load.product([f"{block}gate"], [config.count], hidden, exact=True),
        Experts(
            [load.product([f"{each}{names.gate}", f"{each}{names.up}"], [width, width], hidden) for each in experts],
            [load.product([f"{each}{names.down}"], [hidden], width) for each in experts],
        ),
        config.choices,
        normalise=config.normalise,
        shared=shared,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
