"""Anonymous memory, for a device that is host memory: pages that come with their first touch, or ahead of it."""

import ctypes
import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np

__all__ = ["anonymous", "touch"]

_MADV_POPULATE_WRITE = 23  # linux/mman.h, Linux >= 5.14; mmap has no name for it
# Between two looks at whether anybody still has the memory.
_CHUNK_BYTES = 16 << 20

# Lets go of the GIL, unlike mmap's own.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def anonymous(nbytes: int) -> mmap.mmap:
    """Zeros, in huge pages where there are any.

    The kernel zeroes pages as they are first touched, so that a large pool costs nothing at start. Zeros, because
    whatever is left in memory, read as floats, may be NaN, which no attention mask takes away.

    Raises:
        OSError, OverflowError: there is not that much.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def touch(memory: mmap.mmap, nbytes: int) -> threading.Thread:
    """Have the leading bytes' pages zeroed in a thread of its own, which leaves what is in them as it is.

    It ends early where nobody has the memory any more, or where the kernel cannot: pages then come at their first use.
    """
    thread = threading.Thread(
        target=_touch, args=(weakref.ref(memory), min(nbytes, len(memory))), name="kvtier-touch", daemon=True
    )
    thread.start()
    return thread


def _touch(held: "weakref.ref[mmap.mmap]", nbytes: int) -> None:
    for start in range(0, nbytes, _CHUNK_BYTES):
        memory = held()
        if memory is None:
            return
        pages = np.frombuffer(memory, np.uint8, min(_CHUNK_BYTES, nbytes - start), start)
        if _libc.madvise(pages.ctypes.data, pages.nbytes, _MADV_POPULATE_WRITE):
            return
        del memory, pages
