"""Lanes and operations: requests hop between the threads of the tiers that they need.

Each tier has its own few threads, so that what hangs in one tier occupies that tier's threads and nobody else's.
An operation is a generator that yields the lane which its next step must run in:

    yield host lane -> (step) -> yield nvme lane -> (step) -> return result

Its future is resolved by its end or by its deadline, whichever comes first; a step that comes back after the
deadline finds the operation over and cleans up after itself.
"""

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue
from typing import Generic, TypeAlias, TypeVar

__all__ = ["Alarm", "Lane", "Operation", "Steps"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_FEW_CALLS = 64


class Lane:
    """A bounded number of daemon threads, started as they are needed, that run jobs in order.

    Args:
        name: of its threads.
        threads: at most.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self._limit = threads
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], object]) -> bool:
        """Queue a job, which must not raise; False: the lane is closed, or its threads are the parent's of a fork."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            if self._closed:
                return False
            if not self._idle and len(self._threads) < self._limit:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._threads.append(thread)
                thread.start()
            elif self._idle:
                self._idle -= 1
            self._jobs.put(job)
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001  the thread's top level
                _log.exception("a job of %s died", self.name)
            # What a job refers to must not live until the next one comes.
            del job
            with self._lock:
                self._idle += 1

    def close(self, timeout: float) -> bool:
        """Run what is queued, then end the threads; False: some were still busy after `timeout` seconds. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._jobs.put(None)
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


Steps: TypeAlias = Generator[Lane, None, _T]


class Operation(Generic[_T]):
    """Drives one generator through its lanes.

    Args:
        steps: the work; it cleans up in `finally`, since it is closed at its next hop once the operation is over.
        otherwise: the result if it is ended early; called once, in whatever thread ends it.
        expired: told the lane that the operation was in, or waited for, when its deadline passed.
    """

    __slots__ = ("__weakref__", "_expired", "_otherwise", "_right", "_steps", "future", "lane")

    def __init__(
        self, steps: Steps[_T], otherwise: Callable[[], _T], expired: Callable[[Lane], object] | None = None
    ) -> None:
        self._steps = steps
        self._otherwise = otherwise
        self._expired = expired
        # The right to set the result: whoever pops it has it, and popping is atomic.
        self._right = [True]
        self.future: Future[_T] = Future()
        # From now on nobody can cancel it: a lease that nobody takes would never be released.
        self.future.set_running_or_notify_cancel()
        self.lane: Lane | None = None

    def start(self) -> "Future[_T]":
        """Take the first hop."""
        self._advance()
        return self.future

    @property
    def over(self) -> bool:
        """Whether the result is set, or about to be."""
        return not self._right

    def _advance(self) -> None:
        if self.over:
            self._steps.close()
            return
        try:
            lane = next(self._steps)
        except StopIteration as end:
            if self._claim():
                self.future.set_result(end.value)
        except Exception as error:  # noqa: BLE001  the thread's top level: the future carries it
            if self._claim():
                self.future.set_exception(error)
        else:
            self.lane = lane
            if not lane.submit(self._advance):
                self._steps.close()
                self._settle(self._otherwise)

    def end(self) -> None:
        """End it now, with what there is; the step under way is not waited for."""
        self._settle(self._otherwise)

    def expire(self) -> None:
        """Its deadline has passed."""
        if self._settle(self._otherwise) and self.lane is not None and self._expired is not None:
            self._expired(self.lane)

    def _claim(self) -> bool:
        try:
            return self._right.pop()
        except IndexError:
            return False

    def _settle(self, result: Callable[[], _T]) -> bool:
        if not self._claim():
            return False
        self.future.set_result(result())
        return True


class Alarm:
    """One thread that calls functions at their time (`time.monotonic()`). They must be short and must not raise."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[], object], Callable[[], object]]] = []
        self._limit = _FEW_CALLS
        self._numbers = count()
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def at(self, when: float, call: Callable[[], object], wanted: Callable[[], object] = lambda: True) -> None:
        """Call at `when` or shortly after; not at all once closed, and perhaps not once `wanted` says None."""
        with self._changed:
            if self._closed:
                return
            self._compact()
            heapq.heappush(self._calls, (when, next(self._numbers), call, wanted))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvtier-alarm", daemon=True)
                self._thread.start()
            elif self._calls[0][0] == when:
                self._changed.notify()

    def _compact(self) -> None:
        # Deadlines may be far: what was done long before them must not pile up.
        if len(self._calls) > self._limit:
            self._calls = [call for call in self._calls if call[3]() is not None]
            heapq.heapify(self._calls)
            self._limit = 2 * len(self._calls) + _FEW_CALLS

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._calls or self._calls[0][0] > time.monotonic()):
                    self._changed.wait(self._calls[0][0] - time.monotonic() if self._calls else None)
                if self._closed:
                    return
                call = heapq.heappop(self._calls)[2]
            try:
                call()
            except Exception:  # noqa: BLE001  the thread's top level
                _log.exception("a timed call died")
            del call

    def close(self) -> None:
        """Forget what is planned and end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._calls.clear()
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
