"""One ticket's records on their way between callers' memory and the other side, split among threads."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise

from kvtier.errors import FormatMismatch, KVTierError, TierTimeout
from kvtier.remote.counting import Counts
from kvtier.tiers import Handle, Status, completes_run, expired

__all__ = ["Batch", "Movers", "check_buffers", "sizes_by_run"]

_log = logging.getLogger(__name__)

# One exchange: enough that a round trip is cheap beside it, and little enough that what was received is checksummed
# while the processor's cache still holds it.
_WINDOW_BYTES = 4 << 20
_WINDOW_ITEMS = 256


class Movers:
    """The threads of one tier that move bytes, and how long they wait.

    Args:
        name: of the threads.
        threads: at most.
        timeout: seconds for an exchange of few bytes.
        slowest: bytes per second that the other side is given time for beyond that.
        share: bytes that are worth a thread of their own.
    """

    def __init__(self, name: str, threads: int, timeout: float, slowest: float, share: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._threads = threads
        self._timeout = timeout
        self._slowest = slowest
        self._share = share

    def limit(self, deadline: float | None, nbytes: int = 0) -> float:
        """When a call of so many bytes is over: at its deadline, or when whoever lives would have answered."""
        own = time.monotonic() + self._timeout + nbytes / self._slowest
        return own if deadline is None else min(deadline, own)

    def submit(self, job: Callable[[], None]) -> Future[None] | None:
        """Run a job soon; None: closed."""
        try:
            return self._pool.submit(job)
        except RuntimeError:
            return None

    def shares(self, sizes: Sequence[int]) -> list[range]:
        """Split consecutive items into as many shares as there are threads, of about equal bytes, none too small."""
        total = sum(sizes)
        count = max(min(self._threads, total // self._share, len(sizes)), 1)
        cuts, done = [0], 0
        for at, size in enumerate(sizes):
            done += size
            if len(cuts) < count and done * count >= total * len(cuts):
                cuts.append(at + 1)
        cuts.append(len(sizes))
        return [range(start, stop) for start, stop in pairwise(cuts) if start < stop]

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        self._pool.shutdown()


class Batch:
    """Runs `move` over windows of items in the movers' threads, then `done` once, in the thread that ends last.

    Args:
        movers: the threads.
        counts: where failures are counted.
        operation: what it does, for metrics.
        sizes: bytes of each item, in groups that stay together (see `sizes_by_run`).
        move: moves the items of these indices by a limit (absolute) and returns their statuses; raises for a window
            that failed as a whole.
        done: gets the status of every item.
        failed: status of the items of such a window, and of those that come after it in its share.
    """

    def __init__(
        self,
        movers: Movers,
        counts: Counts,
        operation: str,
        sizes: Sequence[Sequence[int]],
        move: Callable[[Sequence[int], float], Sequence[Status]],
        done: Callable[[list[Status]], None],
        failed: Status,
    ) -> None:
        self._movers = movers
        self._counts = counts
        self._operation = operation
        self._sizes = [sum(group) for group in sizes]
        # Group n is items [starts[n], starts[n + 1]).
        self._starts = list(accumulate(map(len, sizes), initial=0))
        self._move = move
        self._done = done
        self._failed = failed
        self._statuses = [failed] * self._starts[-1]
        self._lock = threading.Lock()
        self._left = 0

    def start(self, deadline: float | None) -> None:
        """Hand the shares out; each window has until the deadline."""
        if not self._sizes or expired(deadline):
            self._done([Status.TIMEOUT] * len(self._statuses))
            return
        shares = self._movers.shares(self._sizes)
        self._left = len(shares)
        for share in shares:
            if self._movers.submit(partial(self._work, share, deadline)) is None:
                self._end()

    def _work(self, share: range, deadline: float | None) -> None:
        try:
            self._move_share(share, deadline)
        except KVTierError as error:
            self._counts.failed(self._operation, error)
        except Exception:  # noqa: BLE001  a thread's top level
            _log.exception("a batch of %d blocks failed", len(share))
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._done(self._statuses)

    def _move_share(self, share: range, deadline: float | None) -> None:
        for window in self._windows(share):
            limit = self._movers.limit(deadline, sum(self._sizes[at] for at in window))
            items = range(self._starts[window.start], self._starts[window.stop])
            try:
                statuses = self._move_window(items, limit)
            except TierTimeout:
                for at in range(items.start, self._starts[share.stop]):
                    self._statuses[at] = Status.TIMEOUT
                raise
            for at, status in zip(items, statuses, strict=True):
                self._statuses[at] = status

    def _move_window(self, items: range, limit: float) -> Sequence[Status]:
        if expired(limit):
            raise TierTimeout("the deadline passed before a thread was free")
        return self._move(items, limit)

    def _windows(self, share: range) -> Iterator[range]:
        start, nbytes = share.start, 0
        for at in share:
            if at > start and (nbytes + self._sizes[at] > _WINDOW_BYTES or at - start == _WINDOW_ITEMS):
                yield range(start, at)
                start, nbytes = at, 0
            nbytes += self._sizes[at]
        yield range(start, share.stop)


def sizes_by_run(handles: Sequence[Handle], run: int) -> list[list[int]]:
    """Bytes of each record, those of one run (see `TierCaps.run`) in one group."""
    groups: list[list[int]] = [[]]
    for handle in handles:
        groups[-1].append(handle.nbytes)
        if completes_run(handle.ref, run) or len(groups[-1]) == run:
            groups.append([])
    return [group for group in groups if group]


def check_buffers(items: Sequence[tuple[Handle, memoryview]], *, writable: bool) -> None:
    """Raise `FormatMismatch` for a buffer that cannot hold its handle's bytes."""
    for handle, data in items:
        if data.nbytes < handle.nbytes or not data.c_contiguous or (writable and data.readonly):
            kind = "writable, contiguous" if writable else "contiguous"
            raise FormatMismatch(
                f"buffer of {data.nbytes} bytes (contiguous={data.c_contiguous}, readonly={data.readonly}): "
                f"this block needs a {kind} one of at least {handle.nbytes} bytes"
            )
