"""Regions in another process, or in their owner's: sent over a Unix socket, mapped, seen by span.

message   uint32le count, then per region uint64le id, uint64le bytes, uint8 writable; the descriptors travel
          beside it (SCM_RIGHTS) in the same order
"""

import ctypes
import mmap
import os
import socket
import struct
from collections.abc import Sequence

import numpy as np

from kvtier.errors import TierUnavailable
from kvtier.layout import Span
from kvtier.tiers import RegionShare

__all__ = ["HUGE", "AttachedRegion", "SharedMapping", "recv_regions", "send_regions"]

HUGE = 2 << 20
"""Bytes of a huge page."""

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<QQ?")
_MOST = 250  # the kernel passes at most 253 descriptors at once
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # linux/mman.h; mmap has no names for them
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p


class SharedMapping:
    """A file mapped shared, from a 2 MiB boundary on: whole huge pages are then mapped by one fault, not 64 KiB by
    each.

    Where the kernel puts a mapping is its own affair, so more is reserved than is needed, and the file mapped over it
    where it is to be. Views of `array` keep both alive.

    Args:
        fd: the file; the caller may close it afterwards.
        nbytes: bytes from its start on.
        writable: whether `array` is.

    Raises:
        OSError: the kernel refuses.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        prot = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._reserved = mmap.mmap(-1, nbytes + HUGE, flags, prot)
        start = np.frombuffer(self._reserved, np.uint8).ctypes.data
        self._offset = -start % HUGE
        if _libc.mmap(start + self._offset, nbytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.array = np.frombuffer(self._reserved, np.uint8, nbytes, self._offset)

    def madvise(self, option: int, offset: int, nbytes: int) -> None:
        """`mmap.madvise` of a range of the file.

        Raises:
            OSError: the kernel refuses.
        """
        self._reserved.madvise(option, self._offset + offset, nbytes)


class AttachedRegion:
    """A region of another process, mapped here, or one of this process. Views keep the mapping alive.

    In the owner's process its own mapping serves: not every CUDA driver pins memory that is mapped read-only.

    Args:
        fd: the received descriptor; the caller may close it afterwards.
        nbytes: size of the region.
        writable: map for writing. The kernel refuses that for regions whose owner shares them for reading.
        memory: the owner's mapping, where this is its process; None: map the descriptor.

    Raises:
        TierUnavailable: the descriptor cannot be mapped like that.
    """

    def __init__(self, fd: int, nbytes: int, writable: bool, memory: memoryview | None = None) -> None:  # noqa: FBT001
        self.nbytes = nbytes
        self.writable = writable
        if memory is not None:
            self._memory = memory if writable else memory.toreadonly()
            return
        try:
            actual = os.fstat(fd).st_size
            if not 0 < nbytes <= actual:
                raise TierUnavailable(f"region of {nbytes} bytes in a file of {actual}: the sender is confused")
            self._memory = SharedMapping(fd, nbytes, writable=writable).array.data
        except OSError as error:
            raise TierUnavailable(f"cannot map a region of {nbytes} bytes (writable={writable}): {error}") from error

    def view(self, span: Span) -> memoryview:
        """The span's bytes: writable only in a writable region.

        Raises:
            TierUnavailable: the span lies outside the region.
        """
        stop = span.offset + span.nbytes
        if not 0 <= span.offset < stop <= self.nbytes:
            raise TierUnavailable(f"{span} lies outside its region of {self.nbytes} bytes: attach again")
        return self._memory[span.offset : stop]


def send_regions(sock: socket.socket, regions: Sequence[RegionShare]) -> None:
    """Send regions over a connected Unix stream socket."""
    if not 0 < len(regions) <= _MOST:
        raise TierUnavailable(f"{len(regions)} regions in one message: expected 1..{_MOST}")
    entries = b"".join(_ENTRY.pack(share.region, share.nbytes, share.writable) for share in regions)
    message = _COUNT.pack(len(regions)) + entries
    sent = socket.send_fds(sock, [message], [share.fd for share in regions])
    sock.sendall(message[sent:])


def recv_regions(sock: socket.socket) -> dict[int, AttachedRegion]:
    """Receive what `send_regions` sent, mapped, by region id.

    Raises:
        TierUnavailable: the peer closed the socket or sent something else.
    """
    head, fds, _, _ = socket.recv_fds(sock, _COUNT.size, _MOST, socket.MSG_CMSG_CLOEXEC)
    try:
        head += _recv_exactly(sock, _COUNT.size - len(head))
        (count,) = _COUNT.unpack(head)
        if count != len(fds):
            raise TierUnavailable(f"{len(fds)} descriptors for {count} regions: the peer does not send regions")
        entries = _ENTRY.iter_unpack(_recv_exactly(sock, count * _ENTRY.size))
        return {
            region: AttachedRegion(fd, nbytes, writable)
            for fd, (region, nbytes, writable) in zip(fds, entries, strict=True)
        }
    finally:
        for fd in fds:
            os.close(fd)


def _recv_exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise TierUnavailable("the peer closed the socket while it sent its regions")
        data += part
    return data
