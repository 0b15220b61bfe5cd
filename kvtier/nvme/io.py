"""Block I/O: records from and to callers' buffers, in as few system calls as the extents allow.

A batch is split among the workers by bytes, never by block. Each worker moves its share in one call: adjacent pages
move as runs of many buffers, of which the device has several at any time, and the blocks that have come are checksummed
while the next are on their way (`kvtier.native.vectored`). What of a caller's buffer is not page-aligned moves through
the worker's own bounce buffer, and a share that needs much of it in several calls.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.native.checksum import Bytes
from kvtier.native.vectored import Landing, addresses
from kvtier.nvme.extents import PAGE, Extent, pages_for
from kvtier.nvme.segments import Late, PageRun, Segments, aligned_buffer

__all__ = ["BlockIO", "Transfer", "transfers"]

_RUN_PAGES = 256
_BOUNCE_PAGES = 1024
_IOV_MAX = os.sysconf("SC_IOV_MAX")
_SHARE_BYTES = 4 << 20
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


_Piece: TypeAlias = tuple[int, int, int, memoryview]
"""First page, pages, whose they are, and the memory for them."""


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
        first = [item.extents[0].page for item in items]
        order = sorted(range(len(items)), key=first.__getitem__)
        total = sum(item.nbytes for item in items)
        count = max(1, min(self._threads, total // _SHARE_BYTES))
        return [order[start:stop] for start, stop in _cuts([items[at].nbytes for at in order], count)]

    def submit(self, work: Callable[[int, list[int]], None], number: int, share: list[int]) -> None:
        """Call `work(number, share)` in a worker."""
        self._pool.submit(work, number, share)

    def read(
        self, items: Sequence[Transfer], heads: Sequence[bytes], deadline: float | None = None
    ) -> list[bytes | OSError]:
        """Fill the items' buffers.

        Args:
            items: what to read.
            heads: what the checksum of each is bound to, 64 bytes.
            deadline: absolute; what did not begin to move by then is `Late`.

        Returns:
            For each item its checksum (see `kvtier.native.checksum`), or what was wrong: `SegmentLost`, `Late`, or what
            the device said.
        """
        direct = self._direct_bytes(items)
        found: list[bytes | OSError] = []
        for window in _windows(items, direct):
            found += self._read(items[window], direct[window], heads[window], deadline)
        return found

    def write(self, items: Sequence[Transfer], deadline: float | None = None) -> list[OSError | None]:
        """Write the items' buffers, zeros behind them up to whole pages; returns what was wrong with each."""
        direct = self._direct_bytes(items)
        errors: list[OSError | None] = []
        for window in _windows(items, direct):
            errors += self._write(items[window], direct[window], deadline)
        return errors

    def _read(
        self, items: Sequence[Transfer], direct: Sequence[int], heads: Sequence[bytes], deadline: float | None
    ) -> list[bytes | OSError]:
        bounced, pieces = self._lay_out(items, direct)
        blocks = [Landing(head, item.data, item.nbytes) for head, item in zip(heads, items, strict=True)]
        for number, bounce in bounced:
            blocks[number] = blocks[number]._replace(start=direct[number], tail=bounce)
        runs = list(self._runs(pieces))
        failed, checksums = self._segments.read(runs, blocks, deadline)
        return [error or checksum for error, checksum in zip(_errors(items, runs, failed), checksums, strict=True)]

    def _write(self, items: Sequence[Transfer], direct: Sequence[int], deadline: float | None) -> list[OSError | None]:
        bounced, pieces = self._lay_out(items, direct)
        for number, bounce in bounced:
            item, start = items[number], direct[number]
            _copy(bounce[: item.nbytes - start], item.data[start:])
            bounce[item.nbytes - start :] = bytes(bounce.nbytes - item.nbytes + start)
        runs = list(self._runs(pieces))
        return _errors(items, runs, self._segments.write(runs, deadline))

    def _lay_out(
        self, items: Sequence[Transfer], direct: Sequence[int]
    ) -> tuple[list[tuple[int, memoryview]], list[_Piece]]:
        """Which items go, from their direct bytes on, through which bounce buffer, and what goes where."""
        pieces: list[_Piece] = []
        indirect: list[int] = []
        files = self._segments.pages_per_file
        for number, ((extents, nbytes, data, _), start) in enumerate(zip(items, direct, strict=True)):
            page, pages = extents[0]
            # One extent of one file, short enough for one call, of which nothing is bounced.
            if nbytes <= start == pages * PAGE and pages <= _RUN_PAGES and page % files + pages <= files:
                pieces.append((page, pages, number, data if data.nbytes == start else data[:start]))
            else:
                indirect.append(number)
        extra = [pages_for(items[number].nbytes) * PAGE - direct[number] for number in indirect]
        memory = self._bounce(sum(extra)) if any(extra) else _NOTHING
        bounced: list[tuple[int, memoryview]] = []
        for number, end, count in zip(indirect, accumulate(extra), extra, strict=True):
            bounce = memory[end - count : end]
            if count:
                bounced.append((number, bounce))
            pieces += self._pieces(number, items[number], direct[number], bounce)
        return bounced, pieces

    def _pieces(self, number: int, item: Transfer, start: int, bounce: memoryview) -> Iterator[_Piece]:
        """The item's bytes, cut where its extents, a file, one call or its direct part end."""
        at, direct = 0, start // PAGE
        for page, left in item.extents:
            while left:
                to_file_end = self._segments.pages_per_file - page % self._segments.pages_per_file
                count = min(left, to_file_end, _RUN_PAGES, direct - at if at < direct else left)
                source, first = (item.data, at) if at < direct else (bounce, at - direct)
                yield page, count, number, source[first * PAGE : (first + count) * PAGE]
                page, left, at = page + count, left - count, at + count  # noqa: PLW2901

    def _direct_bytes(self, items: Sequence[Transfer]) -> list[int]:
        """How many leading bytes of each, whole pages, move without a copy."""
        aligned, found = PAGE if self._segments.direct else 1, []
        for _, nbytes, data, address in items:
            padded = -(-nbytes // PAGE) * PAGE
            whole = padded if data.nbytes >= padded else nbytes // PAGE * PAGE
            found.append(0 if address % aligned else whole)
        return found

    def _bounce(self, nbytes: int) -> memoryview:
        memory: NDArray[np.uint8] | None = getattr(self._local, "bounce", None)
        if memory is None or memory.nbytes < nbytes:
            memory = self._local.bounce = aligned_buffer(max(nbytes, _BOUNCE_PAGES * PAGE))
        return memory.data

    def _runs(self, pieces: list[_Piece]) -> Iterator[PageRun]:
        """Pieces on adjacent pages of one file, at most 1 MiB and one call's buffers."""
        buffers: list[Bytes] = []
        numbers: list[int] = []
        first = end = 0
        for page, count, number, buffer in sorted(pieces, key=itemgetter(0)):
            adjacent = page == end and page % self._segments.pages_per_file
            if not (adjacent and end - first + count <= _RUN_PAGES and len(buffers) < _IOV_MAX):
                if buffers:
                    yield first, buffers, numbers
                first, buffers, numbers = page, [], []
            buffers.append(buffer)
            numbers.append(number)
            end = page + count
        if buffers:
            yield first, buffers, numbers

    def close(self) -> None:
        """Finish what was submitted and end the workers."""
        self._pool.shutdown()


def _windows(items: Sequence[Transfer], direct: Sequence[int]) -> Iterator[slice]:
    """Consecutive items that move together: as many as one bounce buffer is enough for."""
    if all(item.nbytes <= start for item, start in zip(items, direct, strict=True)):
        yield slice(0, len(items))
        return
    start = pages = 0
    for at, item in enumerate(items):
        count = pages_for(item.nbytes) - direct[at] // PAGE
        if at > start and pages + count > _BOUNCE_PAGES:
            yield slice(start, at)
            start, pages = at, 0
        pages += count
    if items:
        yield slice(start, len(items))


def _errors(
    items: Sequence[Transfer], runs: Sequence[PageRun], failed: Sequence[OSError | None]
) -> list[OSError | None]:
    """What was wrong with each item; that it was late matters least."""
    errors: list[OSError | None] = [None] * len(items)
    for (_, _, numbers), error in zip(runs, failed, strict=True):
        for number in numbers if error is not None else ():
            if errors[number] is None or not isinstance(error, Late):
                errors[number] = error
    return errors


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
