"""Figures of the store as vLLM's statistics: in its log, and under `vllm:kvtier_…` in its Prometheus metrics.

kvtier's metrics -> Figures.take: what changed -> KVTierStats, to the front end -> log line, KVTierProm.observe
"""

import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.metrics import Metrics

__all__ = ["Figures", "KVTierProm", "KVTierStats"]

Values: TypeAlias = dict[str, dict[tuple[str, ...], float]]
"""Name -> label values -> value."""

_SECONDS = 1.0
_COUNTERS = {
    "loaded_bytes": ("tier",),
    "written_bytes": ("tier",),
    "read_bytes": ("tier",),
    "evicted_blocks": ("tier", "reason"),
    "dropped_blocks": ("tier", "reason"),
    "corrupt_blocks": ("tier",),
    "errors": ("tier", "operation"),
    "timeouts": ("tier", "operation"),
    "gate_decisions": ("choice", "reason", "tier"),
}
_GAUGES = ("occupied_bytes", "capacity_bytes")


@dataclass
class KVTierStats(KVConnectorStats):
    """What changed since the last one. data: `added` (counters) and `now` (gauges), each `Values`."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data.setdefault("added", {})
        self.data.setdefault("now", {})

    def reset(self) -> None:
        """Forget it."""
        self.data = {"added": {}, "now": {}}

    def aggregate(self, other: Any) -> "KVTierStats":
        """Take what came later in as well."""
        for name, values in other.data["added"].items():
            own = self.data["added"].setdefault(name, {})
            for labels, value in values.items():
                own[labels] = own.get(labels, 0.0) + value
        for name, values in other.data["now"].items():
            self.data["now"].setdefault(name, {}).update(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: what was counted, and how full the tiers are."""
        every = self.data["added"] | self.data["now"]
        return {
            f"kvtier {name} {' '.join(labels)}": value
            for name, values in every.items()
            for labels, value in values.items()
        }

    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not self.data["added"] and not self.data["now"]


class Figures:
    """Tells what changed in a store's metrics.

    Args:
        metrics: of the store.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._counters = {name: getattr(metrics, name) for name in _COUNTERS}
        self._gauges = {name: getattr(metrics, name) for name in _GAUGES}
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}
        self._next = 0.0

    def take(self, *, moved: bool) -> KVTierStats | None:
        """What changed since the last call; None where nothing moved in this step, and it is not time yet."""
        now = time.monotonic()
        if not moved and now < self._next:
            return None
        self._next = now + _SECONDS
        stats = KVTierStats()
        for name, labels in _COUNTERS.items():
            changed = self._changed(name, labels)
            if changed:
                stats.data["added"][name] = changed
        for name, gauge in self._gauges.items():
            stats.data["now"][name] = _values(gauge, ("tier",), name)
        return stats

    def _changed(self, name: str, labels: tuple[str, ...]) -> dict[tuple[str, ...], float]:
        changed = {}
        for values, value in _values(self._counters[name], labels, f"{name}_total").items():
            added = value - self._told.get((name, values), 0.0)
            if added:
                self._told[name, values] = value
                changed[values] = added
        return changed


def _values(metric: Counter | Gauge, labels: tuple[str, ...], sample: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(found.labels[label] for label in labels): found.value
        for family in metric.collect()
        for found in family.samples
        if found.name == f"kvtier_{sample}"
    }


class KVTierProm(KVConnectorPromMetrics):
    """`vllm:kvtier_<name>`, with the labels that vLLM's own metrics have, and kvtier's."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: self._counter_cls(
                name=f"vllm:kvtier_{name}",
                documentation=f"As kvtier_{name} of kvtier's own metrics",
                labelnames=[*labelnames, *labels],
            )
            for name, labels in _COUNTERS.items()
        }
        self._metrics |= {
            name: self._gauge_cls(
                name=f"vllm:kvtier_{name}",
                documentation=f"As kvtier_{name} of kvtier's own metrics",
                labelnames=[*labelnames, "tier"],
                multiprocess_mode="mostrecent",
            )
            for name in _GAUGES
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what `KVTierStats.data` says."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data["added"].items():
            for labels, value in values.items():
                self._metrics[name].labels(*engine, *labels).inc(value)
        for name, values in transfer_stats_data["now"].items():
            for labels, value in values.items():
                self._metrics[name].labels(*engine, *labels).set(value)
