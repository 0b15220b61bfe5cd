"""Readers of `config.json`: one per architecture, for what its family does differently from Llama."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.engine.models.config import (
    ExpertNames,
    ExpertsConfig,
    Fields,
    Llama3Scaling,
    ModelConfig,
    RopeScaling,
    eos_ids_from_hf,
    read_json,
)
from kvtier.engine.models.deepseek_config import deepseek_from_hf
from kvtier.engine.models.yarn import YarnScaling
from kvtier.errors import ModelError

__all__ = ["READERS", "SUPPORTED_ARCHITECTURES", "config_from_hf", "plain_decoder"]

Windows = tuple[int | None, ...]


def config_from_hf(directory: Path) -> ModelConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a HF model directory.

    Raises:
        ModelError: no such file, a damaged file, or a model that is not supported.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{directory}: no config.json: expected a directory of a HF model, or a .gguf file")
    fields = Fields(read_json(path), str(path))
    name = (fields.entries("architectures") or ["(none)"])[0]
    if name not in READERS:
        raise ModelError(f"{path}: architecture {name}: supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    if fields.values.get("quantization_config"):
        raise ModelError(
            f"{path}: quantised weights: supported are unquantised safetensors and GGUF files; "
            "to save memory, load unquantised ones with int8 weights"
        )
    return replace(READERS[name](fields), eos_ids=eos_ids_from_hf(directory))


def plain_decoder(fields: Fields, *, rope_theta: float = 10000.0, rms_eps: float = 1e-6) -> ModelConfig:
    """What all families have in common: a Llama without biases, its end tokens left open.

    Args:
        fields: of `config.json`.
        rope_theta: where the file does not say.
        rms_eps: likewise.

    Raises:
        ModelError: an entry is missing, damaged, or asks for what no family here has.
    """
    raw, origin = fields.values, fields.origin
    if fields.flag("mlp_bias"):
        raise ModelError(f"{origin}: mlp_bias = true: supported are MLPs without biases")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{origin}: hidden_act {raw['hidden_act']!r}: supported is silu")
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
    return ModelConfig(
        architecture=str(raw["architectures"][0]),
        hidden=hidden,
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // max(heads, 1)),
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        rms_eps=fields.number("rms_norm_eps", rms_eps),
        rope_theta=Fields(rope, origin).number("rope_theta", rope_theta),
        rope_scaling=_rope_scaling(rope, raw, origin),
        tied=fields.flag("tie_word_embeddings"),
        max_positions=fields.integer("max_position_embeddings", 2048),
        eos_ids=frozenset(),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _rope_scaling(rope: Mapping[str, Any], raw: Mapping[str, Any], origin: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
    if share != 1.0:
        raise ModelError(f"{origin}: partial_rotary_factor {share}: supported is 1.0")
    if kind == "default":
        return None
    fields = Fields(rope, origin)
    if kind == "yarn":
        return _yarn(fields)
    if kind != "llama3":
        raise ModelError(f"{origin}: RoPE scaling {kind!r}: supported are default, llama3 and yarn")
    return Llama3Scaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_positions=fields.integer("original_max_position_embeddings"),
    )


def _yarn(fields: Fields) -> YarnScaling:
    explicit = fields.values.get("attention_factor") is not None
    return YarnScaling(
        factor=fields.number("factor"),
        original_max_positions=fields.integer("original_max_position_embeddings"),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        mscale=fields.number("mscale", 0.0),
        mscale_all_dim=fields.number("mscale_all_dim", 0.0),
        attention_factor=fields.number("attention_factor") if explicit else None,
        truncate=fields.flag("truncate", default=True),
    )


# ---- families


def _llama(fields: Fields) -> ModelConfig:
    biased = fields.flag("attention_bias")
    return replace(plain_decoder(fields), qkv_bias=biased, output_bias=biased)


def _mistral(fields: Fields) -> ModelConfig:
    config = plain_decoder(fields)
    # Null is no window; a file that says nothing means the first Mistral's.
    window = fields.integer("sliding_window", 4096) if fields.values.get("sliding_window", 4096) else None
    return replace(config, windows=_everywhere(window, config.layers))


def _qwen2(fields: Fields) -> ModelConfig:
    config = plain_decoder(fields)
    windows = _windows(fields, config.layers, _after(fields.integer("max_window_layers", 28)))
    return replace(config, qkv_bias=True, windows=windows)


def _qwen3(fields: Fields) -> ModelConfig:
    return replace(
        _qwen2(fields), qkv_bias=fields.flag("attention_bias"), output_bias=fields.flag("attention_bias"), qk_norm=True
    )


def _mixtral(fields: Fields) -> ModelConfig:
    config = plain_decoder(fields, rope_theta=1e6, rms_eps=1e-5)
    window = fields.integer("sliding_window") if fields.values.get("sliding_window") else None
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts"),
        choices=fields.integer("num_experts_per_tok"),
        intermediate=config.intermediate,
        normalise=True,
        layers=frozenset(range(config.layers)),
        names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    )
    return replace(config, windows=_everywhere(window, config.layers), experts=experts)


def _qwen2_moe(fields: Fields) -> ModelConfig:
    config = plain_decoder(fields)
    limit = fields.integer("max_window_layers", 28)
    return replace(
        config,
        qkv_bias=fields.flag("qkv_bias", default=True),
        windows=_windows(fields, config.layers, lambda layer: layer % 2 == 0 and layer < limit),
        experts=_qwen_experts(fields, config.layers, fields.integer("shared_expert_intermediate_size")),
    )


def _qwen3_moe(fields: Fields) -> ModelConfig:
    config, biased = plain_decoder(fields), fields.flag("attention_bias")
    window = fields.integer("sliding_window") if fields.flag("use_sliding_window") else None
    return replace(
        config,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        windows=_everywhere(window, config.layers),
        experts=_qwen_experts(fields, config.layers, 0),
    )


def _deepseek(fields: Fields) -> ModelConfig:
    return deepseek_from_hf(fields, plain_decoder)


READERS: Mapping[str, Callable[[Fields], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
}
"""HF class name -> what reads its `config.json`."""

SUPPORTED_ARCHITECTURES = tuple(READERS)


# ---- what several families share


def _everywhere(window: int | None, layers: int) -> Windows:
    return () if window is None else (window,) * layers


def _after(first: int) -> Callable[[int], bool]:
    return lambda layer: layer >= first


def _windows(fields: Fields, layers: int, by_default: Callable[[int], bool]) -> Windows:
    """Qwen's: `layer_types` says which layers have one, else the family's rule does."""
    if not fields.flag("use_sliding_window"):
        return ()
    window = fields.integer("sliding_window")
    types = fields.entries("layer_types") or [
        "sliding_attention" if by_default(layer) else "full_attention" for layer in range(layers)
    ]
    unknown = set(map(str, types)) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ModelError(
            f"{fields.origin}: layer_types has {', '.join(sorted(unknown))}: supported are sliding_attention and "
            "full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _qwen_experts(fields: Fields, layers: int, shared: int) -> ExpertsConfig | None:
    step, dense = fields.integer("decoder_sparse_step", 1), set(fields.entries("mlp_only_layers"))
    if step < 1:
        raise ModelError(f"{fields.origin}: decoder_sparse_step = {step}, expected at least 1")
    sparse = frozenset(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    if not sparse:
        return None
    # Both names are in use: published checkpoints have the first one.
    name = "num_experts" if "num_experts" in fields.values else "num_local_experts"
    return ExpertsConfig(
        count=fields.integer(name),
        choices=fields.integer("num_experts_per_tok"),
        intermediate=fields.integer("moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob"),
        layers=sparse,
        shared_intermediate=shared,
    )
