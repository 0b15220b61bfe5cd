"""Tiny random DeepSeeks made with transformers: the reference of the tests of latent attention."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

KINDS = {
    "v2-lite": (2, {"q_lora_rank": None, "topk_method": "greedy"}),
    "v2": (2, {"q_lora_rank": 20, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}),
    "v3": (3, {"q_lora_rank": 20}),
    "v3-whole-queries": (3, {"q_lora_rank": None, "norm_topk_prob": False, "n_shared_experts": 1}),
}
"""Name -> version, and what differs from the settings below."""

_SETTINGS: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rope_parameters": YARN,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_CLASSES = {2: (DeepseekV2Config, DeepseekV2ForCausalLM), 3: (DeepseekV3Config, DeepseekV3ForCausalLM)}


def saved_deepseek(directory: Path, kind: str, **changes: Any) -> PreTrainedModel:
    """Make a model of 3 layers, the first of them dense, save it in `directory` and return it."""
    torch.manual_seed(7)
    version, differences = KINDS[kind]
    config, model_class = _CLASSES[version]
    model = model_class(config(**(_SETTINGS | differences | changes))).eval()
    # Norm weights start as ones, routers and their biases as zeros, which would hide whether they are applied.
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("gate.weight"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif name.endswith("e_score_correction_bias"):
            torch.nn.init.uniform_(parameter, -0.2, 0.2)
    model.save_pretrained(directory)
    return model


def reference_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """float32 logits [T, vocab] of one sequence, by transformers."""
    with torch.inference_mode():
        return model(ids[None]).logits[0].float()


class DenseLatentAttention:
    """Attention to the latents of one whole sequence that starts at position 0, by the definition."""

    def __init__(self, latent: int, scale: float) -> None:
        self.latent = latent
        self.scale = scale

    def __call__(self, layer: int, q: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("thd,sd->hts", q, row) * self.scale
        hidden = torch.ones(len(row), len(row), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hts,sd->thd", shares, row[:, : self.latent])
