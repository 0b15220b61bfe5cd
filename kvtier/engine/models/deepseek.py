"""DeepSeek-V2 and V3 (arXiv:2405.04434, arXiv:2412.19437): latent attention, absorbed, and experts by group.

A token's KV is one row per layer, [latent, rope key]: the latent after its norm, the rope key after RoPE. Keys and
values are never expanded: queries go through the key half of the up-projection instead, results through the other.
Rope dimensions are put in half-split order as they are loaded, in queries and keys alike, which leaves every score as
it is and lets one rotation serve all models.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.engine.models.base import Attention
from kvtier.engine.models.deepseek_config import LATENT_EPS, DeepseekConfig, MixtureShape, Routing
from kvtier.engine.models.deepseek_routing import GroupRouter
from kvtier.engine.models.experts import Experts
from kvtier.engine.models.layers import GatedMlp, rms_norm, rotate
from kvtier.engine.models.linear import Linear, WeightFormat, linear
from kvtier.engine.models.loader import Loader, gated_mlp
from kvtier.engine.models.rope import Rotation, inverse_frequencies, rotation
from kvtier.engine.models.weights import Weights
from kvtier.errors import ModelError
from kvtier.layout import Layout

__all__ = ["DeepseekModel"]


class _Layer(NamedTuple):
    input_norm: Tensor
    inward: Linear  # hidden -> compressed queries or whole ones, latent, rope key
    queries: Linear
    latent_norm: Tensor
    keys: Tensor  # [heads, nope, kv_rank]
    values: Tensor  # [heads, kv_rank, value]
    output: Linear
    mlp_norm: Tensor
    mlp: Linear


class _LowRankQueries:
    """Compressed queries [T, query_rank] -> norm -> [T, heads * (nope + rope)]."""

    __slots__ = ("_norm", "_up")

    def __init__(self, norm: Tensor, up: Linear) -> None:
        self._norm = norm
        self._up = up

    def __call__(self, compressed: Tensor) -> Tensor:
        return self._up(rms_norm(compressed, self._norm, LATENT_EPS))


class _Mixture:
    """Routed experts, and those that every token uses."""

    __slots__ = ("_experts", "_router", "_shared")

    def __init__(self, router: GroupRouter, experts: Experts, shared: GatedMlp | None) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        routed = self._experts(x, *self._router(x))
        return routed if self._shared is None else routed + self._shared(x)


class DeepseekModel:
    """DeepSeek decoder. Implements `kvtier.engine.models.base.CausalLM`.

    It calls `attention(layer, q, row)` with q [T, heads, kv_rank + rope], absorbed, and row [T, kv_rank + rope], and
    expects [T, heads, kv_rank]: see `kvtier.gpu.latent.LatentAttention`.

    Args:
        weights: an open checkpoint; needed only while constructing.
        dtype: of weights, activations and KV: float32, bfloat16 or float16.
        device: where the weights live and `forward` runs.
        quantize: how matrices are kept; embedding, norms, routers and the up-projection of latents, which is absorbed,
            always are as they are.

    Raises:
        ModelError: a checkpoint of another family, or one that lacks a tensor.
    """

    def __init__(
        self, weights: Weights, dtype: torch.dtype, device: torch.device, quantize: WeightFormat = "auto"
    ) -> None:
        config = weights.config
        if not isinstance(config, DeepseekConfig):
            raise ModelError(f"{weights.origin}: architecture {config.architecture}: expected DeepSeek-V2 or V3")
        self.config: DeepseekConfig = config
        self.dtype = dtype
        self.device = device
        self._quantize = quantize
        self._frequencies = inverse_frequencies(config).to(device)
        load = _LayerLoader(weights, config, dtype, device, quantize)
        with torch.inference_mode():
            self._embedding = load.tensor("model.embed_tokens.weight", config.vocab, config.hidden)
            self._layers = [load.layer(index) for index in range(config.layers)]
            self._norm = load.tensor("model.norm.weight", config.hidden)
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
        config = self.config
        hidden = functional.embedding(token_ids, self._embedding)
        turn = rotation(positions, self._frequencies, self.dtype, config.rotation_scale)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = attention(index, *self._query_and_row(layer, hidden, turn))
            if index == last:
                # Beyond the last attention only the rows whose logits are wanted matter.
                hidden, attended = hidden[logit_rows], attended[logit_rows]
                if not len(logit_rows):
                    return hidden.new_empty((0, config.vocab), dtype=torch.float32)
            values = torch.bmm(attended.transpose(0, 1), layer.values).transpose(0, 1)
            hidden = hidden + layer.output(values.reshape(len(hidden), -1))
            hidden = hidden + layer.mlp(rms_norm(hidden, layer.mlp_norm, config.rms_eps))
        return self._head(rms_norm(hidden, self._norm, config.rms_eps)).float()

    def _query_and_row(self, layer: _Layer, hidden: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
        """Absorbed queries [T, heads, kv_rank + rope] and KV [T, kv_rank + rope] of the step's tokens."""
        shape, config = self.config.latent, self.config
        inward = layer.inward(rms_norm(hidden, layer.input_norm, config.rms_eps))
        compressed, latent, rope_key = inward.tensor_split((-shape.kv_rank - shape.rope, -shape.rope), dim=-1)
        row = torch.cat(
            (rms_norm(latent, layer.latent_norm, LATENT_EPS), rotate(rope_key.unsqueeze(1), turn).squeeze(1)), -1
        )
        query = layer.queries(compressed).view(len(hidden), config.heads, -1)
        nope, rope = torch.split(query, [shape.nope, shape.rope], dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), layer.keys).transpose(0, 1)
        return torch.cat((absorbed, rotate(rope, turn)), -1), row


class _LayerLoader(Loader):
    """A checkpoint's layers, fused and reordered."""

    def __init__(
        self,
        weights: Weights,
        config: DeepseekConfig,
        dtype: torch.dtype,
        device: torch.device,
        quantize: WeightFormat,
    ) -> None:
        super().__init__(weights, dtype, device, quantize)
        self._config = config

    def layer(self, index: int) -> _Layer:
        """Decoder layer `index`."""
        config, shape, prefix = self._config, self._config.latent, f"model.layers.{index}."
        attention, mixture = f"{prefix}self_attn.", config.mixture
        inward, queries = self._queries(attention)
        compress = self.tensor(f"{attention}kv_a_proj_with_mqa.weight", shape.kv_rank + shape.rope, config.hidden)
        expand = self.tensor(f"{attention}kv_b_proj.weight", config.heads * (shape.nope + shape.value), shape.kv_rank)
        keys, values = torch.split(expand.view(config.heads, -1, shape.kv_rank), [shape.nope, shape.value], dim=1)
        return _Layer(
            input_norm=self.tensor(f"{prefix}input_layernorm.weight", config.hidden),
            inward=linear(torch.cat((inward, self._half_split(compress))), quantize=self._quantize),
            queries=queries,
            latent_norm=self.tensor(f"{attention}kv_a_layernorm.weight", shape.kv_rank),
            keys=keys.contiguous(),
            values=values.transpose(1, 2).contiguous(),
            output=self.product([f"{attention}o_proj"], [config.hidden], config.heads * shape.value),
            mlp_norm=self.tensor(f"{prefix}post_attention_layernorm.weight", config.hidden),
            mlp=self._mlp(f"{prefix}mlp.", config.intermediate)
            if mixture is None or index < mixture.first
            else self._mixture(f"{prefix}mlp.", mixture),
        )

    def _queries(self, attention: str) -> tuple[Tensor, Linear]:
        """The matrix that the hidden states are multiplied by, and what makes queries of its result."""
        config, rank = self._config, self._config.latent.query_rank
        rows = config.heads * config.head_dim
        if rank is None:
            return self._by_head(self.tensor(f"{attention}q_proj.weight", rows, config.hidden)), _unchanged
        norm = self.tensor(f"{attention}q_a_layernorm.weight", rank)
        up = self._by_head(self.tensor(f"{attention}q_b_proj.weight", rows, rank))
        queries = _LowRankQueries(norm, linear(up, quantize=self._quantize))
        return self.tensor(f"{attention}q_a_proj.weight", rank, config.hidden), queries

    def _by_head(self, weight: Tensor) -> Tensor:
        heads = weight.view(self._config.heads, -1, weight.shape[-1])
        return self._half_split(heads).reshape(weight.shape)

    def _half_split(self, weight: Tensor) -> Tensor:
        """Rows [..., n + rope, in] of which the last ones make pairs of neighbours: first halves, then second ones."""
        shape = self._config.latent
        if not shape.interleaved:
            return weight
        rope = weight[..., -shape.rope :, :]
        return torch.cat((weight[..., : -shape.rope, :], rope[..., 0::2, :], rope[..., 1::2, :]), dim=-2)

    def _mlp(self, prefix: str, width: int) -> GatedMlp:
        return gated_mlp(self, prefix, self._config.hidden, width)

    def _mixture(self, prefix: str, mixture: MixtureShape) -> _Mixture:
        routing, hidden, width = mixture.routing, self._config.hidden, mixture.intermediate
        experts = [f"{prefix}experts.{at}." for at in range(routing.experts)]
        return _Mixture(
            self._router(f"{prefix}gate.", routing),
            Experts(
                [self.product([f"{each}gate_proj", f"{each}up_proj"], [width, width], hidden) for each in experts],
                [self.product([f"{each}down_proj"], [hidden], width) for each in experts],
            ),
            self._mlp(f"{prefix}shared_experts.", width * mixture.shared) if mixture.shared else None,
        )

    def _router(self, prefix: str, routing: Routing) -> GroupRouter:
        # A router computes in float32, whatever the model does.
        take = partial(self._weights.take, dtype=torch.float32, device=self._device)
        weight = take(f"{prefix}weight", (routing.experts, self._config.hidden))
        bias = take(f"{prefix}e_score_correction_bias", (routing.experts,)) if routing.corrected else None
        return GroupRouter(routing, weight, bias)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
