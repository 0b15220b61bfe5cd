"""Staging memory: where blocks lie while they change their format. Never the cache's own pool."""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Staging"]

_PAGE = mmap.PAGESIZE


class Staging:
    """Page-aligned buffers, bounded in total. Whoever takes one while the bound is reached waits.

    Args:
        limit: bytes; a single larger buffer is given out when no other one is.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def take(self, nbytes: int) -> Iterator[memoryview]:
        """A writable buffer of at least `nbytes`, until the context ends."""
        size = max(-(-nbytes // _PAGE), 1) * _PAGE
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + size <= self.limit)
            self._used += size
        try:
            # Not kept for the next one: a tier that is late may still refer to it.
            yield memoryview(mmap.mmap(-1, size))
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()
