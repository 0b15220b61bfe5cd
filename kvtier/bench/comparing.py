"""Two targets under the same load: ratios, and between what bounds they lie."""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from kvtier.bench.figures import Figure, Slo, figures
from kvtier.bench.rounds import Rounds

__all__ = ["compared", "interval"]

_Key: TypeAlias = tuple[Hashable, ...]

# Of Student's distribution with 1, 2, … degrees of freedom: 95 % lie between this and its negative.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def compared(rounds: Rounds, slo: Slo | None = None) -> list[dict[str, Any]]:
    """Results as benchmarks write them, each beside the peer's where there is one; ratio > 1 means that ours is better.

    Args:
        rounds: of one target, or of two; two rounds or more of both give each ratio its interval.
        slo: limits of the goodput.
    """
    ours, *others = rounds.totals
    theirs = others[0] if others else None
    beside = {} if theirs is None else _by_key(figures(theirs, slo))
    pairs = zip(*rounds.runs, strict=False) if theirs is not None else ()
    by_round = [
        (_by_key(figures(one, slo)), _by_key(figures(other, slo)))
        for one, other in pairs
        if not (one.interrupted or other.interrupted)
    ]
    rows = []
    for figure in figures(ours, slo):
        key = _key(figure)
        ratio = _ratio(figure, beside.get(key))
        ratios = [_ratio(one[key], other.get(key)) for one, other in by_round if key in one]
        rows.append(
            {
                "name": figure.name,
                "params": dict(figure.params),
                "value": figure.value,
                "unit": figure.unit,
                "peer": None if theirs is None else theirs.place,
                "peer_value": beside[key].value if key in beside else None,
                "ratio": ratio,
                "interval": None if ratio is None else interval(ratio, [one for one in ratios if one is not None]),
            }
        )
    return rows


def interval(ratio: float, ratios: Sequence[float]) -> tuple[float, float] | None:
    """Where a ratio lies with 95 % confidence, as far as its rounds differ; None of fewer than two.

    Student's t over the logarithms of the rounds' ratios, so that 2 x and 0.5 x are equally far from 1.

    Args:
        ratio: of all rounds together.
        ratios: of each.
    """
    if len(ratios) < 2:
        return None
    logs = [math.log(one) for one in ratios]
    factor = math.exp(_student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)))
    return ratio / factor, ratio * factor


def _student(degrees: int) -> float:
    """Beyond the table, the first terms of Fisher's expansion about the normal distribution."""
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _key(figure: Figure) -> _Key:
    return (figure.name, *figure.params.items())


def _by_key(found: Sequence[Figure]) -> Mapping[_Key, Figure]:
    return {_key(figure): figure for figure in found}


def _ratio(figure: Figure, other: Figure | None) -> float | None:
    if other is None or not (figure.value and other.value):
        return None
    return other.value / figure.value if figure.better == "lower" else figure.value / other.value
