"""kvtier: KV-cache memory tiering for LLM inference engines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.api import LLM as LLM
    from kvtier.api import AsyncLLM as AsyncLLM
    from kvtier.engine.params import SamplingParams as SamplingParams
    from kvtier.hints import RequestHints as RequestHints

__version__ = "0.1.0"

_LAZY = {
    "LLM": "kvtier.api",
    "AsyncLLM": "kvtier.api",
    "RequestHints": "kvtier.hints",
    "SamplingParams": "kvtier.engine.params",
}

__all__ = ["LLM", "AsyncLLM", "RequestHints", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # `import kvtier` stays cheap: torch is imported when the first model is.
    if name not in _LAZY:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
