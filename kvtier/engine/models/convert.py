"""Write a GGUF checkpoint as a HF directory, so that later loads need no dequantisation and any HF tool can read it."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvtier.engine.models.config import ModelConfig
from kvtier.engine.models.gguf_file import GGUFWeights
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ModelError

__all__ = ["convert_gguf"]


def convert_gguf(source: Path, target: Path, on_progress: Callable[[float], None]) -> None:
    """Write the model of a GGUF file as bfloat16 safetensors, config and tokenizer files, all synced to the disk.

    Args:
        source: the GGUF file.
        target: an empty directory.
        on_progress: called with the fraction that is done, 0 to 1.

    Raises:
        ModelError: `source` is damaged, or its RoPE scaling cannot be expressed in a HF config.
        OSError: `target` cannot be written.
    """
    weights = GGUFWeights(source)
    config = _hf_config(weights.config, source)
    tokenizer = weights.tokenizer()
    tensors: dict[str, torch.Tensor] = {}
    for done, name in enumerate(weights):
        tensors[name] = weights[name].to(torch.bfloat16)
        on_progress(0.9 * done / len(weights))
    _save(tensors, target / "model.safetensors")
    (target / "tokenizer.json").write_text(tokenizer.backend.to_str(pretty=True), encoding="utf-8")
    special = dict(tokenizer.special_tokens)
    _write(target / "config.json", config | _special_ids(tokenizer))
    _write(target / "generation_config.json", _special_ids(tokenizer))
    _write(
        target / "tokenizer_config.json",
        special
        | {
            # The class that takes tokenizer.json as it is; others rebuild the pre-tokenizer in their own way.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": weights.config.max_positions,
        },
    )
    if tokenizer.chat_template is not None:
        (target / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    for path in target.iterdir():
        _sync(path)
    on_progress(1.0)


def _hf_config(config: ModelConfig, source: Path) -> dict[str, Any]:
    if config.rope_scaling is not None:
        raise ModelError(f"{source}: RoPE factors have no HF config: load the GGUF file as it is")
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {f"{name}_id": tokenizer.backend.token_to_id(text) for name, text in tokenizer.special_tokens.items()}
    eos = sorted(tokenizer.eos_ids)
    return ids | {"eos_token_id": eos[0] if len(eos) == 1 else eos}


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, f"{path.name}: {error}") from error
    # Written through a private temporary file; as readable as its neighbours from here on.
    path.chmod(path.parent.stat().st_mode & 0o666)


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
