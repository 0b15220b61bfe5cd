"""kvtier: KV-cache memory tiering for LLM inference engines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.api import LLM as LLM
    from kvtier.engine.params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_LAZY = {"LLM": "kvtier.api", "SamplingParams": "kvtier.engine.params"}

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # `import kvtier` stays cheap: torch is imported when the first model is.
    if name not in _LAZY:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
