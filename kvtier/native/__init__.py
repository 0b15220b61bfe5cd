"""Hot codecs: a compiled extension where one was built, numpy everywhere else. Nothing compiles here.

`KVTIER_NATIVE` overrides the choice at import: `auto`, `reference` (numpy), or a CPU level of the extension
(`baseline`, `avx2`, `avx512`).
"""

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, cast

from kvtier.errors import ConfigError
from kvtier.native import reference
from kvtier.native.rows import INTERFACE, Codec, Kernels, Run

__all__ = ["Codec", "Kernels", "Run", "available", "implementations", "kernels", "selected", "using"]

log = logging.getLogger(__name__)


class _Compiled(Kernels, Protocol):
    """The extension module."""

    INTERFACE: int

    def levels(self) -> tuple[str, ...]:
        """CPU levels that this machine can run, best last."""
        ...

    def set_level(self, level: str, /) -> None:
        """Run the kernels that were compiled for this level."""
        ...


def _load() -> _Compiled | None:
    try:
        found = cast("_Compiled", importlib.import_module("kvtier.native._codecs"))
    except ImportError:
        return None
    if found.INTERFACE != INTERFACE:
        log.warning(
            "kvtier.native._codecs has interface %d, expected %d: using numpy; build it again",
            found.INTERFACE,
            INTERFACE,
        )
        return None
    return found


_compiled = _load()
_selected = "reference"


def available() -> bool:
    """Whether the compiled kernels are there."""
    return _compiled is not None


def implementations() -> tuple[str, ...]:
    """What this machine can run, slowest first: "reference", then the extension's CPU levels."""
    return ("reference", *(_compiled.levels() if _compiled is not None else ()))


def selected() -> str:
    """The implementation in use, one of `implementations()`."""
    return _selected


def kernels() -> Kernels:
    """The kernels in use."""
    return cast("Kernels", reference) if _selected == "reference" or _compiled is None else _compiled


def _select(name: str) -> None:
    global _selected  # noqa: PLW0603
    known = implementations()
    chosen = known[-1] if name == "auto" else name
    if chosen not in known:
        raise ConfigError(f"KVTIER_NATIVE={name!r}: this machine has auto, {', '.join(known)}")
    if _compiled is not None and chosen != "reference":
        _compiled.set_level(chosen)
    _selected = chosen


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run another implementation inside a `with` block, in the whole process: for tests and benchmarks.

    Raises:
        ConfigError: this machine does not have it.
    """
    before = _selected
    _select(name)
    try:
        yield
    finally:
        _select(before)


_select(os.environ.get("KVTIER_NATIVE", "auto"))
