"""Copy and checksum in one pass over the bytes: xxh3_128, compiled where it can be, numpy and xxhash elsewhere."""

import importlib
from typing import Protocol, cast

import numpy as np
import xxhash

__all__ = ["HEAD_BYTES", "available", "copy_checksum"]

HEAD_BYTES = 64

# xxh3 hashes up to 240 bytes in other ways, which are not worth compiling.
_SHORTEST = 177


class _Compiled(Protocol):
    def copy_checksum(self, head: bytes, source: memoryview, target: memoryview | None, /) -> bytes: ...


def _load() -> _Compiled | None:
    try:
        return cast("_Compiled", importlib.import_module("kvtier.native._checksum"))
    except ImportError:
        return None


_compiled = _load()


def available() -> bool:
    """Whether the compiled pass is there."""
    return _compiled is not None


def copy_checksum(head: bytes, source: memoryview, target: memoryview | None = None) -> bytes:
    """Copy `source` into the beginning of `target`; returns xxh3_128(head + source), 16 bytes. Without the GIL.

    Args:
        head: `HEAD_BYTES` bytes that the checksum is bound to.
        source: contiguous bytes.
        target: writable and at least as long; None: nothing is copied.
    """
    if _compiled is not None and source.nbytes >= _SHORTEST:
        return _compiled.copy_checksum(head, source, target)
    if target is not None:
        np.copyto(np.frombuffer(target, np.uint8, source.nbytes), np.frombuffer(source, np.uint8))
        source = target[: source.nbytes]
    digest = xxhash.xxh3_128(head)
    digest.update(source)
    return digest.digest()
