"""The meter of bytes written beside a budget, against the arithmetic done step by step."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.hints import Hint
from kvtier.policies import BudgetedAdmission, WriteMeter

DAY, BUDGET = 86_400, 86_400_000

steps = st.lists(st.tuples(st.integers(-3 * DAY, 3 * DAY), st.integers(0, 2 * BUDGET)), max_size=30)


@given(steps, st.sampled_from([BUDGET, BUDGET // 7]))
def test_the_meter_is_a_bucket_that_leaks_evenly(steps: list[tuple[int, int]], per_day: int) -> None:
    meter, now, owed = WriteMeter(per_day, 0.0, 1e9), 10**9, Fraction(0)
    for seconds, nbytes in steps:
        now += seconds
        # Back in time nothing accrues; more than two days are never owed, and less than nothing neither.
        owed = max(min(owed, Fraction(2 * per_day)) - Fraction(per_day * max(seconds, 0), DAY), Fraction(0)) + nbytes
        assert meter.at(now).ahead == meter.at(now).at(now).ahead
        meter = meter.charged(nbytes, now)
        assert meter.since == now
        assert meter.ahead == pytest.approx(float(owed), rel=1e-9, abs=1e-3)


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, DAY // 3), st.integers(1, BUDGET // 4), st.booleans()),
        max_size=60,
    )
)
def test_several_with_one_meter_keep_to_one_budget(turns: list[tuple[int, int, int, bool]]) -> None:
    clock = [0.0]
    shared = [WriteMeter(BUDGET)]
    policies = [
        BudgetedAdmission(BUDGET, lambda: clock[0], ahead=lambda: shared[0].at(clock[0]).ahead) for _ in range(2)
    ]
    written: list[tuple[float, int]] = []
    for at, (who, seconds, nbytes, restarts) in enumerate(turns):
        clock[0] += seconds
        if restarts:
            policies[who] = BudgetedAdmission(BUDGET, lambda: clock[0], ahead=lambda: shared[0].at(clock[0]).ahead)
        keys = [at.to_bytes(15, "big") + bytes([part]) for part in range(3)]
        for verdict in policies[who].admit(keys, [nbytes] * 3, [Hint(reuse="likely")] * 3):
            if verdict:
                shared[0] = shared[0].charged(nbytes, clock[0])
                written.append((clock[0], nbytes))
    assert sum(nbytes for _, nbytes in written) <= BUDGET * (1 + clock[0] / DAY) + 1
    for start, _ in written:
        assert sum(nbytes for time, nbytes in written if start <= time <= start + DAY) <= 2 * BUDGET + 1


def test_a_budget_that_was_lowered_stops_nobody_for_longer_than_two_days() -> None:
    meter = WriteMeter(1000.0).charged(1000, 0.0)._replace(per_day=10.0)
    assert meter.at(DAY).ahead == 10
    assert meter.at(2 * DAY).ahead == 0
