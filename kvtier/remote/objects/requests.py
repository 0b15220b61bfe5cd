"""Requests to one object store: many at a time, all over by a deadline, and failures in this package's words."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from obstore.exceptions import BaseError

from kvtier.breaker import Breaker
from kvtier.errors import TierTimeout, TierUnavailable
from kvtier.remote.counting import Counts

__all__ = ["Requests"]

_T = TypeVar("_T")
_PAUSE_SECONDS = 0.1


class Requests:
    """One thread in whose event loop the requests of all callers run.

    What is not answered by its deadline is cancelled: its connection is dropped, and nobody waits for it.

    Args:
        name: of the store, for errors and the thread.
        counts: where it is counted that a store refuses, and answers again.
        concurrency: requests at a time.
    """

    def __init__(self, name: str, counts: Counts, concurrency: int) -> None:
        self._name = name
        self._counts = counts
        self._breaker = Breaker(1, _PAUSE_SECONDS, time.monotonic)
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(concurrency)
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"kvtier-requests-{name}", daemon=True)
        self._thread.start()

    def run(self, requests: Sequence[Callable[[], Awaitable[_T]]], deadline: float) -> list[_T]:
        """Make all requests; their results in this order.

        Raises:
            TierTimeout: one was not answered by the deadline (absolute `time.monotonic()`).
            TierUnavailable: one failed, or all did a moment ago.
        """
        if not requests:
            return []
        if not self._breaker.allows():
            self._counts.met("refused")
            raise TierUnavailable(f"{self._name} could not be reached a moment ago and is left alone for a while")
        future = self._submit(requests)
        try:
            answers = future.result(max(deadline - time.monotonic(), 0.0))
        except TimeoutError as error:
            future.cancel()
            raise TierTimeout(f"{self._name} did not answer {len(requests)} requests in time") from error
        except CancelledError as error:
            raise self._is_closed() from error
        except (BaseError, OSError) as error:
            self._breaker.failed()
            self._counts.met("refused")
            raise TierUnavailable(f"{self._name} cannot be reached, or refuses: {_first_line(error)}") from error
        if self._breaker.is_open:
            self._counts.met("reconnect")
        self._breaker.succeeded()
        return answers

    def _submit(self, requests: Sequence[Callable[[], Awaitable[_T]]]) -> "Future[list[_T]]":
        with self._lock:
            if self._closed:
                raise self._is_closed()
            return asyncio.run_coroutine_threadsafe(self._all(requests), self._loop)

    def _is_closed(self) -> TierUnavailable:
        return TierUnavailable(f"{self._name} is closed: open it again")

    async def _all(self, requests: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
        tasks = [asyncio.ensure_future(self._one(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, request: Callable[[], Awaitable[_T]]) -> _T:
        async with self._slots:
            return await request()

    def close(self) -> None:
        """End the thread; requests under way fail. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        # Until they have ended nobody who waits for one is told, and the loop must not stop.
        await asyncio.gather(*others, return_exceptions=True)


def _first_line(error: BaseException) -> str:
    """Stores explain themselves at length."""
    return next(iter(str(error).splitlines()), type(error).__name__)
