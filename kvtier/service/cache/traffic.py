"""Traffic: what callers put, read and looked up, by namespace; and what the tiers did for it."""

import threading
from collections.abc import Iterable

from prometheus_client import Counter, Gauge

from kvtier.metrics import Metrics
from kvtier.service.cache.stats import TierFlow, TrafficStats

__all__ = ["TenantTraffic", "Traffic", "flow_of", "occupancy"]


class Traffic:
    """Blocks that came, were asked for and were found, since the process began. Thread-safe."""

    __slots__ = ("_lock", "hits", "matched", "misses", "stored", "stored_bytes", "unmatched")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.stored = self.stored_bytes = self.hits = self.misses = self.matched = self.unmatched = 0

    def put(self, blocks: int, nbytes: int) -> None:
        """Blocks were stored."""
        with self._lock:
            self.stored += blocks
            self.stored_bytes += nbytes

    def read(self, hits: int, misses: int) -> None:
        """Blocks were asked for."""
        with self._lock:
            self.hits += hits
            self.misses += misses

    def match(self, matched: int, unmatched: int) -> None:
        """Blocks were looked up."""
        with self._lock:
            self.matched += matched
            self.unmatched += unmatched

    def stats(self) -> TrafficStats:
        """As they are now."""
        with self._lock:
            return TrafficStats(self.stored, self.stored_bytes, self.hits, self.misses, self.matched, self.unmatched)


class TenantTraffic:
    """The traffic of one tenant, by namespace and in all. Thread-safe."""

    def __init__(self) -> None:
        self.total = Traffic()
        self._spaces: dict[str, Traffic] = {}

    def enter(self, namespace: str) -> None:
        """A namespace begins, with nothing."""
        self._spaces[namespace] = Traffic()

    def leave(self, namespace: str) -> None:
        """A namespace ends; what it had stays in the total."""
        self._spaces.pop(namespace)

    def of(self, namespace: str) -> Traffic:
        """That of a namespace; of one that has just ended: nothing."""
        return self._spaces.get(namespace) or Traffic()

    def put(self, namespace: str, blocks: int, nbytes: int) -> None:
        """Blocks were stored."""
        self.of(namespace).put(blocks, nbytes)
        self.total.put(blocks, nbytes)

    def read(self, namespace: str, asked: int, found: int) -> None:
        """Blocks were asked for."""
        self.of(namespace).read(found, asked - found)
        self.total.read(found, asked - found)

    def match(self, namespace: str, asked: int, found: int) -> None:
        """Blocks were looked up."""
        self.of(namespace).match(found, asked - found)
        self.total.match(found, asked - found)


def flow_of(metrics: Metrics, tier: str) -> TierFlow:
    """What a tier did, from its store's metrics."""
    return TierFlow(
        read_bytes=_sum(metrics.read_bytes, tier),
        written_bytes=_sum(metrics.written_bytes, tier),
        evicted=_by_reason(metrics.evicted_blocks, tier),
        dropped=_by_reason(metrics.dropped_blocks, tier),
        corrupt=_sum(metrics.corrupt_blocks, tier),
    )


def occupancy(metrics: Metrics, tier: str) -> tuple[int, int]:
    """Bytes that a tier occupies, and may, as it last said: asking a remote one takes as long as that takes."""
    return _sum(metrics.occupied_bytes, tier), _sum(metrics.capacity_bytes, tier)


def _samples(metric: Counter | Gauge, tier: str) -> Iterable[tuple[dict[str, str], int]]:
    for family in metric.collect():
        for sample in family.samples:
            if sample.labels["tier"] == tier and not sample.name.endswith("_created"):
                yield sample.labels, int(sample.value)


def _sum(metric: Counter | Gauge, tier: str) -> int:
    return sum(value for _, value in _samples(metric, tier))


def _by_reason(metric: Counter, tier: str) -> dict[str, int]:
    return {labels["reason"]: value for labels, value in _samples(metric, tier) if value}
