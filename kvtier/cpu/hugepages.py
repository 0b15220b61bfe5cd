"""Huge pages for memory that other processes map: copies into and out of 4 KiB pages lose a third to the TLB.

Where transparent huge pages are switched on for shared memory the kernel does it all. Most machines have them off
there, and still collapse a range on request (MADV_COLLAPSE, Linux >= 6.1), which takes some milliseconds per 2 MiB.
"""

import ctypes
import errno
import mmap
import queue
import threading

import numpy as np
from numpy.typing import NDArray

from kvtier.attach import HUGE, SharedMapping

__all__ = ["PageCollapser", "advise"]

_MADV_COLLAPSE = 25  # linux/mman.h
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(mapping: SharedMapping, switch: str) -> bool:
    """Ask for huge pages at first touch; `switch`: what the kernel's `shmem_enabled` says. False: they are off."""
    if not switch or any(off in switch for off in ("[never]", "[deny]")):
        return False
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, 0, len(mapping.array))
    except OSError:
        return False
    return True


class PageCollapser:
    """Collapses ranges of a mapping into huge pages, in a thread of its own: the bytes may be in use meanwhile.

    Args:
        array: the mapping, uint8, from a 2 MiB boundary on; anything else is left alone.
    """

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        self._address = array.ctypes.data
        self._wanted: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._seen: set[int] = set()
        self._thread: threading.Thread | None = None
        self.supported = self._address % HUGE == 0 and len(array) >= HUGE

    def want(self, offset: int, nbytes: int) -> None:
        """A range is about to be used. Returns at once."""
        if not self.supported:
            return
        first, last = offset // HUGE, min((offset + nbytes - 1) // HUGE, len(self._array) // HUGE - 1)
        fresh = [page for page in range(first, last + 1) if page not in self._seen]
        if not fresh:  # chunks come and go, their memory stays
            return
        self._seen.update(fresh)
        self._wanted.put(fresh)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtier-hugepages", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (pages := self._wanted.get()) is not None:
            for page in pages:
                if self.supported:
                    self._collapse(page * HUGE)

    def _collapse(self, offset: int) -> None:
        int(self._array[offset])  # a range without a single page is refused
        if _libc.madvise(self._address + offset, HUGE, _MADV_COLLAPSE):
            # EINVAL: this kernel cannot. Anything else is about this one range: no huge page free, or it is pinned.
            self.supported = ctypes.get_errno() != errno.EINVAL

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.supported = False
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join()
            self._thread = None
