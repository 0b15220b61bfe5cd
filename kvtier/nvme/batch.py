"""A batch: one ticket's records on their way between callers' memory and the device, split among workers."""

import heapq
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import count

from kvtier.errors import FormatMismatch
from kvtier.nvme.io import BlockIO, Transfer
from kvtier.tiers import Handle, Status, expired

__all__ = ["Batch", "Deadlines", "check_buffers"]

_log = logging.getLogger(__name__)

_LONGEST = 3600.0  # a deadline may be infinite, a wait may not
_FEW_BATCHES = 64


class Batch:
    """Runs `move` over shares of the items in the workers, then `done` once, in the worker that ends last.

    Args:
        blocks: the workers.
        items: what moves.
        deadline: absolute; shares that did not begin by then are TIMEOUT.
        move: moves the items of these indices and returns their statuses.
        done: gets the status of every item.
        failed: status of items that met an error nobody foresaw.
    """

    def __init__(
        self,
        blocks: BlockIO,
        items: Sequence[Transfer],
        deadline: float | None,
        move: Callable[[list[int]], list[Status]],
        done: Callable[[list[Status]], None],
        failed: Status,
    ) -> None:
        self._blocks = blocks
        self._items = items
        self._deadline = deadline
        self._move = move
        self._done = done
        self._failed = failed
        self._statuses = [Status.TIMEOUT] * len(items)
        self._lock = threading.Lock()
        self._left = 0
        self._waiting: set[int] = set()

    def start(self, deadlines: "Deadlines") -> None:
        """Hand the shares out."""
        shares = self._blocks.shares(self._items)
        self._left = len(shares)
        if not shares:
            self._done([])
            return
        self._waiting = set(range(len(shares)))
        if self._deadline is not None:
            deadlines.watch(self, self._deadline)
        for number, share in enumerate(shares):
            try:
                self._blocks.submit(self._work, number, share)
            except RuntimeError:  # the tier was closed since the batch was made
                if self._begin(number):
                    self._end(share, failed=True)

    def expire(self) -> None:
        """The deadline has passed: nothing that did not begin waits for a worker any more."""
        with self._lock:
            late, self._waiting = len(self._waiting), set()
            self._left -= late
            last = late > 0 and self._left == 0
        if last:
            self._done(self._statuses)

    def _begin(self, number: int) -> bool:
        with self._lock:
            mine = number in self._waiting
            self._waiting.discard(number)
        return mine

    def _work(self, number: int, share: list[int]) -> None:
        if not self._begin(number):
            return
        failed = False
        try:
            self._move_share(share)
        except Exception:  # noqa: BLE001  a thread's top level
            _log.exception("a batch of %d blocks failed", len(share))
            failed = True
        self._end(share, failed=failed)

    def _end(self, share: list[int], *, failed: bool) -> None:
        if failed:
            for at in share:
                self._statuses[at] = self._failed
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._done(self._statuses)

    def _move_share(self, share: list[int]) -> None:
        if not expired(self._deadline):
            for at, status in zip(share, self._move(share), strict=True):
                self._statuses[at] = status


class Deadlines:
    """Ends at its deadline what no worker has begun: workers may hang in a disk that does not answer.

    What a worker has begun goes on, because the device may still write to the buffers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._wake = threading.Condition()
        self._heap: list[tuple[float, int, weakref.ref[Batch]]] = []
        self._limit = _FEW_BATCHES
        self._numbers = count()
        self._thread: threading.Thread | None = None
        self._closing = False

    def watch(self, batch: Batch, deadline: float) -> None:
        """Have the batch expire in time."""
        with self._wake:
            if self._closing:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name}-deadlines", daemon=True)
                self._thread.start()
            heapq.heappush(self._heap, (deadline, next(self._numbers), weakref.ref(batch)))
            self._compact()
            if self._heap[0][0] == deadline:
                self._wake.notify()

    def _compact(self) -> None:
        # Deadlines may be far: what was done long before them must not pile up.
        if len(self._heap) > self._limit:
            self._heap = [watched for watched in self._heap if watched[2]() is not None]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _FEW_BATCHES

    def close(self) -> None:
        """End the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._closing and not (self._heap and expired(self._heap[0][0])):
                    self._wake.wait(min(self._heap[0][0] - time.monotonic(), _LONGEST) if self._heap else None)
                if self._closing:
                    return
                batch = heapq.heappop(self._heap)[2]()
            if batch is not None:
                try:
                    batch.expire()
                except Exception:  # noqa: BLE001  a thread's top level
                    _log.exception("a batch could not expire")
                del batch


def check_buffers(items: Sequence[tuple[Handle, memoryview]], *, writable: bool) -> None:
    """Raise `FormatMismatch` for a buffer that cannot hold its handle's bytes."""
    for handle, data in items:
        if data.nbytes < handle.nbytes or not data.c_contiguous or (writable and data.readonly):
            kind = "writable, contiguous" if writable else "contiguous"
            raise FormatMismatch(
                f"buffer of {data.nbytes} bytes (contiguous={data.c_contiguous}, readonly={data.readonly}): "
                f"this block needs a {kind} one of at least {handle.nbytes} bytes"
            )
