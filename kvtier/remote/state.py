"""What the halves of a remote tier share."""

import threading

from kvtier.remote.backend import Backend
from kvtier.remote.batches import Movers
from kvtier.remote.counting import Counts
from kvtier.remote.holds import Holds
from kvtier.remote.negative import Absent
from kvtier.remote.removals import Removals
from kvtier.tiers import Completions

__all__ = ["State"]


class State:
    """The parts of an open remote tier.

    Attributes:
        backend: the other side. counts: metrics. movers: threads and time limits. absent: what was not there.
        completions: where finished tickets go. holds: what this process holds; lock: covers it. removals: those that
            nobody waits for.
    """

    def __init__(self, backend: Backend, counts: Counts, movers: Movers, absent: Absent) -> None:
        self.backend = backend
        self.counts = counts
        self.movers = movers
        self.absent = absent
        self.completions = Completions()
        self.holds = Holds()
        self.lock = threading.Lock()
        self.removals = Removals(backend, counts, movers, self.holds, self.lock)

    def require_open(self) -> None:
        """Raise `TierUnavailable` if the tier is closed."""
        self.holds.require_open()
