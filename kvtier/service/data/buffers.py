"""Memory that bodies are received into, bounded for each tenant and used again."""

import mmap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.service.cache import ServiceError

__all__ = ["BufferPool"]

_SMALLEST = 64 << 10
_MOST_IDLE = 64 << 20
_RETRY_SECONDS = 0.5


class BufferPool:
    """Thread-safe.

    Args:
        limit: bytes that one owner may have at a time; a tenant, so that nobody makes another one wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._out: Counter[str] = Counter()
        self._idle: list[mmap.mmap] = []  # the one that was used last, and is in the caches, at the end
        self._freed = threading.Condition()

    @property
    def bytes_out(self) -> int:
        """Bytes in use, by all owners."""
        return self._out.total()

    @contextmanager
    def lend(self, owner: str, nbytes: int, seconds: float) -> Iterator[memoryview]:
        """A buffer of `nbytes`, waited for that long.

        Raises:
            ServiceError: busy: the owner has as much as it may, and kept it.
        """
        memory = self._take(owner, nbytes, seconds)
        try:
            yield memoryview(memory)[:nbytes]
        finally:
            self._give_back(owner, memory)

    @contextmanager
    def charged(self, owner: str, nbytes: int) -> Iterator[None]:
        """Count memory of another kind against the limit.

        Raises:
            ServiceError: busy.
        """
        with self._freed:
            self._claim(owner, nbytes)
        try:
            yield
        finally:
            self._unclaim(owner, nbytes)

    def _take(self, owner: str, nbytes: int, seconds: float) -> mmap.mmap:
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        until = time.monotonic() + seconds
        with self._freed:
            while self._out[owner] + size > self._limit and self._out[owner]:
                left = until - time.monotonic()
                if left <= 0 or not self._freed.wait(left):
                    break
            self._claim(owner, size)
            found = next((memory for memory in reversed(self._idle) if len(memory) == size), None)
            if found is not None:
                self._idle.remove(found)
                return found
        return mmap.mmap(-1, size)

    def _claim(self, owner: str, nbytes: int) -> None:
        out = self._out[owner]
        # A buffer that is alone may be larger than the limit: rounded up, the longest block is.
        if out and out + nbytes > self._limit:
            raise ServiceError(
                "busy",
                f"{out} of {self._limit} bytes for bodies are in use: send less at once, or raise "
                "service.inflight_bytes",
                retry_after=_RETRY_SECONDS,
            )
        self._out[owner] += nbytes

    def _unclaim(self, owner: str, nbytes: int) -> None:
        with self._freed:
            self._out[owner] -= nbytes
            self._freed.notify_all()

    def _give_back(self, owner: str, memory: mmap.mmap) -> None:
        with self._freed:
            self._idle.append(memory)
            while sum(map(len, self._idle)) > _MOST_IDLE:
                del self._idle[0]
        self._unclaim(owner, len(memory))
