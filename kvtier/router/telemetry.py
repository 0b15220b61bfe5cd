"""Prometheus metrics of the router, the engine as a label."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.router.fleet import Attempt, Fleet
from kvtier.router.index import Level

__all__ = ["Telemetry"]

_CHOOSING = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_FIRST_BYTE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Telemetry:
    """Counts what the router does, and reads what its engines are like when it is asked.

    Args:
        fleet: the engines.
    """

    def __init__(self, fleet: Fleet) -> None:
        own = self._registry = CollectorRegistry()
        own.register(_FleetCollector(fleet))
        self._requests = Counter(
            "kvtier_router_requests",
            "Requests sent to an engine, by why it was chosen",
            ["engine", "reason"],
            registry=own,
        )
        self._matched = Counter(
            "kvtier_router_matched_tokens", "Tokens of prompts that it had, by where", ["engine", "tier"], registry=own
        )
        self._prompts = Counter("kvtier_router_prompt_tokens", "Tokens of prompts", ["engine"], registry=own)
        self._retries = Counter(
            "kvtier_router_retries", "Requests that went on to another engine, by why", ["engine", "why"], registry=own
        )
        self._refused = Counter("kvtier_router_refused", "Requests that no engine took", registry=own)
        self._broken = Counter("kvtier_router_broken", "Answers that an engine did not end", ["engine"], registry=own)
        self._untokenized = Counter(
            "kvtier_router_untokenized", "Prompts told by their text, since nobody made tokens of them", registry=own
        )
        self._choosing = Histogram(
            "kvtier_router_choosing_seconds", "Until a request was sent on", buckets=_CHOOSING, registry=own
        )
        self._first_byte = Histogram(
            "kvtier_router_first_byte_seconds",
            "From a request's arrival to the first byte of its answer",
            ["engine"],
            buckets=_FIRST_BYTE,
            registry=own,
        )
        self._whole = Histogram(
            "kvtier_router_request_seconds", "From a request's arrival to its end", buckets=_WHOLE, registry=own
        )
        self._http = Counter(
            "kvtier_router_http_requests", "HTTP requests, by path and status", ["path", "status"], registry=own
        )

    def sent(self, attempt: Attempt, tokens: int, seconds: float) -> None:
        """A request went to an engine, `seconds` after it came."""
        name = attempt.engine.name
        self._requests.labels(name, attempt.reason).inc()
        self._prompts.labels(name).inc(tokens)
        self._choosing.observe(seconds)
        for level, found in zip(Level, attempt.found, strict=True):
            if found:
                self._matched.labels(name, level.name.lower()).inc(found)

    def answered(self, attempt: Attempt, seconds: float) -> None:
        """Its answer began, `seconds` after it came."""
        self._first_byte.labels(attempt.engine.name).observe(seconds)

    def retried(self, attempt: Attempt, why: str) -> None:
        """The engine did not take it; `why`: `unreachable`, `full`, `unavailable`."""
        self._retries.labels(attempt.engine.name, why).inc()

    def refused(self) -> None:
        """No engine took it."""
        self._refused.inc()

    def broken(self, attempt: Attempt) -> None:
        """The answer ended before its end."""
        self._broken.labels(attempt.engine.name).inc()

    def untokenized(self) -> None:
        """Nobody made tokens of a prompt."""
        self._untokenized.inc()

    def over(self, path: str, status: int, seconds: float) -> None:
        """A request is through."""
        self._http.labels(path, str(status)).inc()
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def value(self, name: str, **labels: str) -> float:
        """Current value of a sample; 0 before its first."""
        return self._registry.get_sample_value(f"kvtier_router_{name}", labels) or 0.0


class _FleetCollector(Collector):
    """The engines at the moment they are asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        own = ["engine"]
        up = GaugeMetricFamily("kvtier_router_engine_up", "1 while the engine takes requests", labels=own)
        active = GaugeMetricFamily("kvtier_router_active_requests", "Requests under way", labels=own)
        computing = GaugeMetricFamily("kvtier_router_computing_tokens", "Of prompts without an answer yet", labels=own)
        hears = GaugeMetricFamily("kvtier_router_events_connected", "1 while its block events come", labels=own)
        blocks = GaugeMetricFamily("kvtier_router_index_blocks", "Blocks known to be there", labels=["engine", "tier"])
        counters = {
            name: CounterMetricFamily(f"kvtier_router_{name}", text, labels=own)
            for name, text in (
                ("event_messages", "Messages of block events that were applied"),
                ("event_gaps", "Times that messages were missing"),
                ("event_resyncs", "Times that all that was known was dropped, to be built anew"),
                ("event_failures", "Replays that were not answered"),
                ("event_malformed", "Messages and events that could not be read"),
                ("index_orphans", "Blocks told without their parent or tokens"),
                ("index_forgotten", "Blocks beyond router.index_blocks"),
            )
        }
        for engine in self._fleet.engines:
            label, counts = [engine.name], engine.index.counts()
            up.add_metric(label, int(engine.up and not engine.draining))
            hears.add_metric(label, int(engine.hears))
            active.add_metric(label, engine.active)
            computing.add_metric(label, engine.computing)
            for level, held in zip(Level, counts.blocks, strict=True):
                blocks.add_metric([engine.name, level.name.lower()], held)
            values = (*engine.heard, counts.orphans, counts.forgotten)
            for counter, value in zip(counters.values(), values, strict=True):
                counter.add_metric(label, value)
        yield from (up, hears, active, computing, blocks, *counters.values())
