"""Prometheus metrics of the engine and of the server; the store has its own, see `kvtier/metrics.py`."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.engine import EngineStats
from kvtier.server.admission import Admission
from kvtier.server.responses import Finals, usage_of

__all__ = ["Telemetry"]

_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Telemetry:
    """Counts what the server does, and reads the engine's own figures when it is asked.

    Args:
        stats: of the engine, from any thread.
        admission: who is let in.
        store: the registry of the store's metrics, printed beside the server's.
    """

    def __init__(
        self, stats: Callable[[], EngineStats], admission: Admission, store: CollectorRegistry | None = None
    ) -> None:
        own = CollectorRegistry()
        self._registries = (own,) if store is None else (own, store)
        own.register(_EngineCollector(stats, admission))
        self._http = Counter(
            "kvtier_http_requests", "HTTP requests, by path and status", ["path", "status"], registry=own
        )
        self._sequences = Counter(
            "kvtier_sequences", "Sequences that ended, by their finish reason", ["reason"], registry=own
        )
        self._prompt = Counter("kvtier_prompt_tokens", "Tokens of prompts that were answered", registry=own)
        self._output = Counter("kvtier_output_tokens", "Tokens that were generated", registry=own)
        self._cached = Counter(
            "kvtier_cached_tokens", "Tokens of prompts whose KV was found, by where", ["source"], registry=own
        )
        self._ttft = Histogram(
            "kvtier_time_to_first_token_seconds",
            "From the arrival of a sequence to its first token",
            buckets=_FIRST_TOKEN,
            registry=own,
        )
        self._tpot = Histogram(
            "kvtier_time_per_output_token_seconds",
            "Of each sequence, the mean time of a token after its first",
            buckets=_NEXT_TOKEN,
            registry=own,
        )
        self._whole = Histogram(
            "kvtier_request_seconds", "From a request's arrival to its end", buckets=_WHOLE, registry=own
        )

    def answered(self, path: str, status: int, seconds: float) -> None:
        """A request is through."""
        self._http.labels(path, str(status)).inc()
        self._whole.observe(seconds)

    def generated(self, finals: Finals) -> None:
        """A request's sequences have ended."""
        usage = usage_of(finals)
        self._prompt.inc(usage.prompt)
        self._output.inc(usage.output)
        self._cached.labels("device").inc(usage.device)
        self._cached.labels("tiers").inc(usage.loaded)
        for output in finals.values():
            self._sequences.labels(output.finish_reason or "abort").inc()
            if output.metrics.first_token is not None:
                self._ttft.observe(output.metrics.ttft)
            if output.metrics.output_tokens > 1:
                self._tpot.observe(output.metrics.tpot)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return b"".join(generate_latest(registry) for registry in self._registries)


class _EngineCollector(Collector):
    """The engine's figures at the moment they are asked for."""

    def __init__(self, stats: Callable[[], EngineStats], admission: Admission) -> None:
        self._stats = stats
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "running": ("Requests that compute", stats.running),
            "waiting": ("Requests without device blocks", stats.waiting),
            "swapped": ("Those of them whose KV is kept in other tiers, or on its way there", stats.swapped),
            "loading": ("Requests whose KV is on its way into device memory", stats.loading),
            "device_blocks": ("Blocks of the device pool", stats.num_blocks),
            "device_blocks_free": ("Blocks that no request holds, cached ones included", stats.free_blocks),
            "inflight_sequences": ("Sequences that were let in and have not ended", self._admission.inflight),
            "kv_waste": ("Share of the held token slots without a token, but in last blocks", stats.kv_waste),
            "kv_waste_whole": ("The same share, in last blocks too", stats.kv_waste_total),
            "draining": ("1 while the server shuts down", int(self._admission.draining)),
        }
        counters = {
            "steps": ("Steps with something to compute", stats.steps),
            "preemptions": ("Times that a running request lost its blocks", stats.preemptions),
            "swaps": ("Those times that its KV was kept in other tiers", stats.swaps),
            "device_hit_tokens": ("Tokens whose KV was found in device memory", stats.device_hit_tokens),
            "loaded_tokens": ("Tokens whose KV was loaded from other tiers", stats.loaded_tokens),
            "computed_tokens": ("Tokens whose KV was computed", stats.computed_tokens),
            "draft_tokens": ("Tokens that were guessed ahead and computed", stats.draft_tokens),
            "accepted_draft_tokens": ("Those that were right", stats.accepted_tokens),
            "draft_errors": ("Exceptions of what guesses ahead; each one costs guesses alone", stats.draft_errors),
            "hook_errors": ("Exceptions of the KV connector; each one counts as a miss", stats.hook_errors),
            "refused_requests": ("Requests that found no room in the queue", self._admission.refused),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"kvtier_{name}", text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"kvtier_{name}", text, value)
