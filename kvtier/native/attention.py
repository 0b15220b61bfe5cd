"""Paged decode attention and the steps between a decoder's matrix products on CPU, where the extension was built.

Kernels take addresses: of contiguous memory unless a stride is given, alive during the call, of the stated dtype.
`kvtier.gpu.cpu_attention` and `kvtier.gpu.cpu_kernels` check tensors and call them. Without the extension torch does
the same, slower. `KVTIER_NATIVE` chooses as for the codecs: `reference` means torch.
"""

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol, cast

from kvtier.errors import ConfigError

__all__ = [
    "DTYPE_CODES",
    "INTERFACE",
    "LANES",
    "MAX_HEAD_DIM",
    "Kernels",
    "compiled",
    "implementations",
    "kernels",
    "using",
]

log = logging.getLogger(__name__)

INTERFACE = 1
"""Changes with the signatures below; a compiled extension of another number is not used."""

DTYPE_CODES = {"float32": 0, "bfloat16": 1}

LANES = 16
"""Rows are a multiple of this many elements; halves of rotated heads, too."""

MAX_HEAD_DIM = 256


class Kernels(Protocol):
    """The extension. All calls release the GIL and use up to `threads` threads where the work is worth it.

    All arguments are integers but `eps`: addresses, and sizes in elements or (`..._bytes`) bytes.
    """

    def attend(self, *integers: int) -> None:
        """Attention of single tokens over paged KV, each over the first `length` tokens of its sequence.

        In order:

            pool, block_bytes, plane_bytes    the layer's K plane in block 0; from block to block; from K to V
            block_size, kv_heads, group       tokens of a block; KV heads; query heads of each
            head_dim, dtype, window           elements; `DTYPE_CODES`; last tokens that are seen, 0 for all
            q, q_bytes, out                   [T, heads, head_dim] with a stride over T; the result, contiguous
            count, rows, lengths, tables      R; int64 [R] each: row in q and out, context, first entry in `blocks`
            blocks                            int32: block tables, one after the other
            pieces, piece_rows, piece_starts  N; int32 [N] each: whose context, from which token on
            first_pieces, piece_tokens        int64 [R + 1]: pieces of row i are first_pieces[i] and following
            partials, threads                 float32 [N, heads, head_dim + 2] to work in

        Raises:
            TypeError, ValueError: other arguments, a dtype or head size without kernel. Nothing was computed.
        """
        ...

    def write_rows(self, *integers: int) -> None:
        """Write new K and V: pool, block_bytes, plane_bytes, block_size, kv_heads, row_bytes, k, k_bytes, v, v_bytes,
        slots, count, threads.

        slots: int64 [count], block * block_size + token inside it. k_bytes, v_bytes: stride over tokens.
        """
        ...

    def rms_norm(  # noqa: PLR0913
        self,
        x: int,
        change: int,
        weight: int,
        out: int,
        outer: int,
        inner: int,
        x_bytes: int,
        width: int,
        dtype: int,
        threads: int,
        eps: float,
        /,
    ) -> None:
        """RMS norm of `outer` (stride `x_bytes`) times `inner` rows.

        change: 0, or what is added to x in place first; contiguous.
        """
        ...

    def rotate(  # noqa: PLR0913
        self, x: int, x_bytes: int, cos: int, sin: int, count: int, heads: int, width: int, dtype: int, threads: int, /
    ) -> None:
        """Half-split RoPE in place: every head of token i by row i of cos and (signed) sin, [count, width]."""
        ...

    def silu_times(self, x: int, out: int, count: int, width: int, dtype: int, threads: int, /) -> None:
        """silu(x[:, :width]) * x[:, width:]."""
        ...


class _Compiled(Kernels, Protocol):
    INTERFACE: int

    def levels(self) -> tuple[str, ...]:
        """CPU levels that this machine can run, best last."""
        ...

    def set_level(self, level: str, /) -> None:
        """Run the kernels that were compiled for this level."""
        ...


@cache
def _load() -> _Compiled | None:
    # Not at import: the extension shares torch's OpenMP runtime where torch was imported before it.
    try:
        found = cast("_Compiled", importlib.import_module("kvtier.native._attention"))
    except ImportError:
        return None
    if found.INTERFACE != INTERFACE:
        log.warning(
            "kvtier.native._attention has interface %d, expected %d: using torch; build it again",
            found.INTERFACE,
            INTERFACE,
        )
        return None
    return found


class _Choice:
    """Which implementation runs; set on first use."""

    name: str | None = None


def implementations() -> tuple[str, ...]:
    """What this machine can run, slowest first: "reference" (torch), then the extension's CPU levels."""
    compiled = _load()
    return ("reference", *(compiled.levels() if compiled is not None else ()))


def kernels() -> Kernels | None:
    """The kernels in use; None where torch is to do it. Import torch before the first call."""
    if _Choice.name is None:
        _select(os.environ.get("KVTIER_NATIVE", "auto"))
    return None if _Choice.name == "reference" else _load()


def compiled() -> Kernels:
    """The extension, also where torch is to do it, for callers that asked `kernels` once.

    Raises:
        ConfigError: it was not built.
    """
    if _Choice.name is None:
        kernels()
    found = _load()
    if found is None:
        raise ConfigError("kvtier.native._attention was not built: install kvtier where there is a C compiler")
    return found


def _select(name: str) -> None:
    known = implementations()
    chosen = known[-1] if name == "auto" else name
    if chosen not in known:
        raise ConfigError(f"KVTIER_NATIVE={name!r}: this machine has auto, {', '.join(known)}")
    compiled = _load()
    if compiled is not None and chosen != "reference":
        compiled.set_level(chosen)
    _Choice.name = chosen


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run another implementation inside a `with` block, in the whole process: for tests and benchmarks.

    Raises:
        ConfigError: this machine does not have it.
    """
    before = _Choice.name or "auto"
    _select(name)
    try:
        yield
    finally:
        _select(before)
