"""Architecture name -> model class, and `load_model`, which makes a checkpoint ready to run."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from kvtier.engine.models.base import CausalLM
from kvtier.engine.models.config import ModelConfig
from kvtier.engine.models.decoder import Decoder
from kvtier.engine.models.deepseek import DeepseekModel
from kvtier.engine.models.linear import WeightFormat, packing_works
from kvtier.engine.models.weights import Weights, load_weights
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ModelError

__all__ = ["MODELS", "LoadedModel", "load_model", "preferred_dtype"]

_log = logging.getLogger(__name__)

MODELS: dict[str, Callable[[Weights, torch.dtype, torch.device, WeightFormat], CausalLM]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
    "MixtralForCausalLM": Decoder,
    "Qwen2MoeForCausalLM": Decoder,
    "Qwen3MoeForCausalLM": Decoder,
    "DeepseekV2ForCausalLM": DeepseekModel,
    "DeepseekV3ForCausalLM": DeepseekModel,
}
"""One entry per name in `families.SUPPORTED_ARCHITECTURES`."""

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


def load_model(
    source: Path | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    weights: WeightFormat = "auto",
) -> LoadedModel:
    """Load a HF model directory or a GGUF file.

    Args:
        source: the directory or file.
        dtype: of weights, activations and KV; None is `preferred_dtype`.
        device: where to run.
        weights: how matrices are kept: `auto`, in `dtype`; `int8`, rounded to 8 bits with a scale per output
            channel. Another format is another model: it never reuses the other one's KV.

    Raises:
        ModelError: the files are missing, damaged or of an unsupported model; `dtype` is not a floating type;
            `weights` is unknown.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype}: expected one of {', '.join(str(known) for known in _DTYPES)}")
    if weights not in get_args(WeightFormat):
        raise ModelError(f"weights {weights!r}: expected one of {', '.join(get_args(WeightFormat))}")
    target = torch.device(device)
    checkpoint = load_weights(Path(source))
    chosen = dtype or preferred_dtype(checkpoint.config, target)
    tokenizer = _with_reachable_ends(checkpoint.tokenizer(), checkpoint.config.vocab, source)
    model = MODELS[checkpoint.config.architecture](checkpoint, chosen, target, weights)
    name = checkpoint.fingerprint if weights == "auto" else f"{checkpoint.fingerprint}-{weights}"
    return LoadedModel(model, checkpoint.config, tokenizer, name)


def _with_reachable_ends(tokenizer: Tokenizer, vocab: int, source: Path | str) -> Tokenizer:
    """The tokenizer without end-of-sequence tokens that the model cannot choose; files name such ones."""
    beyond = sorted(token for token in tokenizer.eos_ids if not 0 <= token < vocab)
    if not beyond:
        return tokenizer
    _log.warning("%s: end-of-sequence tokens %s are ignored: the model's are 0..%d", source, beyond, vocab - 1)
    return replace(tokenizer, eos_ids=tokenizer.eos_ids - frozenset(beyond))
