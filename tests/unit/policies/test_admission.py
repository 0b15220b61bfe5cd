"""Admission: second touch, and a budget of bytes."""

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
