"""What came of a run, as figures with names: percentiles, throughput, goodput, tokens that were found, failures."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from kvtier.bench.driving import Run, Sample
from kvtier.errors import ConfigError

__all__ = ["STATISTICS", "Figure", "Slo", "figures", "parse_slo", "statistics_of"]

_Better: TypeAlias = Literal["lower", "higher"]

STATISTICS = ("mean", "p50", "p90", "p99")

_UNITS: Mapping[str, float] = {"ms": 1e-3, "s": 1.0}
_EXPECTED = "such as ttft=200ms,tpot=0.05s,latency=5s"


class Figure(NamedTuple):
    """One result. better: which of two it is."""

    name: str
    value: float
    unit: str
    better: _Better
    params: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Slo:
    """What makes an answer a good one: seconds that must not be exceeded; None: does not matter."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    def __str__(self) -> str:
        limits = ((name, getattr(self, name)) for name in self.__slots__)
        return ", ".join(f"{name} at most {1e3 * limit:g} ms" for name, limit in limits if limit is not None)

    def is_met(self, sample: Sample) -> bool:
        """Whether it was answered in time (a failure never is)."""
        if sample.error is not None:
            return False
        limits = ((getattr(sample, name), getattr(self, name)) for name in self.__slots__)
        return all(limit is None or seconds <= limit for seconds, limit in limits)


def parse_slo(text: str) -> Slo:
    """Understand limits as people write them.

    Args:
        text: `ttft=200ms,tpot=0.05s,latency=5s`, or fewer.

    Raises:
        ConfigError: it is none.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name in limits:
            raise ConfigError(f"slo {text!r}: {name} has two limits; expected one, {_EXPECTED}")
        number = value.rstrip("ms")
        unit = _UNITS.get(value[len(number) :])
        try:
            limits[name] = float(number) * (unit or 0.0)
        except ValueError as error:
            raise ConfigError(f"slo {part.strip()!r}: expected {_EXPECTED}") from error
        if name not in Slo.__slots__ or not 0 < limits[name] < float("inf"):
            raise ConfigError(f"slo {part.strip()!r}: expected {_EXPECTED}")
    return Slo(**limits)


def statistics_of(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles (linear between the two nearest); nothing of nothing."""
    if not values:
        return {}
    found = np.percentile(values, [50, 90, 99])
    return dict(zip(STATISTICS, [float(np.mean(values)), *map(float, found)], strict=True))


def figures(run: Run, slo: Slo | None = None) -> list[Figure]:
    """All figures of a run; those that nothing was measured of are absent.

    Args:
        run: what happened.
        slo: adds the goodput.
    """
    return [*_times(run), *_rates(run, slo), *_tokens(run), *_failures(run)]


_TIMES: Mapping[str, Callable[[Sample], float]] = {
    "ttft": lambda sample: sample.ttft,
    "tpot": lambda sample: sample.tpot,
    "latency": lambda sample: sample.latency,
}


def _times(run: Run) -> Iterator[Figure]:
    for part, samples in _parts(run).items():
        for name, measure in _TIMES.items():
            # There is no time between tokens in an answer of one.
            measured = [measure(one) for one in samples if name != "tpot" or one.output_tokens > 1]
            yield from _spread(f"bench.{name}{part}", measured)
    answered = run.answered
    yield from _spread("bench.itl", [gap for sample in answered for gap in sample.gaps])
    if run.is_timed:
        yield from _spread("bench.late", [sample.sent - sample.due for sample in run.samples])


def _parts(run: Run) -> dict[str, list[Sample]]:
    """All that was answered, and, where there is a difference, first turns and later ones."""
    answered = run.answered
    first = [sample for sample in answered if sample.is_first]
    later = [sample for sample in answered if not sample.is_first]
    return {"": answered, ".first": first, ".later": later} if first and later else {"": answered}


def _spread(name: str, values: Sequence[float]) -> Iterator[Figure]:
    for statistic, value in statistics_of(values).items():
        yield Figure(f"{name}.{statistic}", value, "s", "lower")


def _rates(run: Run, slo: Slo | None) -> Iterator[Figure]:
    answered, seconds = run.answered, run.seconds
    if not seconds:
        return
    yield Figure("bench.requests.rate", len(answered) / seconds, "requests/s", "higher")
    yield Figure("bench.tokens.output.rate", sum(one.output_tokens for one in answered) / seconds, "tokens/s", "higher")
    if prompts := [one.usage.prompt_tokens for one in answered if one.usage is not None]:
        yield Figure("bench.tokens.prompt.rate", sum(prompts) / seconds, "tokens/s", "higher")
    if slo is not None:
        good = sum(map(slo.is_met, run.samples))
        yield Figure("bench.goodput.rate", good / seconds, "requests/s", "higher")
        yield Figure("bench.goodput.share", good / len(run.samples) if run.samples else 0.0, "share", "higher")


def _tokens(run: Run) -> Iterator[Figure]:
    """Of the prompts' tokens, the share that was found, and that was found below device memory."""
    for part, samples in _parts(run).items():
        usages = [sample.usage for sample in samples if sample.usage is not None]
        for name, field in (("cached", "cached_tokens"), ("loaded", "loaded_tokens")):
            told = [usage for usage in usages if getattr(usage, field) is not None]
            if prompts := sum(usage.prompt_tokens for usage in told):
                found = sum(getattr(usage, field) for usage in told)
                yield Figure(f"bench.tokens.{name}{part}", found / prompts, "share", "higher")


def _failures(run: Run) -> Iterator[Figure]:
    yield Figure("bench.requests.answered", len(run.answered), "requests", "higher")
    yield Figure("bench.requests.failed", len(run.samples) - len(run.answered), "requests", "lower")
    for kind, count in sorted(Counter(one.error for one in run.samples if one.error is not None).items()):
        yield Figure("bench.requests.failed", count, "requests", "lower", {"kind": kind})
