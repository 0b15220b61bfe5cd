"""Counting: one tier's view of the metrics."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Histogram

from kvtier.metrics import Metrics
from kvtier.nvme.extents import PAGE
from kvtier.nvme.ledger import State

__all__ = ["Counts"]

_log = logging.getLogger(__name__)


class Counts:
    """Counts in `metrics` under the tier's name, and logs what failed."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.metrics = metrics
        self.name = name
        self._occupied = metrics.occupied_bytes.labels(name)
        self._capacity = metrics.capacity_bytes.labels(name)
        # Looking a label up costs as much as moving a small block.
        self._seconds: dict[str, Histogram] = {}
        self._own: dict[Counter, Counter] = {}

    def add(self, metric: Counter, amount: int) -> None:
        """Count on a metric whose only label is the tier."""
        if amount:
            own = self._own.get(metric)
            if own is None:
                own = self._own[metric] = metric.labels(self.name)
            own.inc(amount)

    def dropped(self, reason: str, blocks: int) -> None:
        """Blocks that were not taken."""
        self.metrics.dropped_blocks.labels(self.name, reason).inc(blocks)

    def evicted(self, reason: str, blocks: int) -> None:
        """Blocks that had to go."""
        self.metrics.evicted_blocks.labels(self.name, reason).inc(blocks)

    def altered(self, blocks: int) -> None:
        """Blocks whose records were altered, and dropped for it."""
        if blocks:
            self.evicted("damaged_entry", blocks)
            self.add(self.metrics.corrupt_blocks, blocks)

    def failed(self, operation: str, error: Exception | str) -> None:
        """An error that degrades to a miss or a drop."""
        self.metrics.errors.labels(self.name, operation).inc()
        _log.warning("%s: %s failed: %s", self.name, operation, error)

    def fell_back(self, what: str) -> None:
        """A slower way is taken because the fast one is missing."""
        self.metrics.fallbacks.labels(self.name, what).inc()

    def sums(self, state: State, idle: int) -> None:
        """What is occupied, of how much; `idle`: pages of the arena."""
        self._occupied.set((state.occupied - idle) * PAGE)
        self._capacity.set(state.total * PAGE)

    def took(self, operation: str, start: float) -> None:
        """Time since `start` (`time.perf_counter`)."""
        seconds = self._seconds.get(operation)
        if seconds is None:
            seconds = self._seconds[operation] = self.metrics.seconds.labels(self.name, operation)
        seconds.observe(time.perf_counter() - start)

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Time of the body."""
        start = time.perf_counter()
        yield
        self.took(operation, start)
