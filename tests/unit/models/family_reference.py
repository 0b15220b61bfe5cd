"""Tiny random models of every family, made with transformers: what ours are compared with."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 257

CLASSES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


class Case(NamedTuple):
    family: str
    changes: dict[str, Any]


QWEN_EXPERTS = {"num_experts": 5, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
QWEN2_MOE = QWEN_EXPERTS | {"shared_expert_intermediate_size": 40}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 16.0,
}
LATE_WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
EVEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 28}
LISTED_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

CASES = {
    "llama-biased": Case("llama", {"attention_bias": True}),
    "mistral": Case("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": Case("mistral", {"sliding_window": 17, "tie_word_embeddings": True}),
    "mistral-window-1": Case("mistral", {"sliding_window": 1}),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": Case("qwen2", {"rope_parameters": YARN}),
    "qwen2-late-windows": Case("qwen2", LATE_WINDOWS),
    "qwen2-listed-windows": Case("qwen2", LISTED_WINDOWS | {"num_key_value_heads": 6}),
    "qwen3": Case("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biased-windows": Case("qwen3", {"head_dim": 8, "attention_bias": True} | LATE_WINDOWS),
    "mixtral": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 12}),
    "qwen2_moe": Case("qwen2_moe", QWEN2_MOE),
    "qwen2_moe-some-layers": Case("qwen2_moe", QWEN2_MOE | EVEN_WINDOWS | {"decoder_sparse_step": 2}),
    "qwen2_moe-unbiased": Case(
        "qwen2_moe", QWEN2_MOE | {"mlp_only_layers": [0], "norm_topk_prob": True, "qkv_bias": False}
    ),
    "qwen3_moe": Case("qwen3_moe", QWEN_EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-window": Case(
        "qwen3_moe", QWEN_EXPERTS | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 14}
    ),
}


def saved(directory: Path, case: Case) -> PreTrainedModel:
    """Make a model of 3 layers, save it in `directory` and return it."""
    torch.manual_seed(7)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    make_config, make_model = CLASSES[case.family]
    model: PreTrainedModel = make_model(make_config(**(settings | case.changes))).eval()
    # As they start, norms are ones and biases zeros, which would hide that they are not applied.
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith(".bias"):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    model.save_pretrained(directory)
    return model


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """float32 logits [T, vocab] of one sequence, without a cache."""
    with torch.inference_mode():
        return model(ids[None], use_cache=False).logits[0].float()
