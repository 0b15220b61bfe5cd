"""DeepSeek-V2 and V3: their `config.json` as data. Knows no torch."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvtier.engine.models.config import Fields, ModelConfig
from kvtier.engine.models.yarn import YarnScaling
from kvtier.errors import ModelError
from kvtier.layout import GroupKind, LayerGroup

__all__ = ["LATENT_EPS", "DeepseekConfig", "LatentShape", "MixtureShape", "Routing", "deepseek_from_hf"]

# Of the norms inside attention; a constant of the reference implementation, whatever `rms_norm_eps` says.
LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Widths of multi-head latent attention.

    Args:
        query_rank: of the compressed query, None where queries are projected at once.
        kv_rank: of the latent, the compressed keys and values.
        nope: of a head's query and key, without position.
        rope: of a head's query and the shared key, with position.
        value: of a head's value.
        interleaved: the checkpoint's rope pairs are neighbours.
    """

    query_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool

    def __post_init__(self) -> None:
        widths = {"kv_lora_rank": self.kv_rank, "qk_nope_head_dim": self.nope, "v_head_dim": self.value}
        for name, width in widths.items():
            if width < 1:
                raise ModelError(f"model config: {name} = {width}, expected at least 1")
        if self.query_rank is not None and self.query_rank < 1:
            raise ModelError(f"model config: q_lora_rank = {self.query_rank}, expected at least 1, or null")
        if self.rope < 2 or self.rope % 2:
            raise ModelError(
                f"model config: qk_rope_head_dim = {self.rope}, expected an even number (RoPE turns pairs)"
            )


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen and weighed.

    Args:
        experts: routed experts of a layer.
        chosen: experts per token.
        scoring: what makes scores of logits.
        groups: equal runs of experts, of which a token may use some.
        kept_groups: how many; equal to `groups` for no limit.
        votes: a group counts as much as the sum of its best so many scores.
        normalise: a token's weights sum to 1 before they are scaled.
        scale: of all weights.
        corrected: a trained bias is added to the scores to choose by.
    """

    experts: int
    chosen: int
    scoring: Literal["softmax", "sigmoid"]
    groups: int
    kept_groups: int
    votes: int
    normalise: bool
    scale: float
    corrected: bool

    def __post_init__(self) -> None:
        if self.groups < 1 or self.experts < 1 or self.experts % self.groups:
            raise ModelError(f"routing: {self.experts} experts in {self.groups} groups, expected groups of one size")
        size = self.experts // self.groups
        if not 1 <= self.kept_groups <= self.groups or not 1 <= self.chosen <= self.kept_groups * size:
            raise ModelError(
                f"routing: {self.chosen} experts of {self.kept_groups} groups, expected 1 to {self.groups} groups and "
                f"no more experts than they have ({size} each)"
            )
        if not 1 <= self.votes <= size:
            raise ModelError(f"routing: {self.votes} votes in groups of {size} experts, expected 1 to {size}")


class MixtureShape(NamedTuple):
    """Layers with experts. first: of them. intermediate: width of one expert. shared: experts that all tokens use."""

    first: int
    intermediate: int
    shared: int
    routing: Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """Shapes and numerics of a DeepSeek decoder: `ModelConfig`, with head_dim and kv_heads those of expanded keys.

    Args:
        latent: widths of latent attention.
        mixture: its experts; None for dense layers only.
    """

    latent: LatentShape
    mixture: MixtureShape | None

    @property
    def routed(self) -> bool:
        """See `ModelConfig.routed`."""
        return self.mixture is not None and self.mixture.first < self.layers

    @property
    def rope_dim(self) -> int:
        """Elements of a head that RoPE turns."""
        return self.latent.rope

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by before their softmax."""
        plain: float = self.head_dim**-0.5
        return plain * self.rope_scaling.score_scale if isinstance(self.rope_scaling, YarnScaling) else plain

    @property
    def numerics(self) -> str:
        """What changes KV values without changing shapes; goes into `keys.Namespace.numerics`."""
        # With slots, `dataclass` makes another class than the one that super() means.
        plain = super(DeepseekConfig, self).numerics
        return f"{plain};latent={self.latent!r};mixture={self.mixture!r}"

    @property
    def block_params(self) -> int:
        """Weights that every token passes through: all layers' matrices, without embedding and head."""
        shape, hidden = self.latent, self.hidden
        queries = self.heads * (shape.nope + shape.rope)
        rank = shape.query_rank
        per_layer = hidden * queries if rank is None else rank * (hidden + queries)
        per_layer += hidden * (shape.kv_rank + shape.rope)
        per_layer += self.heads * (shape.kv_rank * (shape.nope + shape.value) + shape.value * hidden)
        dense = 3 * hidden * self.intermediate
        if self.mixture is None:
            return self.layers * (per_layer + dense)
        first, intermediate, shared, routing = self.mixture
        sparse = hidden * (routing.experts + 3 * intermediate * (routing.chosen + shared))
        return self.layers * per_layer + first * dense + (self.layers - first) * sparse

    @property
    def pair_work(self) -> int:
        """Multiplications of attention for one token and one that it attends to, in all layers: absorbed."""
        return self.layers * self.heads * (2 * self.latent.kv_rank + self.latent.rope)

    def layer_groups(self, dtype: str) -> tuple[LayerGroup, ...]:
        """Layer groups of the KV cache, for KV stored as `dtype`: latents and rope keys, one row per token."""
        shape, layers = self.latent, tuple(range(self.layers))
        return (LayerGroup(GroupKind.MLA, layers, 1, 1, shape.kv_rank, rope_dim=shape.rope, dtype=dtype),)


# What HF's configuration classes fill in for entries that a file leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    },
    "DeepseekV3ForCausalLM": {
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
    },
}


class _Method(NamedTuple):
    limited: bool
    votes: int
    corrected: bool


_METHODS = {
    "greedy": _Method(limited=False, votes=1, corrected=False),
    "group_limited_greedy": _Method(limited=True, votes=1, corrected=False),
    "noaux_tc": _Method(limited=True, votes=2, corrected=True),
}


def _latent_shape(fields: Fields) -> LatentShape:
    # Null is no compression of queries; a file that says nothing is damaged.
    whole = fields.values.get("q_lora_rank", 0) is None
    return LatentShape(
        query_rank=None if whole else fields.integer("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        nope=fields.integer("qk_nope_head_dim"),
        rope=fields.integer("qk_rope_head_dim"),
        value=fields.integer("v_head_dim"),
        interleaved=fields.flag("rope_interleave", default=True),
    )


def _mixture_shape(fields: Fields) -> MixtureShape | None:
    raw, first = fields.values, fields.integer("first_k_dense_replace")
    if raw.get("n_routed_experts") is None or first >= fields.integer("num_hidden_layers"):
        return None
    if fields.integer("moe_layer_freq", 1) != 1:
        raise ModelError(f"{fields.origin}: moe_layer_freq = {raw['moe_layer_freq']}: supported is 1")
    method, scoring = _METHODS.get(str(raw["topk_method"])), raw["scoring_func"]
    if method is None or scoring not in ("softmax", "sigmoid"):
        raise ModelError(
            f"{fields.origin}: topk_method {raw['topk_method']!r} with scoring_func {scoring!r}: supported are "
            f"{', '.join(_METHODS)}, with softmax or sigmoid"
        )
    groups = fields.integer("n_group", 1) if method.limited else 1
    return MixtureShape(
        first=first,
        intermediate=fields.integer("moe_intermediate_size"),
        shared=fields.integer("n_shared_experts", 0),
        routing=Routing(
            experts=fields.integer("n_routed_experts"),
            chosen=fields.integer("num_experts_per_tok"),
            scoring=scoring,
            groups=groups,
            kept_groups=fields.integer("topk_group", groups) if method.limited else 1,
            votes=method.votes,
            normalise=fields.flag("norm_topk_prob"),
            scale=fields.number("routed_scaling_factor"),
            corrected=method.corrected,
        ),
    )


def deepseek_from_hf(fields: Fields, plain_decoder: Callable[[Fields], ModelConfig]) -> DeepseekConfig:
    """Read the `config.json` of a DeepSeek-V2 or V3 model; its end tokens are left open.

    Args:
        fields: its entries; the architecture is one of the two.
        plain_decoder: reads what these models have in common with all others.

    Raises:
        ModelError: an entry is missing, damaged, or asks for what is not supported.
    """
    defaults, raw = _DEFAULTS[fields.values["architectures"][0]], fields.values
    left_out = {name: value for name, value in defaults.items() if raw.get(name) is None}
    fields = Fields({**raw, **left_out}, fields.origin)
    if fields.flag("attention_bias"):
        raise ModelError(f"{fields.origin}: attention_bias = true: supported for DeepSeek are models without biases")
    if fields.flag("norm_topk_prob") and not defaults["norm_topk_prob"]:
        # The reference implementation then leaves out `routed_scaling_factor`, transformers the normalisation.
        raise ModelError(f"{fields.origin}: norm_topk_prob = true: supported for DeepSeek-V2 is false")
    latent, mixture = _latent_shape(fields), _mixture_shape(fields)
    # What files say of KV heads and their width is not about what is cached.
    expanded = {"num_key_value_heads": None, "head_dim": latent.nope + latent.rope}
    plain = plain_decoder(Fields({**fields.values, **expanded}, fields.origin))
    entries: dict[str, Any] = {entry.name: getattr(plain, entry.name) for entry in dataclasses.fields(plain)}
    return DeepseekConfig(**entries, latent=latent, mixture=mixture)
