"""What was not there a moment ago: blocks that need not be asked for again just yet."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

__all__ = ["Absent"]


class Absent:
    """Names that the other side did not have, each remembered for `ttl` seconds. Thread-safe.

    What another process writes meanwhile is found `ttl` seconds late, at most; what this one writes, at once.

    Args:
        ttl: seconds; 0: nothing is remembered.
        limit: names, of which the oldest go first.
        clock: monotonic seconds.
    """

    def __init__(self, ttl: float, limit: int = 1 << 16, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl = ttl
        self._limit = limit
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()
        self._writes = 0

    @property
    def stamp(self) -> int:
        """To be taken before the other side is asked, and given to `add` with the answer."""
        return self._writes

    def add(self, names: Iterable[bytes], stamp: int) -> None:
        """These are not there; void if anything was written since, which may have been one of them."""
        if not self._ttl:
            return
        until = self._clock() + self._ttl
        with self._lock:
            if stamp != self._writes:
                return
            for name in names:
                self._until[name] = until
                self._until.move_to_end(name)
            while len(self._until) > self._limit:
                self._until.popitem(last=False)

    def discard(self, names: Iterable[bytes]) -> None:
        """These were written."""
        with self._lock:
            self._writes += 1
            for name in names:
                self._until.pop(name, None)

    def __contains__(self, name: bytes) -> bool:
        until = self._until.get(name)
        if until is None:
            return False
        if self._clock() < until:
            return True
        with self._lock:
            if self._until.get(name) == until:
                del self._until[name]
        return False
