"""The arithmetic of a bench, against other implementations and by hand."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench import Run, Sample, Slo, figures, parse_slo
from kvtier.bench.figures import statistics_of
from kvtier.bench.targets import Usage
from kvtier.errors import ConfigError


def sample(sent=0.0, ttft=0.1, gaps=(0.02, 0.04), is_first=True, usage=None, **more):
    end = sent + ttft + sum(gaps)
    return Sample(is_first, more.pop("due", sent), sent, end, sent + ttft, tuple(gaps), usage, **more)


def failed(kind="timeout"):
    return Sample(True, 0.0, 0.0, 1.0, error=kind, message="no")


def run(*samples, seconds=10.0, is_timed=False):
    return Run("model", "place", len(samples), is_timed, list(samples), seconds)


def values(found):
    return {figure.name: figure.value for figure in found if not figure.params}


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200))
def test_percentiles_are_those_of_everybody(numbers):
    found = statistics_of(numbers)
    quantiles = statistics.quantiles(numbers, n=100, method="inclusive")
    assert found["mean"] == pytest.approx(statistics.fmean(numbers))
    for percent in (50, 90, 99):
        assert found[f"p{percent}"] == pytest.approx(quantiles[percent - 1])
        assert found[f"p{percent}"] == pytest.approx(np.percentile(numbers, percent))


def test_of_nothing_there_are_no_percentiles_and_of_one_all_are_it():
    assert statistics_of([]) == {}
    assert set(statistics_of([3.0]).values()) == {3.0}


def test_times_are_measured_from_when_it_was_sent():
    one = sample(sent=2.0, ttft=0.5, gaps=(0.1, 0.3), usage=Usage(9, 5, None, None), due=1.5)
    found = values(figures(run(one, is_timed=True)))
    assert found["bench.ttft.p50"] == pytest.approx(0.5)
    assert found["bench.tpot.mean"] == pytest.approx(0.4 / 4)
    assert found["bench.itl.mean"] == pytest.approx(0.2)
    assert found["bench.latency.p99"] == pytest.approx(0.9)
    assert found["bench.late.p90"] == pytest.approx(0.5)
    assert "bench.late.p90" not in values(figures(run(one)))


def test_first_turns_and_later_ones_are_told_apart_only_where_there_are_both():
    early, late = sample(ttft=1.0), sample(ttft=0.2, is_first=False)
    found = values(figures(run(early, late)))
    assert (found["bench.ttft.first.mean"], found["bench.ttft.later.mean"]) == pytest.approx((1.0, 0.2))
    assert found["bench.ttft.mean"] == pytest.approx(0.6)
    assert not [name for name in values(figures(run(early))) if ".first" in name or ".later" in name]


def test_an_answer_of_one_token_has_no_time_between_tokens():
    single = sample(gaps=(), usage=Usage(9, 1, None, None))
    assert not [name for name in values(figures(run(single))) if "tpot" in name or "itl" in name]
    assert values(figures(run(single, sample())))["bench.tpot.mean"] == pytest.approx(0.03)


def test_throughput_counts_what_was_answered():
    answered = [sample(usage=Usage(100, 20, None, None))] * 4
    found = values(figures(run(*answered, failed(), failed(), seconds=8.0)))
    assert found["bench.requests.rate"] == pytest.approx(0.5)
    assert found["bench.tokens.output.rate"] == pytest.approx(10.0)
    assert found["bench.tokens.prompt.rate"] == pytest.approx(50.0)
    assert (found["bench.requests.answered"], found["bench.requests.failed"]) == (4, 2)


def test_failures_are_counted_by_kind():
    found = figures(run(sample(), failed("http_429"), failed("timeout"), failed("http_429")))
    kinds = {figure.params["kind"]: figure.value for figure in found if figure.params}
    assert kinds == {"http_429": 2, "timeout": 1}


@given(
    st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1), st.booleans()), min_size=1, max_size=50),
    st.floats(0.001, 1),
    st.floats(0.001, 1),
)
def test_goodput_is_what_met_every_limit(rows, ttft, tpot):
    samples = [sample(ttft=a, gaps=(b, b)) if answered else failed() for a, b, answered in rows]
    found = values(figures(run(*samples), Slo(ttft=ttft, tpot=tpot)))
    held = np.array([(one.ttft <= ttft) & (one.tpot <= tpot) for one in samples if one.error is None], dtype=bool)
    assert found["bench.goodput.rate"] == pytest.approx(held.sum() / 10.0)
    assert found["bench.goodput.share"] == pytest.approx(held.sum() / len(rows))


def test_what_was_found_is_a_share_of_the_prompts_that_say_it():
    told = [sample(usage=Usage(100, 3, 0, 0)), sample(usage=Usage(300, 3, 240, 60), is_first=False)]
    found = values(figures(run(*told, sample(usage=Usage(500, 3, None, None)))))
    assert found["bench.tokens.cached"] == pytest.approx(240 / 400)
    assert found["bench.tokens.cached.first"] == 0
    assert found["bench.tokens.cached.later"] == pytest.approx(0.8)
    assert found["bench.tokens.loaded.later"] == pytest.approx(0.2)
    assert "bench.tokens.cached" not in values(figures(run(sample(usage=Usage(500, 3, None, None)))))


def test_without_usage_pieces_are_counted():
    assert sample(gaps=(0.1, 0.1)).output_tokens == 3
    assert failed().output_tokens == 0


def test_a_run_without_an_answer_has_figures_too():
    found = values(figures(run(failed()), Slo(ttft=1.0)))
    assert (found["bench.requests.rate"], found["bench.goodput.share"], found["bench.requests.failed"]) == (0, 0, 1)


def test_limits_are_understood():
    assert parse_slo("ttft=200ms, tpot=0.05s,latency=5s") == Slo(0.2, 0.05, 5.0)
    assert parse_slo("tpot=50ms") == Slo(tpot=0.05)
    assert str(Slo(ttft=0.2, latency=5.0)) == "ttft at most 200 ms, latency at most 5000 ms"


def test_one_limit_is_not_given_twice():
    with pytest.raises(ConfigError, match="slo 'ttft=1s, ttft=2s': ttft has two limits"):
        parse_slo("ttft=1s, ttft=2s")


@pytest.mark.parametrize(
    "text", ["ttft", "ttft=200", "ttft=ms", "ttft=-1s", "itl=5ms", "ttft=1h", "", "ttft=nans", "ttft=infs"]
)
def test_limits_that_are_none_are_named(text):
    with pytest.raises(ConfigError, match=r"expected such as ttft=200ms,tpot=0\.05s,latency=5s"):
        parse_slo(text)
