"""Memory that other processes can map: one anonymous file (memfd) per region."""

import fcntl
import logging
import mmap
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np

from kvtier.attach import SharedMapping
from kvtier.cpu.hugepages import PageCollapser, advise
from kvtier.errors import CapacityError, TierUnavailable
from kvtier.layout import Span
from kvtier.tiers import RegionShare

__all__ = ["PAGE", "MemoryRegion", "round_up"]

PAGE = 4096

_log = logging.getLogger(__name__)
_ids = count()
_SHMEM_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, Linux >= 5.1; Python 3.11's fcntl has no name for it


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """The smallest multiple of `unit` that holds `nbytes`."""
    return -(-nbytes // unit) * unit


class MemoryRegion:
    """Zeroed shared memory of a fixed size, mapped writable here.

    Pages come into being at first touch, which happens inside copies that have let go of the GIL. Views keep the
    mapping alive after `close`.

    Args:
        nbytes: size, a multiple of 4096.
        name: shows in /proc/<pid>/maps.
        writable: whether other processes may write. If not, the kernel refuses, from the first `share` on, every
            further writable mapping and every write through the descriptor, in this process too.

    Raises:
        CapacityError: no size this machine can have.
        TierUnavailable: the kernel refuses the memory.
    """

    def __init__(self, nbytes: int, *, name: str, writable: bool) -> None:
        limit = _memory_limit()
        if not (PAGE <= nbytes <= limit) or nbytes % PAGE:
            raise CapacityError(
                f"{name}: {nbytes} bytes of memory: expected a multiple of {PAGE} up to this machine's {limit}"
            )
        self.id = next(_ids)
        self.nbytes = nbytes
        self.writable = writable
        try:
            self._fd = os.memfd_create(f"kvtier-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._map = self._build(name)
        except OSError as error:
            raise TierUnavailable(f"{name}: cannot map {nbytes} bytes of shared memory: {error}") from error
        self.array = self._map.array
        self._memory = self.array.data
        self.hugepages = advise(self._map, _SHMEM_SWITCH.read_text() if _SHMEM_SWITCH.is_file() else "")
        self._collapser = PageCollapser(self.array)
        self._sealed = False
        self._closed = False

    def _build(self, name: str) -> SharedMapping:
        try:
            os.ftruncate(self._fd, self.nbytes)
            mapping = SharedMapping(self._fd, self.nbytes, writable=True)
            # A peer that could shrink the file would make every reader die of SIGBUS.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        except OSError:
            os.close(self._fd)
            raise
        _log.debug("%s: mapped %d bytes as region %d", name, self.nbytes, self.id)
        return mapping

    def expect(self, offset: int, nbytes: int) -> None:
        """A range is about to be used for the first time: it gets huge pages where that can be had. Returns at once.

        Not MFD_HUGETLB: where a container's quota of such pages is smaller than its reservation, the first touch of a
        page kills the process (SIGBUS) instead of failing the mapping.
        """
        if not self.hugepages:
            self._collapser.want(offset, nbytes)

    def discard(self, offset: int, nbytes: int) -> bool:
        """Give whole pages back to the system; they are zero when they are next touched.

        Returns:
            Whether the system took them: it does not once the region was shared read-only.
        """
        try:
            self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)
        except OSError:
            return False
        return True

    def views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Writable views of ranges (offset, length) of bytes."""
        memory = self._memory
        return [memory[offset : offset + nbytes] for offset, nbytes in ranges]

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable view of a range of bytes."""
        return self._memory[offset : offset + nbytes]

    def span(self, offset: int, nbytes: int) -> Span:
        """Where another process finds a range of bytes."""
        return Span(self.id, offset, nbytes)

    def share(self) -> RegionShare:
        """What `kvtier.cpu.send_regions` sends, and what is used in this process."""
        if not self._sealed:
            seals = fcntl.F_SEAL_SEAL if self.writable else fcntl.F_SEAL_SEAL | _SEAL_FUTURE_WRITE
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
            self._sealed = True
        return RegionShare(self.id, self._fd, self.nbytes, self.writable, self._memory)

    def close(self) -> None:
        """Unpin, and let go of the descriptor. Idempotent; the memory goes with its last view."""
        if self._closed:
            return
        self._closed = True
        self._collapser.close()
        os.close(self._fd)
        self.array = np.empty(0, np.uint8)
        self._memory = self.array.data
        del self._map, self._collapser


def _memory_limit() -> int:
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup/memory.max")
    text = group.read_text().strip() if group.is_file() else "max"
    return min(limit, int(text)) if text.isdigit() else limit
