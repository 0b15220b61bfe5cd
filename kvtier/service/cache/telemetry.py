"""Telemetry: what was called, how it ended and how long it took; and the tenants' store metrics beside it."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvtier.service.cache.stats import VerbStats

__all__ = ["Gauge", "Telemetry"]

_SECONDS = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)


class _Times:
    """A histogram of seconds."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.sum += seconds

    def quantile(self, share: float) -> float:
        """The upper end of the bucket in which it lies; 0 before the first time."""
        due = share * sum(self.counts)
        for bound, count in zip((*_SECONDS, _SECONDS[-1]), self.counts, strict=True):
            due -= count
            if due <= 0 and count:
                return bound
        return 0.0

    def buckets(self) -> list[tuple[str, float]]:
        total, rows = 0, []
        for bound, count in zip((*map(str, _SECONDS), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class Gauge(NamedTuple):
    """One figure of the moment. of: labels."""

    name: str
    meaning: str
    of: Mapping[str, str]
    value: float


class Telemetry:
    """Counts calls. Thread-safe.

    Args:
        tenants: registries of the tenants' store metrics, by tenant.
        gauges: asked when metrics are; those of one name follow one another or not.
    """

    def __init__(
        self,
        tenants: Mapping[str, CollectorRegistry],
        gauges: Callable[[], Iterable["Gauge"]],
    ) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._times: dict[str, _Times] = {}
        self._tenants = tenants
        self._gauges = gauges
        self.registry = CollectorRegistry()
        self.registry.register(_Service(self))

    def called(self, verb: str, outcome: str, tenant: str, seconds: float) -> None:
        """A call ended; outcome: `ok`, the code of a `ServiceError`, `gone` or `error`."""
        with self._lock:
            self._calls[verb, outcome, tenant] += 1
            times = self._times.get(verb)
            if times is None:
                times = self._times[verb] = _Times()
            times.add(seconds)

    def moved(self, direction: str, tenant: str, nbytes: int) -> None:
        """Bytes of blocks came in or were handed out; direction: `in` or `out`."""
        with self._lock:
            self._bytes[direction, tenant] += nbytes

    def moved_bytes(self, tenant: str) -> tuple[int, int]:
        """Bytes of a tenant's blocks so far: in, out."""
        with self._lock:
            return self._bytes["in", tenant], self._bytes["out", tenant]

    def verbs(self) -> tuple[VerbStats, ...]:
        """Of each verb that was called, by name."""
        with self._lock:
            rows: dict[str, Counter[str]] = {}
            for (verb, outcome, _), count in self._calls.items():
                rows.setdefault(verb, Counter())[outcome] += count
            return tuple(
                VerbStats(verb, dict(rows[verb]), self._times[verb].quantile(0.5), self._times[verb].quantile(0.99))
                for verb in sorted(rows)
            )

    def text(self) -> bytes:
        """All metrics in the Prometheus text format; the stores' have the label `tenant`."""
        return generate_latest(self.registry)

    def families(self) -> Iterator[Metric]:
        """For the collector."""
        calls = CounterMetricFamily(
            "kvtier_service_calls", "Calls, by verb and how they ended", labels=["verb", "outcome", "tenant"]
        )
        moved = CounterMetricFamily(
            "kvtier_service_bytes", "Bytes of blocks, in and out", labels=["direction", "tenant"]
        )
        times = HistogramMetricFamily("kvtier_service_seconds", "Time of a call", labels=["verb"])
        with self._lock:
            for labels, count in self._calls.items():
                calls.add_metric(labels, count)
            for way, nbytes in self._bytes.items():
                moved.add_metric(way, nbytes)
            for verb, taken in self._times.items():
                times.add_metric([verb], taken.buckets(), taken.sum)
        yield from (calls, moved, times)
        gauges: dict[str, GaugeMetricFamily] = {}
        for name, meaning, of, value in self._gauges():
            family = gauges.setdefault(name, GaugeMetricFamily(name, meaning))
            family.samples.append(Sample(name, dict(of), float(value)))
        yield from gauges.values()
        yield from self._stores()

    def _stores(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for tenant, registry in self._tenants.items():
            for metric in registry.collect():
                # The family's own kind and text, once, with every tenant's samples.
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples.extend(
                    sample._replace(labels={**sample.labels, "tenant": tenant}) for sample in metric.samples
                )
        return families.values()


class _Service(Collector):
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        return self._telemetry.families()

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering asks no tenant."""
        return ()
