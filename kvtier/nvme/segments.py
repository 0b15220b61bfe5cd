"""Segment files: where the bytes lie, opened once, O_DIRECT where the file system takes it."""

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.native.checksum import Bytes
from kvtier.native.vectored import ENDED, LATE, BlockRun, Landing, move, read_checksums
from kvtier.nvme.extents import PAGE, Extent

__all__ = ["Late", "PageRun", "SegmentLost", "Segments", "aligned_buffer", "disk_free", "takes_direct_io"]

_ZEROS_PAGES = 1024

PageRun: TypeAlias = tuple[int, list[Bytes], list[int]]
"""The first page, buffers, whole pages, that lie one behind the other in one file, and whose block each is."""


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Page-aligned memory, uint8 [nbytes], all zero; in huge pages, if there are any: the device fills them faster."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    with suppress(OSError):
        # Pages that a fork shares are copied when they are next written to, from under what the device is doing.
        memory.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(memory, np.uint8)


def takes_direct_io(directory: Path) -> bool:
    """Whether files in this directory can be written and read past the page cache in 4 KiB units."""
    probe = directory / f"probe-{os.getpid()}"
    page = aligned_buffer(PAGE)
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o644)
    except OSError:
        probe.unlink(missing_ok=True)
        return False
    try:
        return os.pwritev(fd, [page.data], 0) == PAGE and os.preadv(fd, [page.data], 0) == PAGE
    except OSError as error:
        # A disk that is full now is no reason to go through the page cache for as long as the tier is open.
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)


def disk_free(path: Path) -> int:
    """Bytes that unprivileged processes may still write to the file system."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class SegmentLost(OSError):
    """A segment file is gone, or ends before a block that lies in it. `number`: which one."""

    def __init__(self, path: Path, number: int, why: str) -> None:
        super().__init__(errno.ENOENT, f"{path} {why}")
        self.number = number


class Late(OSError):
    """The deadline passed before these pages began to move."""


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
        self._syncing = threading.Lock()
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
        """Write zeros once, so that later writes find written blocks (which are about twice as fast).

        Raises:
            OSError: the device failed or is full.
        """
        page, left = extent
        while left:
            count = min(left, _ZEROS_PAGES, self.pages_per_file - page % self.pages_per_file)
            (error,) = self.write([(page, [self._zeros[: count * PAGE].data], [])])
            if error is not None:
                raise error
            page, left = page + count, left - count

    def read(
        self, runs: Sequence[PageRun], blocks: Sequence[Landing], deadline: float | None
    ) -> tuple[list[OSError | None], list[bytes]]:
        """Fill buffers from the pages of each run.

        Returns:
            For each run what was wrong with it: `SegmentLost`, if there is no such file or it ends before, `Late`, or
            what the device said. And the blocks' checksums (see `read_checksums`), which count where no run failed.
        """
        errors: list[OSError | None] = [None] * len(runs)
        moving = self._in_open_files(runs, errors, make=False)
        codes, checksums = read_checksums(moving, blocks, deadline)
        self._note(runs, errors, codes)
        return errors, checksums

    def write(self, runs: Sequence[PageRun], deadline: float | None = None) -> list[OSError | None]:
        """Write buffers to the pages of each run; what was wrong: `Late`, or what the device said, failed or full."""
        errors: list[OSError | None] = [None] * len(runs)
        moving = self._in_open_files(runs, errors, make=True)
        opened = {run[0] // self.pages_per_file for run, error in zip(runs, errors, strict=True) if not error}
        codes = move([run[:3] for run in moving], writes=True, deadline=deadline)
        # Not before: a synchronisation meanwhile would count for bytes that were not there.
        with self._lock:
            self._dirty |= opened
        self._note(runs, errors, codes)
        return errors

    def _in_open_files(self, runs: Sequence[PageRun], errors: list[OSError | None], *, make: bool) -> list[BlockRun]:
        """The runs whose files open; notes what is wrong with the others."""
        opened: list[BlockRun] = []
        for at, (page, buffers, blocks) in enumerate(runs):
            number, inside = divmod(page, self.pages_per_file)
            try:
                opened.append((self._fd(number, make=make), inside * PAGE, buffers, blocks))
            except OSError as error:
                errors[at] = error
        return opened

    def _note(self, runs: Sequence[PageRun], errors: list[OSError | None], codes: Sequence[int]) -> None:
        """Note what is wrong with the runs whose files opened."""
        moved = [at for at, error in enumerate(errors) if error is None]
        for at, code in zip(moved, codes, strict=True):
            if code:
                errors[at] = self._error(runs[at][0] // self.pages_per_file, code)

    def _error(self, number: int, code: int) -> OSError:
        path = self._path(number)
        if code == ENDED:
            return SegmentLost(path, number, f"ends at byte {path.stat().st_size if path.is_file() else 0}")
        if code == LATE:
            return Late(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), str(path))
        return OSError(code, os.strerror(code), str(path))

    def sync(self) -> None:
        """Have the device keep everything written so far.

        Raises:
            OSError: it cannot; what was not synchronised stays due.
        """
        # One at a time: whoever finds nothing to do must not return while another is still at it.
        with self._syncing:
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
        for path in self._files():
            first, _ = self.pages_of(int(path.stem.removeprefix("seg-")))
            if first >= total:
                path.unlink()
            elif path.stat().st_size > (total - first) * PAGE:
                os.truncate(path, (total - first) * PAGE)

    def count(self) -> int:
        """Number of files."""
        return len(self._files())

    def _files(self) -> list[Path]:
        return [path for path in self._directory.glob("seg-*.kv") if path.stem.removeprefix("seg-").isdecimal()]

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for fd in (*self._fds.values(), *self._retired):
                os.close(fd)
            self._fds.clear()
            self._retired.clear()
