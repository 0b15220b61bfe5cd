"""Tiny random Llamas made with transformers: the reference of this room's tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def saved_llama(directory: Path, max_shard_size: str = "1GB", **changes: Any) -> LlamaForCausalLM:
    """Make a model of 3 layers, save it in `directory` and return it."""
    torch.manual_seed(7)
    settings: dict[str, Any] = {
        "vocab_size": 320,
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
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()
    # Norm weights start as ones, which would hide a norm whose weight is not applied.
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def reference_logits(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """float32 logits [T, vocab] of one sequence, by transformers."""
    with torch.inference_mode():
        return model(ids[None]).logits[0].float()
