"""The circuit breaker, on a clock that the test moves."""

from kvtier.breaker import Breaker


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened() -> tuple[Breaker, _Clock]:
    clock = _Clock()
    breaker = Breaker(3, 5.0, clock)
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    return breaker, clock


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(3, 5.0, _Clock())
    for _ in range(10):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.allows()
    assert breaker.due
    assert not breaker.is_open


def test_one_trial_per_pause() -> None:
    breaker, clock = opened()
    assert not breaker.allows()
    assert not breaker.due
    clock.now = 5.0
    # To ask whether one is due takes none.
    assert breaker.due
    assert breaker.due
    assert [breaker.allows() for _ in range(4)] == [True, False, False, False]
    clock.now = 10.0
    assert breaker.allows()


def test_a_failed_trial_doubles_the_pause_up_to_a_limit() -> None:
    breaker, clock = opened()
    pauses = []
    for _ in range(7):
        start = clock.now
        while not breaker.allows():
            clock.now += 1.0
        pauses.append(clock.now - start)
        breaker.failed()
    assert pauses == [5, 10, 20, 40, 80, 80, 80]


def test_a_trial_that_succeeds_closes_it_and_forgets_the_pause() -> None:
    breaker, clock = opened()
    clock.now = 5.0
    assert breaker.allows()
    breaker.failed()
    breaker.succeeded()
    assert all(breaker.allows() for _ in range(5))
    for _ in range(3):
        breaker.failed()
    clock.now += 5.0
    assert breaker.allows()


def test_what_fails_after_it_opened_puts_no_trial_off() -> None:
    breaker, clock = opened()
    # Under way when it opened, or of somebody who does not ask.
    for clock.now in (0.0, 0.0, 2.0, 4.9):
        assert not breaker.failed()
    clock.now = 5.0
    assert breaker.allows()
    clock.now = 6.0
    breaker.failed()
    for clock.now in (7.0, 15.9):
        breaker.failed()
    assert not breaker.allows()
    clock.now = 16.0
    assert breaker.allows()


def test_who_does_not_ask_and_fails_when_a_trial_is_due_is_the_trial() -> None:
    breaker, clock = opened()
    clock.now = 5.0
    breaker.failed()
    clock.now = 14.9
    assert not breaker.due
    clock.now = 15.0
    assert breaker.due


def test_an_answer_closes_it_for_one_more_failure_and_forgets_no_pause() -> None:
    breaker, clock = opened()
    clock.now = 5.0
    breaker.failed()
    clock.now = 15.0
    assert breaker.allows()
    breaker.answered()
    assert breaker.allows()
    assert breaker.failed()
    clock.now = 24.9
    assert not breaker.allows()
    clock.now = 25.0
    assert breaker.allows()
    breaker.succeeded()
    # Of a closed one nothing changes.
    breaker.failed()
    breaker.answered()
    assert [breaker.failed(), breaker.failed()] == [False, True]
