"""Exchange: blocks between rows of a host engine's memory and a store, as jobs that the engine submits and polls.

For engines that keep a host cache themselves, want tiers below it, and have a scheduler that must not wait. Such an
engine hands over names of blocks, and rows of its memory that stay where they are until the job is reported. A job is
one call of `RangeTransfers` in a thread of its own, with rows for ranges:

    save    done when the lower tiers took or refused it
    load    done when nothing writes to the rows any more
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.connector.ranges import Part, RangeTransfers
from kvtier.errors import FormatMismatch
from kvtier.store import TieredStore
from kvtier.store.lanes import Lane

__all__ = ["Exchange", "Moved"]

_log = logging.getLogger(__name__)

# Loads at a time: `RangeTransfers` has room in host for two.
_LOADERS = 2
_GLANCE_SECONDS = 1e-4


class Moved(NamedTuple):
    """What became of a job.

    job: the number that it was submitted under. good: how many leading blocks arrived; of what was saved, how many host
    took or some tier had. nbytes: that were moved. seconds: from its submission to its end.
    """

    job: int
    good: int
    nbytes: int
    seconds: float


class Exchange:
    """Moves whole blocks between rows of an engine's memory and a store. Thread-safe.

    Names of one job are of one chain, parents first: after a gap nothing is of use. Only `drain` and `close` wait for
    jobs.

    Args:
        store: stays the caller's; its host tier holds several blocks.
        ns: namespace of all blocks.
        memory: the engine's, uint8 or int8 [rows, block bytes], contiguous within a row.

    Raises:
        CapacityError, ConfigError: see `RangeTransfers`.
        FormatMismatch: `memory` has another shape, or is read-only.
    """

    def __init__(self, store: TieredStore, ns: int, memory: memoryview) -> None:
        rows = np.asarray(memory)
        if rows.ndim != 2 or rows.itemsize != 1 or rows.strides[1] != 1:
            raise FormatMismatch(f"memory of shape {rows.shape}, {rows.dtype}: expected bytes [rows, block bytes]")
        if not rows.flags.writeable:
            raise FormatMismatch("memory that is read-only: loads are written to it, pass a writable view")
        self._store = store
        self._memory: NDArray[np.uint8] = rows.view(np.uint8)
        self._places = rows.ctypes.data + np.arange(len(rows), dtype=np.int64) * rows.strides[0]
        self.block_bytes = int(rows.shape[1])
        self._moves = RangeTransfers(store, ns, self.block_bytes)
        # Saves keep their order, and hold up no load.
        self._saves = Lane("kvtier-exchange-save", 1)
        self._loads = Lane("kvtier-exchange-load", _LOADERS)
        self._finished: SimpleQueue[Moved] = SimpleQueue()
        self._open = self._loading = 0
        self._changed = threading.Condition()

    def present(self, key: bytes) -> bool:
        """Whether host or a tier that is no round trip away has a block: an index probe in the caller's thread."""
        return bool(self._store.match([key], remote=False).tiers)

    def present_anywhere(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks some tier has, remote ones included: waits for their answers."""
        return [name is not None for name in self._store.whereabouts(keys).result()]

    def save(self, job: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Store rows under names; what is there already was used, and is not written twice. Returns at once.

        Raises:
            FormatMismatch: there is no such row.
        """
        self._submit(self._saves, job, partial(self._save, keys, self._ranges(rows)))

    def load(self, job: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Fill rows with the blocks of `keys`, verified. A row whose block did not arrive is left as it was.

        Raises:
            FormatMismatch: there is no such row.
        """
        self._submit(self._loads, job, partial(self._load, keys, self._ranges(rows)))

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

    # ---- jobs

    def _ranges(self, rows: Sequence[int]) -> list[Part]:
        count = len(self._places)
        bad = next((row for row in rows if not 0 <= row < count), None)
        if bad is not None:
            raise FormatMismatch(f"row {bad} of the engine's memory: expected one of its {count} rows")
        return [[(place, self.block_bytes)] for place in self._places[np.asarray(rows, np.int64)].tolist()]

    def _save(self, keys: Sequence[bytes], sources: Sequence[Part]) -> tuple[int, int]:
        known = self._moves.known(keys)
        moved = self._moves.save(keys[known:], sources[known:])
        # Else the engine would learn how fast memory is, and hold back too late.
        self._moves.settle()
        return known + moved, moved

    def _load(self, keys: Sequence[bytes], targets: Sequence[Part]) -> tuple[int, int]:
        moved = self._moves.load(keys, targets)
        return moved, moved

    def _submit(self, lane: Lane, job: int, move: Callable[[], tuple[int, int]]) -> None:
        loads = int(lane is self._loads)
        with self._changed:
            self._open += 1
            self._loading += loads
        if not lane.submit(partial(self._run, job, loads, monotonic(), move)):
            self._ended(Moved(job, 0, 0, 0.0), loads)

    def _run(self, job: int, loads: int, began: float, move: Callable[[], tuple[int, int]]) -> None:
        good = moved = 0
        try:
            good, moved = move()
        except Exception:  # noqa: BLE001  the thread's top level: a job that died is reported all the same
            _log.exception("the blocks of job %d were not moved", job)
        self._ended(Moved(job, good, moved * self.block_bytes, monotonic() - began), loads)

    def _ended(self, moved: Moved, loads: int) -> None:
        with self._changed:
            self._finished.put(moved)
            self._open -= 1
            self._loading -= loads
            self._changed.notify_all()
