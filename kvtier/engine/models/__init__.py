"""Model files, architectures and the default model.

catalog -> convert -> gguf_file                           the default model, fetched and converted once
registry -> decoder, deepseek -> layers, linear, rope …    architecture name -> model
registry -> weights -> gguf_file, families -> config      checkpoint -> named tensors, config, fingerprint
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.engine.models.base import Attention as Attention
    from kvtier.engine.models.base import CausalLM as CausalLM
    from kvtier.engine.models.config import ModelConfig as ModelConfig
    from kvtier.engine.models.registry import LoadedModel as LoadedModel
    from kvtier.engine.models.registry import load_model as load_model

__all__ = ["Attention", "CausalLM", "LoadedModel", "ModelConfig", "load_model"]

_LAZY = {
    "Attention": "kvtier.engine.models.base",
    "CausalLM": "kvtier.engine.models.base",
    "LoadedModel": "kvtier.engine.models.registry",
    "ModelConfig": "kvtier.engine.models.config",
    "load_model": "kvtier.engine.models.registry",
}


def __getattr__(name: str) -> Any:
    # Looking for the default model's files must not import torch.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
