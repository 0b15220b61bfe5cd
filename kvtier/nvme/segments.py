"""Segment files: where the bytes lie, opened once, O_DIRECT where the file system takes it."""

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtier.nvme.extents import PAGE, Extent

__all__ = ["SegmentLost", "Segments", "aligned_buffer", "disk_free", "takes_direct_io"]

_ZEROS_PAGES = 1024


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Page-aligned memory, uint8 [nbytes], all zero."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def takes_direct_io(directory: Path) -> bool:
    """Whether files in this directory can be written and read past the page cache in 4 KiB units."""
    probe = directory / f"probe-{os.getpid()}"
    page = aligned_buffer(PAGE)
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o644)
        try:
            return os.pwritev(fd, [page.data], 0) == PAGE and os.preadv(fd, [page.data], 0) == PAGE
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        with suppress(FileNotFoundError):
            probe.unlink()


def disk_free(path: Path) -> int:
    """Bytes that unprivileged processes may still write to the file system."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class SegmentLost(OSError):
    """A segment file is gone, or ends before a block that lies in it. `number`: which one."""

    def __init__(self, path: Path, number: int, why: str) -> None:
        super().__init__(errno.ENOENT, f"{path} {why}")
        self.number = number


class Segments:
    """The files `seg-00000.kv`, ... of one directory, as one space of pages. Thread-safe.

    Args:
        directory: where they are.
        pages_per_file: pages of each but, perhaps, the last.
        direct: move bytes past the page cache.
    """

    def __init__(self, directory: Path, pages_per_file: int, *, direct: bool) -> None:
        # A write makes a file that is missing; a read must not, it would find zeros in it.
        self.direct = direct
        self.pages_per_file = pages_per_file
        self._directory = directory
        self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._retired: list[int] = []
        self._zeros = aligned_buffer(_ZEROS_PAGES * PAGE)

    def _path(self, number: int) -> Path:
        return self._directory / f"seg-{number:05}.kv"

    def _fd(self, number: int, *, make: bool) -> int:
        with self._lock:
            fd = self._fds.get(number)
            if fd is None:
                try:
                    fd = os.open(self._path(number), self._flags | (os.O_CREAT if make else 0), 0o644)
                except FileNotFoundError:
                    raise SegmentLost(self._path(number), number, "is gone") from None
                self._fds[number] = fd
            return fd

    def pages_of(self, number: int) -> tuple[int, int]:
        """The first page of a file, and the first behind it."""
        return number * self.pages_per_file, (number + 1) * self.pages_per_file

    def forget(self, number: int) -> None:
        """A file was found missing or short: the next write opens or makes it anew.

        The old descriptor stays open until `close`, because a transfer may be using it.
        """
        with self._lock:
            fd = self._fds.pop(number, None)
            if fd is not None:
                self._retired.append(fd)

    def _in_files(self, extent: Extent) -> Iterator[tuple[int, int, int]]:
        """(file number, page within it, pages) of each file that the extent touches."""
        page, left = extent
        while left:
            number, inside = divmod(page, self.pages_per_file)
            count = min(left, self.pages_per_file - inside)
            yield number, inside, count
            page, left = page + count, left - count

    def allocate(self, extent: Extent) -> None:
        """Have the file system set the blocks aside.

        Raises:
            OSError: it cannot.
        """
        for number, inside, count in self._in_files(extent):
            os.posix_fallocate(self._fd(number, make=True), inside * PAGE, count * PAGE)

    def zero(self, extent: Extent) -> None:
        """Write zeros once, so that later writes find written blocks (which are about twice as fast)."""
        page, left = extent
        while left:
            count = min(left, _ZEROS_PAGES, self.pages_per_file - page % self.pages_per_file)
            self.write(page, [self._zeros[: count * PAGE]])
            page, left = page + count, left - count

    def read(self, page: int, buffers: Sequence[NDArray[np.uint8]]) -> None:
        """Fill buffers (whole pages) from consecutive pages of one file.

        Raises:
            SegmentLost: there is no such file, or it ends before.
            OSError: the device failed.
        """
        number, inside = divmod(page, self.pages_per_file)
        fd, offset, rest = self._fd(number, make=False), inside * PAGE, buffers
        while rest:
            done = os.preadv(fd, rest, offset)  # type: ignore[arg-type]  # arrays are buffers
            if done == 0:
                raise SegmentLost(self._path(number), number, f"ends at byte {offset}")
            offset, rest = offset + done, _rest(rest, done)

    def write(self, page: int, buffers: Sequence[NDArray[np.uint8]]) -> None:
        """Write buffers (whole pages) to consecutive pages of one file.

        Raises:
            OSError: the device failed or is full.
        """
        number, inside = divmod(page, self.pages_per_file)
        fd, offset, rest = self._fd(number, make=True), inside * PAGE, buffers
        with self._lock:
            self._dirty.add(number)
        while rest:
            done = os.pwritev(fd, rest, offset)  # type: ignore[arg-type]  # arrays are buffers
            offset, rest = offset + done, _rest(rest, done)

    def sync(self) -> None:
        """Have the device keep everything written so far.

        Raises:
            OSError: it cannot; what was not synchronised stays due.
        """
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        try:
            for number in sorted(dirty):
                os.fdatasync(self._fd(number, make=True))
        except OSError:
            with self._lock:
                self._dirty |= dirty
            raise

    def cut(self, total: int) -> None:
        """Give everything from page `total` on back to the file system."""
        full, inside = divmod(total, self.pages_per_file)
        for path in sorted(self._directory.glob("seg-*.kv")):
            number = int(path.stem.removeprefix("seg-"))
            if number > full or (number == full and inside == 0):
                path.unlink()
            elif number == full:
                os.truncate(path, min(path.stat().st_size, inside * PAGE))

    def count(self) -> int:
        """Number of files."""
        return sum(1 for _ in self._directory.glob("seg-*.kv"))

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for fd in (*self._fds.values(), *self._retired):
                os.close(fd)
            self._fds.clear()
            self._retired.clear()


def _rest(buffers: Sequence[NDArray[np.uint8]], done: int) -> list[NDArray[np.uint8]]:
    """What is left of the buffers behind the first `done` bytes."""
    for at, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[at + 1 :]]
        done -= buffer.nbytes
    return []
