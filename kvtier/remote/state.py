"""What the halves of a remote tier share, and the removals that nobody waits for."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait

from kvtier.errors import KVTierError
from kvtier.remote.backend import Backend
from kvtier.remote.batches import Movers
from kvtier.remote.counting import Counts
from kvtier.remote.holds import Holds
from kvtier.remote.negative import Absent
from kvtier.tiers import Completions

__all__ = ["State"]


class State:
    """The parts of an open remote tier.

    Attributes:
        backend: the other side. counts: metrics. movers: threads and time limits. absent: what was not there.
        completions: where finished tickets go. holds: what this process holds; lock: covers it.
    """

    def __init__(self, backend: Backend, counts: Counts, movers: Movers, absent: Absent) -> None:
        self.backend = backend
        self.counts = counts
        self.movers = movers
        self.absent = absent
        self.completions = Completions()
        self.holds = Holds()
        self.lock = threading.Lock()
        self._removals: set[Future[None]] = set()

    def require_open(self) -> None:
        """Raise `TierUnavailable` if the tier is closed."""
        self.holds.require_open()

    def remove_later(self, names: Sequence[bytes]) -> None:
        """Remove doomed records in a thread of the tier: whoever ends a lease does not wait for the other side."""
        if not names:
            return
        future = self.movers.submit(lambda: self._remove(names))
        if future is not None:
            with self.lock:
                self._removals.add(future)
            future.add_done_callback(self._removed)

    def _remove(self, names: Sequence[bytes]) -> None:
        with self.lock:
            doomed = [name for name in names if self.holds.is_doomed(name)]
        try:
            self.backend.remove(doomed, self.movers.limit(None))
        except KVTierError as error:
            self.counts.failed("remove", error)
        with self.lock:
            self.holds.spare(doomed)

    def _removed(self, future: Future[None]) -> None:
        with self.lock:
            self._removals.discard(future)

    def settle(self, seconds: float) -> None:
        """Wait, so long at most, until what is to be removed is."""
        with self.lock:
            pending = list(self._removals)
        wait(pending, seconds)
