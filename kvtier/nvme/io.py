"""Block I/O: records from and to callers' buffers, in as few system calls as the extents allow.

A batch is split among the workers by bytes, never by block. Each worker goes through its share in windows of up to
4 MiB: adjacent pages of a window move as one run of many buffers, and all runs of a window go to the device together
(`kvtier.native.vectored`). What of a caller's buffer is not page-aligned moves through the worker's own bounce buffer.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.native.vectored import addresses
from kvtier.nvme.extents import PAGE, Extent, pages_for
from kvtier.nvme.segments import PageRun, Segments, aligned_buffer

__all__ = ["BlockIO", "Transfer", "transfers"]

_RUN_PAGES = 1024
_IOV_MAX = os.sysconf("SC_IOV_MAX")
_SHARE_BYTES = 1 << 20
_NOTHING = memoryview(b"")


class Transfer(NamedTuple):
    """One record and the caller's memory for it, bytes, at least `nbytes` of them, which begins at `address`."""

    extents: tuple[Extent, ...]
    nbytes: int
    data: memoryview
    address: int


def transfers(
    extents: Sequence[tuple[Extent, ...]], sizes: Sequence[int], buffers: Sequence[memoryview]
) -> list[Transfer]:
    """What moves between these extents and these contiguous buffers."""
    flat = [buffer if buffer.ndim == 1 and buffer.format == "B" else buffer.cast("B") for buffer in buffers]
    return list(map(Transfer, extents, sizes, flat, addresses(list(flat))))


class _Piece(NamedTuple):
    page: int
    pages: int
    item: int
    buffer: memoryview


class BlockIO:
    """Workers that move records. Errors come back per record.

    Args:
        segments: the files.
        threads: workers; how many windows the device gets at a time.
        name: prefix of the threads' names.
    """

    def __init__(self, segments: Segments, threads: int, name: str) -> None:
        self._segments = segments
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._local = threading.local()

    def shares(self, items: Sequence[Transfer]) -> list[list[int]]:
        """Indices of the items, in the order of their pages, split among the workers."""
        order = sorted(range(len(items)), key=lambda at: items[at].extents[0].page)
        total = sum(item.nbytes for item in items)
        count = max(1, min(self._threads, total // _SHARE_BYTES))
        return [order[start:stop] for start, stop in _cuts([items[at].nbytes for at in order], count)]

    def submit(self, work: Callable[[int, list[int]], None], number: int, share: list[int]) -> None:
        """Call `work(number, share)` in a worker."""
        self._pool.submit(work, number, share)

    def windows(self, items: Sequence[Transfer], share: Sequence[int]) -> Iterator[list[int]]:
        """Consecutive indices of a share that move together."""
        window: list[int] = []
        pages = 0
        for at in share:
            count = pages_for(items[at].nbytes)
            if window and pages + count > _RUN_PAGES:
                yield window
                window, pages = [], 0
            window.append(at)
            pages += count
        if window:
            yield window

    def read(self, items: Sequence[Transfer]) -> list[OSError | None]:
        """Fill the items' buffers."""
        bounced, pieces = self._lay_out(items)
        errors = self._move(items, pieces, self._segments.read)
        for item, start, bounce in bounced:
            _copy(item.data[start : item.nbytes], bounce)
        return errors

    def write(self, items: Sequence[Transfer]) -> list[OSError | None]:
        """Write the items' buffers, zeros behind them up to whole pages."""
        bounced, pieces = self._lay_out(items)
        for item, start, bounce in bounced:
            count = item.nbytes - start
            _copy(bounce[:count], item.data[start:])
            bounce[count:] = bytes(bounce.nbytes - count)
        return self._move(items, pieces, self._segments.write)

    def _move(
        self,
        items: Sequence[Transfer],
        pieces: list[_Piece],
        move: Callable[[Sequence[PageRun]], list[OSError | None]],
    ) -> list[OSError | None]:
        errors: list[OSError | None] = [None] * len(items)
        runs = list(self._runs(pieces))
        failed = move([(run[0].page, [piece.buffer for piece in run]) for run in runs])
        for run, error in zip(runs, failed, strict=True):
            for piece in run if error is not None else ():
                errors[piece.item] = error
        return errors

    def _lay_out(self, items: Sequence[Transfer]) -> tuple[list[tuple[Transfer, int, memoryview]], list[_Piece]]:
        """Which part of each item goes through which bounce buffer, and what goes where."""
        pieces: list[_Piece] = []
        indirect: list[tuple[int, Transfer, int]] = []
        needed = 0
        for number, item in enumerate(items):
            start, pages = self._direct_bytes(item), pages_for(item.nbytes)
            extra = pages * PAGE - start
            if not extra and self._in_one_piece(item, pages):
                pieces.append(_Piece(item.extents[0].page, pages, number, item.data[:start]))
            else:
                indirect.append((number, item, start))
                needed += extra
        memory = self._bounce(needed) if needed else _NOTHING
        bounced: list[tuple[Transfer, int, memoryview]] = []
        at = 0
        for number, item, start in indirect:
            extra = pages_for(item.nbytes) * PAGE - start
            bounce = memory[at : at + extra]
            at += extra
            if extra:
                bounced.append((item, start, bounce))
            pieces += self._pieces(number, item, start, bounce)
        return bounced, pieces

    def _in_one_piece(self, item: Transfer, pages: int) -> bool:
        """Whether an item is one extent of one file, and short enough for one call."""
        files = self._segments.pages_per_file
        return len(item.extents) == 1 and item.extents[0].page % files + pages <= files and pages <= _RUN_PAGES

    def _pieces(self, number: int, item: Transfer, start: int, bounce: memoryview) -> Iterator[_Piece]:
        """The item's bytes, cut where its extents, a file, one call or its direct part end."""
        at, direct = 0, start // PAGE
        for page, left in item.extents:
            while left:
                to_file_end = self._segments.pages_per_file - page % self._segments.pages_per_file
                count = min(left, to_file_end, _RUN_PAGES, direct - at if at < direct else left)
                source, first = (item.data, at) if at < direct else (bounce, at - direct)
                yield _Piece(page, count, number, source[first * PAGE : (first + count) * PAGE])
                page, left, at = page + count, left - count, at + count  # noqa: PLW2901

    def _direct_bytes(self, item: Transfer) -> int:
        """How many leading bytes, whole pages, move without a copy."""
        if self._segments.direct and item.address % PAGE:
            return 0
        padded = pages_for(item.nbytes) * PAGE
        return padded if item.data.nbytes >= padded else item.nbytes // PAGE * PAGE

    def _bounce(self, nbytes: int) -> memoryview:
        memory: NDArray[np.uint8] | None = getattr(self._local, "bounce", None)
        if memory is None or memory.nbytes < nbytes:
            memory = self._local.bounce = aligned_buffer(max(nbytes, _RUN_PAGES * PAGE))
        return memory.data

    def _runs(self, pieces: list[_Piece]) -> Iterator[list[_Piece]]:
        """Pieces on adjacent pages of one file, at most 4 MiB and one call's buffers."""
        run: list[_Piece] = []
        end = pages = 0
        for piece in sorted(pieces, key=itemgetter(0)):
            page, count = piece[:2]
            adjacent = page == end and page % self._segments.pages_per_file
            if run and not (adjacent and pages + count <= _RUN_PAGES and len(run) < _IOV_MAX):
                yield run
                run, pages = [], 0
            run.append(piece)
            end, pages = page + count, pages + count
        if run:
            yield run

    def close(self) -> None:
        """Finish what was submitted and end the workers."""
        self._pool.shutdown()


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy as much as the target holds, without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8, target.nbytes))


def _cuts(sizes: Sequence[int], shares: int) -> list[tuple[int, int]]:
    """Split a sequence into consecutive shares of about equal sums."""
    total, done, start = sum(sizes), 0, 0
    cuts: list[tuple[int, int]] = []
    for at, size in enumerate(sizes):
        done += size
        if done * shares >= total * (len(cuts) + 1):
            cuts.append((start, at + 1))
            start = at + 1
    return cuts
