"""Exchange: blocks between a host engine's own memory and a store, as jobs that the engine submits and polls.

For engines that keep a host cache themselves and want tiers below it. Such an engine hands over bare names of blocks,
and rows of its memory that stay where they are until the job is reported:

    save   row -> host (copied and checksummed in one pass) -> the lower tiers; done when those took or refused it
    load   lower tier -> host (verified) -> row; done when nothing writes to the row any more

The store's host tier is staging here. A job goes in pieces that are a small share of it, so that one piece is read from
the disk while another is copied, and what hangs below touches the store's memory, never the engine's.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import CapacityError, FormatMismatch
from kvtier.native.copying import copy_runs
from kvtier.store import TieredStore
from kvtier.store.lanes import Lane
from kvtier.tiers import BlockRef, Handle

__all__ = ["Exchange", "Moved"]

_log = logging.getLogger(__name__)

# Loads at a time: one is read while another is copied.
_LOADERS = 2
_PIECE_BYTES = 8 << 20
_GLANCE_SECONDS = 1e-4
# Of host, for one piece: what waits for lower tiers may hold a quarter, the loaders as much, and nothing is full.
_PIECES_IN_HOST = 8


class Moved(NamedTuple):
    """What became of a job.

    job: the number that it was submitted under. good: per block, whether it arrived; of what was saved, whether host
    took it. nbytes: of those. seconds: from its submission to its end.
    """

    job: int
    good: tuple[bool, ...]
    nbytes: int
    seconds: float


class _Job:
    """One job's books; its pieces end in any order."""

    def __init__(self, number: int, blocks: int, pieces: int, *, load: bool) -> None:
        self.number = number
        self.load = load
        self.good = [False] * blocks
        self.left = pieces
        self.began = monotonic()


class Exchange:
    """Moves whole blocks between rows of an engine's memory and a store. Thread-safe.

    Only `drain` and `close` wait for jobs.

    Args:
        store: stays the caller's; its host tier holds several blocks.
        memory: the engine's, uint8 or int8 [rows, block bytes], contiguous within a row.

    Raises:
        CapacityError: host is too small to be staging for two loads.
        FormatMismatch: `memory` has another shape.
    """

    def __init__(self, store: TieredStore, memory: memoryview) -> None:
        rows = np.asarray(memory)
        if rows.ndim != 2 or rows.itemsize != 1 or rows.strides[1] != 1:
            raise FormatMismatch(f"memory of shape {rows.shape}, {rows.dtype}: expected bytes [rows, block bytes]")
        self._store = store
        self._memory: NDArray[np.uint8] = rows.view(np.uint8)
        self.block_bytes = int(rows.shape[1])
        capacity = store.host.stats()["capacity_bytes"]
        if capacity < _PIECES_IN_HOST * self.block_bytes:
            raise CapacityError(
                f"tiering.host.capacity = {capacity} bytes: as staging for blocks of {self.block_bytes} bytes it needs "
                f"{_PIECES_IN_HOST * self.block_bytes} at least"
            )
        share = min(_PIECE_BYTES, capacity // _PIECES_IN_HOST)
        self._piece = max(share // self.block_bytes, 1)
        # Saves keep their order, and hold up no load.
        self._saves = Lane("kvtier-exchange-save", 1)
        self._loads = Lane("kvtier-exchange-load", _LOADERS)
        self._finished: SimpleQueue[Moved] = SimpleQueue()
        self._owners = count()
        self._stalled = False
        self._open = self._loading = 0
        self._changed = threading.Condition()

    def present(self, key: bytes) -> bool:
        """Whether host or a tier that is no round trip away has a block: an index probe in the caller's thread."""
        return bool(self._store.match([key], remote=False).tiers)

    def present_anywhere(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks some tier has, remote ones included: waits for their answers."""
        return [name is not None for name in self._store.whereabouts(keys).result()]

    def save(self, job: int, refs: Sequence[BlockRef], rows: Sequence[int]) -> None:
        """Store rows under names; what is there already is not written twice. Returns at once."""
        self._submit(self._saves, job, len(refs), lambda start, stop: self._save(refs[start:stop], rows[start:stop]))

    def load(self, job: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Fill rows with the blocks of `keys`, verified. A row whose block did not arrive is left as it was."""
        self._submit(self._loads, job, len(keys), lambda start, stop: self._load(keys[start:stop], rows[start:stop]))

    def finished(self) -> list[Moved]:
        """Jobs that ended since the last call; while loads are under way it may take a tenth of a millisecond."""
        with self._changed:
            # An engine that has nothing else to do asks over and over, and would keep the GIL from those it waits for.
            if self._loading and self._finished.empty():
                self._changed.wait(_GLANCE_SECONDS)
        ended: list[Moved] = []
        try:
            while True:
                ended.append(self._finished.get_nowait())
        except Empty:
            return ended

    def drain(self) -> None:
        """Wait until no job is under way: from then on nothing touches the engine's memory."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open)

    def close(self) -> None:
        """Finish what was submitted, then let go of the engine's memory. Idempotent."""
        self.drain()
        self._saves.close(self._store.options.load_deadline)
        self._loads.close(self._store.options.load_deadline)
        self._memory = np.empty((0, self.block_bytes), np.uint8)

    def _submit(self, lane: Lane, number: int, blocks: int, move: Callable[[int, int], Sequence[bool]]) -> None:
        starts = range(0, blocks, self._piece)
        job = _Job(number, blocks, max(len(starts), 1), load=lane is self._loads)
        with self._changed:
            self._open += 1
            self._loading += job.load
        for start in starts or (0,):
            stop = min(start + self._piece, blocks)
            if not lane.submit(partial(self._run, job, start, stop, move)):
                self._ended(job)

    def _run(self, job: _Job, start: int, stop: int, move: Callable[[int, int], Sequence[bool]]) -> None:
        try:
            job.good[start:stop] = move(start, stop)
        except Exception:  # noqa: BLE001  the thread's top level: a job that died is reported all the same
            _log.exception("blocks %d to %d of job %d were not moved", start, stop, job.number)
        self._ended(job)

    def _ended(self, job: _Job) -> None:
        """One piece of it did."""
        with self._changed:
            job.left -= 1
            if job.left:
                return
            nbytes = sum(job.good) * self.block_bytes
            self._finished.put(Moved(job.number, tuple(job.good), nbytes, monotonic() - job.began))
            self._open -= 1
            self._loading -= job.load
            self._changed.notify_all()

    # ---- in the lanes

    def _save(self, refs: Sequence[BlockRef], rows: Sequence[int]) -> list[bool]:
        items = [(ref, self._memory[row].data) for ref, row in zip(refs, rows, strict=True)]
        outcomes = self._store.put_each(items).result()
        # Before the next piece: what lower tiers have not taken would be dropped at the bound of their queues. One that
        # hangs is waited for once; then it is.
        if not (self._stalled and self._store.waiting_bytes):
            self._stalled = not self._store.settle()
        return [outcome != "dropped" for outcome in outcomes]

    def _load(self, keys: Sequence[bytes], rows: Sequence[int]) -> list[bool]:
        """The leading run of a piece; names of one job are of one chain, and after a gap nothing is of use."""
        lease = self._store.acquire(keys, f"exchange.{next(self._owners)}").result()
        try:
            good = self._store.fetch(lease, 0, len(lease)).result() if len(lease) else 0
            self._copy([handle for _, handle in lease.part(0, good)], rows[:good])
        finally:
            self._store.release(lease)
        return [at < good for at in range(len(keys))]

    def _copy(self, handles: Sequence[Handle], rows: Sequence[int]) -> None:
        """Host's bytes of leased blocks into rows, in one call."""
        buffers = [np.frombuffer(self._store.host.buffer(handle), np.uint8, self.block_bytes) for handle in handles]
        places = np.asarray(rows, np.int64) * self._memory.strides[0] + self._memory.ctypes.data
        sources = np.asarray([buffer.ctypes.data for buffer in buffers], np.int64)
        copy_runs(places, sources, np.full(len(places), self.block_bytes, np.int64))
