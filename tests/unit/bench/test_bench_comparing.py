"""How sure a ratio is: against the distribution itself, against chance, and on a machine that is slow for a while."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench import Rounds, Run, Sample, Slo, compared
from kvtier.bench.comparing import interval


def run(*ttfts, seconds=10.0, place="here", **more):
    samples = [Sample(True, 0.0, 0.0, ttft + 0.1, ttft, (0.1,)) for ttft in ttfts]
    return Run("model", place, len(samples), False, samples, seconds, **more)


def rows(*rounds, slo=None):
    """Of pairs of runs, or of runs."""
    runs = [list(one) for one in zip(*rounds, strict=True)] if isinstance(rounds[0], tuple) else [list(rounds)]
    planned = sum(one.planned for one in runs[0])
    return {row["name"]: row for row in compared(Rounds(planned, runs), slo)}


def test_a_ratio_above_one_means_that_the_first_is_better():
    found = rows((run(0.1, seconds=5.0), run(0.4, place="other")), slo=Slo(ttft=0.05))
    ttft = found["bench.ttft.p50"]
    assert (ttft["value"], ttft["peer_value"], ttft["ratio"]) == pytest.approx((0.1, 0.4, 4.0))
    assert found["bench.requests.rate"]["ratio"] == pytest.approx(2.0)
    assert ttft["peer"] == "other"
    # Of nothing there is no multiple.
    assert (found["bench.goodput.rate"]["value"], found["bench.goodput.rate"]["ratio"]) == (0, None)


def test_alone_there_is_nothing_beside():
    row = rows(run(0.1), run(0.3))["bench.ttft.mean"]
    assert row.pop("value") == pytest.approx(0.2)
    assert row == {
        "name": "bench.ttft.mean", "params": {}, "unit": "s", "peer": None, "peer_value": None, "ratio": None,
        "interval": None,
    }  # fmt: skip


@pytest.mark.parametrize("rounds", [2, 3, 5, 11, 12, 20, 60])
def test_the_factor_is_student_s(rounds):
    """The density, integrated between the bounds that an interval's width stands for."""
    logs = np.linspace(-0.1, 0.1, rounds)
    low, high = interval(1.0, np.exp(logs).tolist())
    t = math.log(high) / (logs.std(ddof=1) / math.sqrt(rounds))
    assert math.log(low) == pytest.approx(-math.log(high))
    degrees = rounds - 1
    x = np.linspace(-t, t, 200_001)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    assert np.trapezoid(scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2), x) == pytest.approx(0.95, abs=2e-4)


@pytest.mark.parametrize("rounds", [2, 3, 8])
def test_of_a_hundred_intervals_ninety_five_hold_the_truth(rounds):
    dice, held, times = random.Random(rounds), 0, 4000
    for _ in range(times):
        ratios = [1.5 * math.exp(dice.gauss(0, 0.2)) for _ in range(rounds)]
        low, high = interval(math.exp(sum(map(math.log, ratios)) / rounds), ratios)
        held += low <= 1.5 <= high
    # Four standard deviations of so many throws.
    assert held / times == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / times))


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=20), st.floats(0.01, 100))
def test_twice_is_as_far_from_one_as_half(ratios, ratio):
    low, high = interval(ratio, ratios)
    assert low <= ratio <= high
    mirrored = interval(1 / ratio, [1 / one for one in ratios])
    assert mirrored == pytest.approx((1 / high, 1 / low))


def test_a_machine_that_is_slow_for_one_run_proves_nothing():
    """Half as fast while one of six runs was made: each run agrees with itself, and one round would be believed."""
    fast, slow = (0.52, 0.53, 0.54), (0.93, 0.94, 0.95)
    assert rows((run(*slow), run(*fast)))["bench.ttft.p50"]["ratio"] < 0.6
    low, high = rows((run(*slow), run(*fast)), (run(*fast), run(*fast)), (run(*fast), run(*fast)))["bench.ttft.p50"][
        "interval"
    ]
    assert low < 1 < high


def test_what_every_round_shows_is_shown():
    pairs = [(run(0.2 * drift), run(0.7 * drift)) for drift in (1.0, 1.8, 1.3)]
    low, high = rows(*pairs)["bench.ttft.p50"]["interval"]
    assert (low, high) == pytest.approx((3.5, 3.5))


def test_one_round_has_no_bounds_and_a_half_one_is_none():
    whole, half = (run(0.1), run(0.2)), (run(0.1), run(0.2, interrupted=True))
    assert rows(whole)["bench.ttft.p50"]["interval"] is None
    assert rows(whole, half)["bench.ttft.p50"]["interval"] is None
    assert rows(whole, half, whole)["bench.ttft.p50"]["interval"] == pytest.approx((2.0, 2.0))


def test_rounds_together_are_one_run():
    found = rows((run(0.1, seconds=1.0), run(0.5, seconds=4.0)), (run(0.3, seconds=3.0), run(0.5, seconds=4.0)))
    assert found["bench.ttft.mean"]["value"] == pytest.approx(0.2)
    assert found["bench.requests.rate"]["value"] == pytest.approx(2 / 4.0)
    assert found["bench.requests.answered"]["value"] == 2
