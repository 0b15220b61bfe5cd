"""Architecture name -> model class, and `load_model`, which makes a checkpoint ready to run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.engine.models.base import CausalLM
from kvtier.engine.models.config import ModelConfig
from kvtier.engine.models.linear import packing_works
from kvtier.engine.models.llama import LlamaModel
from kvtier.engine.models.weights import Weights, load_weights
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ModelError

__all__ = ["MODELS", "LoadedModel", "load_model", "preferred_dtype"]

MODELS: dict[str, Callable[[Weights, torch.dtype, torch.device], CausalLM]] = {"LlamaForCausalLM": LlamaModel}
"""One entry per name in `config.SUPPORTED_ARCHITECTURES`."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Args:
        model: runs a step; holds the weights on its device.
        config: its shapes and numerics.
        tokenizer: text to tokens and back.
        fingerprint: names the weights, for `keys.Namespace.model`.
    """

    model: CausalLM
    config: ModelConfig
    tokenizer: Tokenizer
    fingerprint: str


def preferred_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The checkpoint's own dtype, but float32 on a CPU that cannot multiply in it at speed."""
    own: torch.dtype = getattr(torch, config.dtype)
    return own if device.type != "cpu" or packing_works(own) else torch.float32


def load_model(source: Path | str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> LoadedModel:
    """Load a HF model directory or a GGUF file.

    Args:
        source: the directory or file.
        dtype: of weights, activations and KV; None is `preferred_dtype`.
        device: where to run.

    Raises:
        ModelError: the files are missing, damaged or of an unsupported model; `dtype` is not a floating type.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype}: expected one of {', '.join(str(known) for known in _DTYPES)}")
    target = torch.device(device)
    weights = load_weights(Path(source))
    chosen = dtype or preferred_dtype(weights.config, target)
    tokenizer = weights.tokenizer()
    model = MODELS[weights.config.architecture](weights, chosen, target)
    return LoadedModel(model, weights.config, tokenizer, weights.fingerprint)
