"""Small models as files: a Llama with random weights, and LoRA adapters for it. Weights large enough that greedy
outputs differ from prompt to prompt and have no ties.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 512
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS = 128, 4, 2, 32, 3
_SPREAD = 0.3
_RANK = 8
BLOCK_BYTES = 32 * _LAYERS * 2 * _KV_HEADS * _HEAD_DIM * 4
"""Of 32 tokens, fp32."""


def save_llama(path: Path, seed: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=2048,
        initializer_range=_SPREAD,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def save_adapter(path: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * _SPREAD

    sizes = {"q_proj": _HEADS * _HEAD_DIM, "v_proj": _KV_HEADS * _HEAD_DIM}
    tensors = {}
    for layer in range(_LAYERS):
        for module, size in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = matrix(_RANK, _HIDDEN)
            tensors[f"{name}.lora_B.weight"] = matrix(size, _RANK)
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": sorted(sizes),
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path
