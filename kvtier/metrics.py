"""Prometheus metrics, one set per store, the tier as a label.

Every silent decision (drop, eviction, fallback, retry, damaged block) has a counter with its reason.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["Metrics"]

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Metrics:
    """The metrics of one store and its tiers.

    Args:
        registry: where they are registered; a fresh one by default, so that several stores can live in a process.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.read_bytes = self._counter("read_bytes", "Bytes read and verified", "tier")
        self.written_bytes = self._counter("written_bytes", "Bytes written and committed", "tier")
        self.hit_blocks = self._counter("hit_blocks", "Blocks that requests found and leased", "tier")
        self.missed_blocks = self._counter("missed_blocks", "Blocks asked for and not found", "tier")
        self.loaded_bytes = self._counter("loaded_bytes", "Bytes copied into device memory, by where they were", "tier")
        self.evicted_blocks = self._counter("evicted_blocks", "Blocks evicted", "tier", "reason")
        self.dropped_blocks = self._counter("dropped_blocks", "Blocks that a tier did not take", "tier", "reason")
        self.corrupt_blocks = self._counter("corrupt_blocks", "Blocks that failed their checksum", "tier")
        self.errors = self._counter("errors", "I/O errors that degraded to a miss or a drop", "tier", "operation")
        self.fallbacks = self._counter("fallbacks", "Slower ways taken because the fast one is missing", "tier", "what")
        self.joined = self._counter("joined_blocks", "Puts and loads that joined one in flight", "operation")
        self.gate_decisions = self._counter(
            "gate_decisions", "Prefixes found and loaded, split or computed again, and why", "choice", "reason", "tier"
        )
        self.put_blocks = self._counter("put_blocks", "Blocks put into the store, by what became of them", "outcome")
        self.timeouts = self._counter("timeouts", "Operations that missed their deadline", "tier", "operation")
        self.breaker_trips = self._counter("breaker_trips", "Times that a tier was found hanging", "tier")
        self.skipped = self._counter("skipped_lookups", "Requests that did not look in a hanging tier", "tier")
        self.expired_pins = self._counter("expired_pins", "Pins whose time was over")
        self.prefetches = self._counter("prefetches", "Prefetches, by how they ended", "outcome")
        self.prefetched_blocks = self._counter("prefetched_blocks", "Blocks brought into host ahead of their use")
        self.remote_outcomes = self._counter(
            "remote_outcomes", "What a remote tier met: blocks, or connections", "tier", "reason"
        )
        self.write_rule = Gauge(
            "kvtier_write_rule",
            "1 for the rule by which blocks go to lower tiers now",
            ["rule"],
            registry=self.registry,
        )
        self.occupied_bytes = Gauge(
            "kvtier_occupied_bytes", "Bytes occupied, reservations included", ["tier"], registry=self.registry
        )
        self.capacity_bytes = Gauge("kvtier_capacity_bytes", "Capacity", ["tier"], registry=self.registry)
        self.prefill_rate = Gauge(
            "kvtier_prefill_tokens_per_second", "Latest measured prefill speed of the engine", registry=self.registry
        )
        self.seconds = Histogram(
            "kvtier_operation_seconds",
            "Time of a batch",
            ["tier", "operation"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def value(self, name: str, **labels: str) -> float:
        """Current value of a sample, for instance `value("loaded_bytes_total", tier="nvme")`; 0 before its first."""
        return self.registry.get_sample_value(f"kvtier_{name}", labels) or 0.0

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvtier_{name}", text, labels, registry=self.registry)
