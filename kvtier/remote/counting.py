"""Counting: one remote tier's view of the metrics."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.metrics import Metrics

__all__ = ["Counts"]

_log = logging.getLogger(__name__)
_QUIET_SECONDS = 10.0


class Counts:
    """Counts in `metrics` under the tier's name. Thread-safe.

    What a remote tier meets is counted by reason in `kvtier_remote_outcomes_total`:

    miss        a look-up did not find the block            negative   nor did it ask, having just been told so
    gone        found, and not there any more when read     corrupt    read, and damaged
    timeout     no answer in time                           refused    not reachable, or not willing
    full        no room on the other side                   reconnect  reached again after it was not
    redirect    another node has it                         retry      asked again on a new connection
    """

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.metrics = metrics
        self.name = name
        self._quiet_until = 0.0

    def met(self, reason: str, count: int = 1) -> None:
        """Count one of the reasons above."""
        if count:
            self.metrics.remote_outcomes.labels(self.name, reason).inc(count)

    def looked_up(self, hits: int, misses: int) -> None:
        """Blocks that a request found, and did not find."""
        self.metrics.hit_blocks.labels(self.name).inc(hits)
        self.metrics.missed_blocks.labels(self.name).inc(misses)
        self.met("miss", misses)

    def read(self, nbytes: int) -> None:
        """Bytes read and verified."""
        self.metrics.read_bytes.labels(self.name).inc(nbytes)

    def written(self, nbytes: int) -> None:
        """Bytes written and committed."""
        self.metrics.written_bytes.labels(self.name).inc(nbytes)

    def damaged(self, blocks: int) -> None:
        """Blocks that failed their checksum."""
        if blocks:
            self.metrics.corrupt_blocks.labels(self.name).inc(blocks)
            self.met("corrupt", blocks)

    def dropped(self, reason: str, blocks: int) -> None:
        """Blocks that were not taken."""
        if blocks:
            self.metrics.dropped_blocks.labels(self.name, reason).inc(blocks)

    def failed(self, operation: str, error: Exception) -> None:
        """An error that degrades to a miss or a drop; the log has one now and then, the counter all."""
        self.metrics.errors.labels(self.name, operation).inc()
        now = time.monotonic()
        quiet, self._quiet_until = now < self._quiet_until, max(self._quiet_until, now + _QUIET_SECONDS)
        _log.log(logging.DEBUG if quiet else logging.WARNING, "%s: %s failed: %s", self.name, operation, error)

    def occupied(self, nbytes: int, capacity: int) -> None:
        """How full the other side is."""
        self.metrics.occupied_bytes.labels(self.name).set(nbytes)
        self.metrics.capacity_bytes.labels(self.name).set(capacity)

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Time of the body."""
        start = time.perf_counter()
        yield
        self.took(operation, start)

    def took(self, operation: str, start: float) -> None:
        """Time since `start` (`time.perf_counter`)."""
        self.metrics.seconds.labels(self.name, operation).observe(time.perf_counter() - start)
