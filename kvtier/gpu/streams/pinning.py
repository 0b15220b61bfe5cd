"""PinnedMemory: which host memory a CUDA device can reach by itself."""

import logging
import threading
from bisect import insort
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtier.gpu.streams.runs import Runs, address_of

__all__ = ["PinnedMemory"]

_log = logging.getLogger(__name__)

# CU_MEMHOSTREGISTER_...
_PORTABLE, _READ_ONLY = 1, 8


class PinnedMemory:
    """Ranges of pinned memory, in order, none inside of another. Thread-safe.

    A mapping of its own needs pinning of its own, also where another process has pinned the same memory. What cannot
    be pinned is copied all the same, more slowly; `refused` counts it.

    Args:
        register: cuMemHostRegister(address, nbytes, flags) -> error code.
        unregister: cuMemHostUnregister(address) -> error code.
    """

    def __init__(self, register: Callable[[int, int, int], int], unregister: Callable[[int], int]) -> None:
        self.refused = 0
        self._register = register
        self._unregister = unregister
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int]] = []  # start, stop
        self._starts: NDArray[np.int64] = np.empty(0, np.int64)
        self._stops = self._starts

    def pin(self, memory: memoryview) -> bool:
        """Register memory; whether it is pinned now."""
        address, flags = address_of(memory), _PORTABLE | (_READ_ONLY if memory.readonly else 0)
        status = self._register(address, memory.nbytes, flags)
        if status and memory.readonly:
            # Not every driver pins memory for reading alone; what is mapped writable here can be pinned as any other.
            status = self._register(address, memory.nbytes, _PORTABLE)
        if status:
            self.refused += 1
            _log.warning(
                "cuMemHostRegister of %d bytes, read-only %s: error %d; copies from and to them will be slower (raise "
                "the limit of locked memory, ulimit -l; some drivers pin nothing that is mapped read-only)",
                *(memory.nbytes, memory.readonly, status),
            )
            return False
        self.add(address, memory.nbytes)
        return True

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`; nothing where that had failed."""
        address = address_of(memory)
        with self._lock:
            known = (address, address + memory.nbytes) in self._ranges
            if known:
                self._ranges.remove((address, address + memory.nbytes))
                self._rebuild()
        if known:
            self._unregister(address)

    def add(self, address: int, nbytes: int) -> None:
        """Memory that was pinned when it was allocated."""
        with self._lock:
            insort(self._ranges, (address, address + nbytes))
            self._rebuild()

    def _rebuild(self) -> None:
        starts, stops = zip(*self._ranges, strict=True) if self._ranges else ((), ())
        self._starts, self._stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)

    def covers(self, runs: Runs) -> bool:
        """Whether the host side of every run is pinned."""
        with self._lock:
            starts, stops = self._starts, self._stops
        if not len(starts):
            return not len(runs)
        at = np.searchsorted(starts, runs.host, side="right") - 1
        return bool(np.all((at >= 0) & (runs.host + runs.nbytes <= stops[np.maximum(at, 0)])))
