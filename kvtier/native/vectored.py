"""Many vectored reads or writes in one call: compiled where it can be, `os.preadv` and `os.pwritev` elsewhere."""

import errno
import importlib
import os
from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast

import numpy as np

from kvtier.native.checksum import Bytes

__all__ = ["ENDED", "FileRun", "addresses", "available", "move"]

FileRun: TypeAlias = tuple[int, int, list[Bytes]]
"""File descriptor, offset in the file, and the buffers that lie there one behind the other."""

ENDED = -1
"""What `move` says of a run whose file ends before it does."""

_IOV_MAX = os.sysconf("SC_IOV_MAX")


class _Compiled(Protocol):
    def move_runs(self, runs: tuple[FileRun, ...], writes: bool, /) -> list[int]: ...  # noqa: FBT001

    def addresses(self, buffers: list[Bytes], /) -> list[int]: ...


def _load() -> _Compiled | None:
    try:
        found = importlib.import_module("kvtier.native._checksum")
    except ImportError:
        return None
    # One that an older version left in place is as good as none.
    return cast("_Compiled", found) if "move_runs" in vars(found) else None


_compiled = _load()


def available() -> bool:
    """Whether the compiled calls are there."""
    return _compiled is not None


def move(runs: Sequence[FileRun], *, writes: bool) -> list[int]:
    """Fill the buffers of every run from its file, or write them to it; a run that fails does not stop the others.

    One call for all of them, without the GIL: threads that each move many runs do not wake one another between them.
    Compiled on Linux, up to 64 runs are given to the kernel together (io_submit) and waited for together; in files
    that are not opened with O_DIRECT they move one after the other all the same.

    Args:
        runs: buffers to read into are writable.
        writes: write instead of read.

    Returns:
        For each run 0, an errno, or `ENDED`.
    """
    if _compiled is not None:
        return _compiled.move_runs(tuple(runs), writes)
    return [_move(*run, writes=writes) for run in runs]


def _move(fd: int, offset: int, buffers: Sequence[Bytes], *, writes: bool) -> int:
    rest = list(buffers)
    while rest:
        try:
            done = (os.pwritev if writes else os.preadv)(fd, rest[:_IOV_MAX], offset)  # type: ignore[arg-type]
        except OSError as error:
            return error.errno or errno.EIO
        if done == 0:
            return errno.EIO if writes else ENDED
        offset += done
        while rest and done >= rest[0].nbytes:
            done -= rest.pop(0).nbytes
        if done:
            rest[0] = np.frombuffer(rest[0], np.uint8)[done:]
    return 0


def addresses(buffers: list[Bytes]) -> list[int]:
    """Where each of these contiguous buffers begins in memory."""
    if _compiled is not None:
        return _compiled.addresses(buffers)
    return [int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]) for buffer in buffers]
