"""Many copies between addresses in one call: compiled where it can be, `memmove` one by one elsewhere."""

import ctypes
import importlib
import os
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["available", "copy_runs"]

# Below it a thread costs more than it saves; beyond four, memory has no more bandwidth to give.
_BYTES_PER_THREAD = 4 << 20
_MOST_THREADS = 4


class _Compiled(Protocol):
    def copy_runs(
        self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64], threads: int, /
    ) -> None: ...


def _load() -> _Compiled | None:
    try:
        found = importlib.import_module("kvtier.native._checksum")
    except ImportError:
        return None
    # One that an older version left in place is as good as none.
    return cast("_Compiled", found) if "copy_runs" in vars(found) else None


_compiled = _load()


def available() -> bool:
    """Whether the compiled call is there."""
    return _compiled is not None


def copy_runs(targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Copy `sizes[i]` bytes from address `sources[i]` to `targets[i]`, without the GIL; large batches by threads.

    Who calls it sees to it that the memory lives, and that no target overlaps anything else.

    Args:
        targets: addresses, int64 [n].
        sources: addresses, int64 [n].
        sizes: bytes, int64 [n].
    """
    if _compiled is None:
        for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, nbytes)
        return
    wanted = int(sizes.sum()) // _BYTES_PER_THREAD
    threads = 1 if wanted < 2 else min(wanted, _MOST_THREADS, len(os.sched_getaffinity(0)))
    columns = [np.ascontiguousarray(column) for column in (targets, sources, sizes)]
    _compiled.copy_runs(columns[0], columns[1], columns[2], threads)
