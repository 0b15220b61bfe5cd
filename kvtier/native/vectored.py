"""Many vectored reads or writes in one call: compiled where it can be, `os.preadv` and `os.pwritev` elsewhere."""

import errno
import importlib
import math
import os
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from kvtier.native.checksum import SHORTEST, Bytes, copy_checksums

__all__ = ["ENDED", "LATE", "BlockRun", "FileRun", "Landing", "addresses", "available", "move", "read_checksums"]

FileRun: TypeAlias = tuple[int, int, list[Bytes]]
"""File descriptor, offset in the file, and the buffers that lie there one behind the other."""

BlockRun: TypeAlias = tuple[int, int, list[Bytes], list[int]]
"""The same, and the numbers of the blocks that lie in it."""

ENDED = -1
"""What `move` says of a run whose file ends before it does."""

LATE = -2
"""What `move` says of a run that it did not begin by the deadline."""

_IOV_MAX = os.sysconf("SC_IOV_MAX")


class Landing(NamedTuple):
    """A block that is read: `nbytes` bytes of `data`, of which those from `start` on come in by `tail`, if it is given.

    `head`: what its checksum is bound to (see `copy_checksums`).
    """

    head: bytes
    data: Bytes
    nbytes: int
    start: int = 0
    tail: Bytes | None = None


class _Compiled(Protocol):
    def move_checked(
        self,
        runs: tuple[FileRun | BlockRun, ...],
        writes: bool,  # noqa: FBT001
        blocks: tuple[Landing, ...],
        seconds: float,
        /,
    ) -> tuple[list[int], list[bytes]]: ...

    def addresses(self, buffers: list[Bytes], /) -> list[int]: ...


def _load() -> _Compiled | None:
    try:
        found = importlib.import_module("kvtier.native._checksum")
    except ImportError:
        return None
    # One that an older version left in place is as good as none.
    return cast("_Compiled", found) if "move_checked" in vars(found) else None


_compiled = _load()


def available() -> bool:
    """Whether the compiled calls are there."""
    return _compiled is not None


def move(runs: Sequence[FileRun], *, writes: bool, deadline: float | None = None) -> list[int]:
    """Fill the buffers of every run from its file, or write them to it; a run that fails does not stop the others.

    One call for all of them, without the GIL: threads that each move many runs do not wake one another between them.
    Compiled on Linux, the kernel has up to 64 runs and 4 MiB (io_submit) at any time, and gets the next as soon as
    one has come; in files that are not opened with O_DIRECT they move one after the other all the same.

    Args:
        runs: buffers to read into are writable.
        writes: write instead of read.
        deadline: absolute `time.monotonic()`; runs that did not begin by then do not move.

    Returns:
        For each run 0, an errno, `ENDED` or `LATE`.
    """
    if _compiled is not None:
        return _compiled.move_checked(tuple(runs), writes, (), _seconds(deadline))[0]
    return [
        LATE if _seconds(deadline) <= 0 else _move(fd, offset, buffers, writes=writes) for fd, offset, buffers in runs
    ]


def read_checksums(
    runs: Sequence[BlockRun], blocks: Sequence[Landing], deadline: float | None = None
) -> tuple[list[int], list[bytes]]:
    """`move`, and xxh3_128(head + bytes) of every block: computed, where it is compiled, while the next runs move.

    Returns:
        What `move` returns; and for each block its checksum, 16 bytes, or none if a run that it lies in failed.
    """
    if _compiled is not None and all(block.nbytes >= SHORTEST for block in blocks):
        return _compiled.move_checked(tuple(runs), False, tuple(blocks), _seconds(deadline))
    results = move([run[:3] for run in runs], writes=False, deadline=deadline)
    touched = {number for run in runs for number in run[3]}
    whole = sorted(touched.difference(*(run[3] for run, result in zip(runs, results, strict=True) if result)))
    checksums = [b""] * len(blocks)
    for number in whole:
        checksums[number] = _land(blocks[number])
    return results, checksums


def _land(block: Landing) -> bytes:
    head, data, nbytes, start, tail = block
    if tail is not None:
        np.frombuffer(data, np.uint8)[start:nbytes] = np.frombuffer(tail, np.uint8, nbytes - start)
    return copy_checksums([head], [data], [None], [nbytes])[0]


def _seconds(deadline: float | None) -> float:
    return math.inf if deadline is None else deadline - time.monotonic()


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
