"""Removals that nobody waits for: of records that were to go while they were leased, superseded ones, aborted ones."""

import logging
import threading
from collections.abc import Collection
from concurrent.futures import Future, wait

from kvtier.errors import KVTierError
from kvtier.remote.backend import Backend
from kvtier.remote.batches import Movers
from kvtier.remote.counting import Counts
from kvtier.remote.holds import Holds

__all__ = ["Removals"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
# Beyond them a record that could not be removed is seen again: it is what it was, and memory has an end.
_MOST_OWED = 1 << 16


class Removals:
    """Removes doomed records in threads of the tier; what fails is owed, and tried again until it is done.

    What is owed stays doomed, so that this process does not see it. Thread-safe; not for use under `lock`.

    Args:
        backend, counts, movers: of the tier.
        holds: say what is doomed.
        lock: covers them, and what is owed.
    """

    def __init__(self, backend: Backend, counts: Counts, movers: Movers, holds: Holds, lock: threading.Lock) -> None:
        self._backend = backend
        self._counts = counts
        self._movers = movers
        self._holds = holds
        self._lock = lock
        self._underway: set[Future[None]] = set()
        self._owed: set[bytes] = set()
        self._pause = _FIRST_PAUSE
        self._again: threading.Timer | None = None

    def add(self, names: Collection[bytes]) -> None:
        """Remove doomed records soon: whoever ends a lease does not wait for the other side."""
        if not names:
            return
        future = self._movers.submit(lambda: self._remove(names))
        if future is not None:
            with self._lock:
                self._underway.add(future)
            future.add_done_callback(self._done)

    def _remove(self, names: Collection[bytes]) -> None:
        with self._lock:
            # Without those that were written again.
            doomed = [name for name in names if self._holds.is_doomed(name)]
        if not doomed:
            return
        try:
            self._backend.remove(doomed, self._movers.limit(None))
        except KVTierError as error:
            self._counts.failed("remove", error)
            self._owe(doomed)
            return
        with self._lock:
            self._holds.spare(doomed)
            self._pause = _FIRST_PAUSE

    def _done(self, future: Future[None]) -> None:
        with self._lock:
            self._underway.discard(future)

    def _owe(self, names: list[bytes]) -> None:
        with self._lock:
            room = _MOST_OWED - len(self._owed)
            self._owed.update(names[:room])
            self._holds.spare(names[room:])
            if self._again is None and not self._holds.closed:
                self._again = threading.Timer(self._pause, self.retry)
                self._again.daemon = True
                self._again.start()
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def retry(self) -> None:
        """Try what is owed again, now."""
        with self._lock:
            if self._again is not None:
                self._again.cancel()
            owed, self._owed, self._again = self._owed, set(), None
        self.add(owed)

    def settle(self, seconds: float) -> None:
        """Wait, so long at most, for the removals that are under way."""
        with self._lock:
            underway = list(self._underway)
        wait(underway, seconds)

    def close(self) -> None:
        """Try nothing again. The tier is closed."""
        with self._lock:
            if self._again is not None:
                self._again.cancel()
            left = len(self._owed)
        if left:
            _log.warning("%s: %d records that were to be removed may still be there", self._counts.name, left)
