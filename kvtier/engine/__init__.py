"""The bundled engine: continuous batching over paged KV memory. Knows other tiers only as `kvtier.hooks`.

core, async_engine        requests in, outputs out
scheduler -> plan         what each step computes; states change in request
runner -> sampler         a plan becomes tensors and tokens
text, tokenizer, models   tokens to text; weights to logits
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.engine.async_engine import AsyncEngine as AsyncEngine
    from kvtier.engine.core import Engine as Engine
    from kvtier.engine.options import EngineOptions as EngineOptions
    from kvtier.engine.outputs import EngineStats as EngineStats
    from kvtier.engine.outputs import RequestMetrics as RequestMetrics
    from kvtier.engine.outputs import RequestOutput as RequestOutput
    from kvtier.engine.params import SamplingParams as SamplingParams

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]

_LAZY = {
    "AsyncEngine": "kvtier.engine.async_engine",
    "Engine": "kvtier.engine.core",
    "EngineOptions": "kvtier.engine.options",
    "EngineStats": "kvtier.engine.outputs",
    "RequestMetrics": "kvtier.engine.outputs",
    "RequestOutput": "kvtier.engine.outputs",
    "SamplingParams": "kvtier.engine.params",
}


def __getattr__(name: str) -> Any:
    # Parameters, options and the model catalog are of use without torch, which the engine itself imports.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
