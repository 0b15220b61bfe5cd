"""Copy and checksum in one pass over the bytes: xxh3_128, compiled where it can be, numpy and xxhash elsewhere."""

import importlib
from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["HEAD_BYTES", "SHORTEST", "Bytes", "available", "copy_checksums"]

Bytes: TypeAlias = memoryview | NDArray[np.uint8]
"""Contiguous memory."""

HEAD_BYTES = 64

# xxh3 hashes up to 240 bytes in other ways, which are not worth compiling.
SHORTEST = 177
"""Bytes of the shortest block that the compiled pass takes."""


class _Compiled(Protocol):
    def copy_checksums(
        self, heads: Sequence[bytes], sources: Sequence[Bytes], targets: Sequence[Bytes | None], sizes: Sequence[int], /
    ) -> list[bytes]: ...


def _load() -> _Compiled | None:
    try:
        found = importlib.import_module("kvtier.native._checksum")
    except ImportError:
        return None
    # One that an older version left in place is as good as none.
    return cast("_Compiled", found) if "copy_checksums" in vars(found) else None


_compiled = _load()


def available() -> bool:
    """Whether the compiled pass is there."""
    return _compiled is not None


def copy_checksums(
    heads: list[bytes], sources: list[Bytes], targets: list[Bytes | None], sizes: list[int]
) -> list[bytes]:
    """Copy the leading bytes of each source to its target; returns xxh3_128(head + these bytes), 16 bytes each.

    One call for the whole batch, without the GIL.

    Args:
        heads: `HEAD_BYTES` bytes each, that the checksum is bound to.
        sources: at least as long as their sizes.
        targets: writable and at least as long; None: nothing is copied.
        sizes: bytes to copy and to checksum.
    """
    if _compiled is not None and (not sizes or min(sizes) >= SHORTEST):
        return _compiled.copy_checksums(heads, sources, targets, sizes)
    return [_copy_checksum(*item) for item in zip(heads, sources, targets, sizes, strict=True)]


def _copy_checksum(head: bytes, source: Bytes, target: Bytes | None, nbytes: int) -> bytes:
    data = np.frombuffer(source, np.uint8, nbytes)
    if target is not None:
        copy = np.frombuffer(target, np.uint8, nbytes)
        np.copyto(copy, data)
        data = copy
    digest = xxhash.xxh3_128(head)
    digest.update(data.data)
    return digest.digest()
