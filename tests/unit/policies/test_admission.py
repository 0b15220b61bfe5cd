"""Admission: second touch, and a budget of bytes."""

import math

import pytest

from kvtier.errors import CapacityError
from kvtier.hints import NO_HINT, Hint
from kvtier.policies import AlwaysAdmit, BudgetedAdmission, SecondTouch

DAY = 86_400
KEYS = [bytes([at]) * 16 for at in range(50)]


def ask(policy, keys, hint=NO_HINT, nbytes=1) -> list[bool]:
    return policy.admit(keys, [nbytes] * len(keys), [hint] * len(keys))


def test_always() -> None:
    assert ask(AlwaysAdmit(), KEYS[:3]) == [True] * 3


def test_second_touch() -> None:
    policy = SecondTouch(10)
    assert ask(policy, [KEYS[0], KEYS[1], KEYS[0]]) == [False, False, True]
    assert ask(policy, [KEYS[1]]) == [True]
    assert ask(policy, KEYS[2:4], Hint(reuse="likely")) == [True, True]
    assert ask(policy, [KEYS[4]] * 3, Hint(reuse="none")) == [False] * 3


def test_second_touch_forgets_the_oldest() -> None:
    policy = SecondTouch(10)
    ask(policy, KEYS[:20])
    assert ask(policy, KEYS[:20]) == [False] * 20, "each is forgotten before it comes again"
    assert ask(policy, KEYS[10:20]) == [True] * 10
    with pytest.raises(CapacityError, match="0 keys"):
        SecondTouch(0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_that_runs_ahead_of_time_asks_for_a_second_touch() -> None:
    clock = Clock()
    policy = BudgetedAdmission(2400, clock)
    assert ask(policy, KEYS[:1], nbytes=100) == [True]
    assert not policy.tight
    assert ask(policy, KEYS[1:4], nbytes=100) == [True, False, False]
    assert policy.tight
    assert ask(policy, KEYS[2:3], nbytes=100) == [True], "touched twice"
    assert policy.written == 300
    clock.now += DAY / 24 * 2
    assert not policy.tight
    assert ask(policy, KEYS[5:6], nbytes=100) == [True]
    assert ask(policy, KEYS[6:7], Hint(reuse="none")) == [False]


class Ready:
    """Admits these keys, and knows which it was asked about."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = set(keys)
        self.asked: list[bytes] = []

    def admit(self, keys, nbytes, hints) -> list[bool]:
        self.asked += keys
        return [key in self.keys for key in keys]


def test_while_a_budget_runs_ahead_a_policy_of_ones_own_is_asked() -> None:
    policy = Ready(KEYS[2:3])
    budget = BudgetedAdmission(2400, Clock(), policy=policy)
    assert ask(budget, KEYS[:4], nbytes=100) == [True, True, True, False]
    assert ask(budget, KEYS[:4], nbytes=100) == [False, False, True, False]
    assert policy.asked == KEYS[:4] * 2


def test_a_strict_budget_always_asks_its_policy_and_stops_a_day_ahead() -> None:
    clock = Clock()
    budget = BudgetedAdmission(1000, clock, policy=Ready(KEYS[:20]), strict=True)
    assert ask(budget, KEYS[20:30]) == [False] * 10
    assert ask(budget, KEYS[:12], nbytes=100) == [True] * 10 + [False] * 2
    clock.now += DAY
    assert ask(budget, KEYS[12:14], nbytes=100) == [True, True]
    assert ask(budget, KEYS[40:41]) == [False]


@pytest.mark.parametrize("ahead", [50.0, 150.0, math.inf])
def test_what_has_no_bytes_is_admitted_however_far_ahead_the_others_are(ahead: float) -> None:
    budget = BudgetedAdmission(100, Clock(), ahead=lambda: ahead)
    assert ask(budget, KEYS[:1], Hint(reuse="likely"), nbytes=0) == [True]
    assert ask(budget, KEYS[1:2], nbytes=0) == [False]
    assert ask(budget, KEYS[1:2], nbytes=0) == [True], "touched twice"
    assert ask(budget, KEYS[2:3], Hint(reuse="none"), nbytes=0) == [False]
    weighed = budget.weigh(KEYS[3:4], [60], [Hint(reuse="likely")])
    assert weighed == ([True], [False])
    assert budget.written == 0


def test_a_budget_is_a_limit() -> None:
    clock = Clock()
    policy = BudgetedAdmission(1000, clock)
    likely = Hint(reuse="likely")
    for day in range(5):
        before = policy.written
        for hour in range(24):
            clock.now = DAY * (day + hour / 24)
            ask(policy, KEYS, likely, nbytes=7)
        assert policy.written - before <= 2000
        assert policy.written <= 1000 * (day + 2)
    assert policy.written > 1000 * 4
    with pytest.raises(CapacityError, match="0 bytes per day"):
        BudgetedAdmission(0, clock)
