"""One load of each model for all blocks: it takes longer than all that the pages do with it."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["loading_once"]


def loading_once() -> Callable[..., Any]:
    """`load_model`, which keeps what it has loaded: weights are read and never written."""
    from kvtier.engine.models import load_model

    kept = cache(load_model)
    return lambda source, *options: kept(str(Path(source).resolve()), *options)
