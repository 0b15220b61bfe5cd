"""Lanes, operations that hop between them, and the alarm that ends them."""

import threading
import time
from collections import Counter

import pytest

from kvtier.store.lanes import Alarm, Lane, Operation, Steps


def test_a_lane_runs_jobs_in_order_on_one_thread() -> None:
    lane, seen = Lane("one", 1), []
    for at in range(100):
        assert lane.submit(lambda at=at: seen.append((at, threading.current_thread().name)))
    assert lane.close(10)
    assert seen == [(at, "one") for at in range(100)]
    assert not lane.submit(print)
    assert lane.close(10)


def test_a_lane_uses_no_more_threads_than_it_may_and_as_many_as_it_needs() -> None:
    lane, gate, running = Lane("some", 3), threading.Event(), Counter()
    lock = threading.Lock()

    def job() -> None:
        with lock:
            running[threading.current_thread().ident] += 1
        assert gate.wait(10)

    for _ in range(9):
        lane.submit(job)
    while len(running) < 3:
        time.sleep(0.001)
    gate.set()
    assert lane.close(10)
    assert len(running) == 3
    assert running.total() == 9


def test_a_job_that_dies_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    lane, done = Lane("sturdy", 1), threading.Event()
    lane.submit(lambda: 1 // 0)
    lane.submit(done.set)
    assert done.wait(10)
    assert lane.close(10)
    assert "a job of sturdy died" in caplog.text


def test_closing_a_lane_that_hangs_says_so() -> None:
    lane, gate = Lane("hangs", 1), threading.Event()
    lane.submit(gate.wait)
    assert not lane.close(0.01)
    gate.set()
    assert lane.close(10)


def test_an_operation_hops_and_returns() -> None:
    first, second = Lane("first", 1), Lane("second", 1)

    def work() -> Steps[list[str]]:
        seen = []
        for lane in (first, second, first):
            yield lane
            seen.append(threading.current_thread().name)
        return seen

    assert Operation(work(), list).start().result(10) == ["first", "second", "first"]
    assert first.close(10)
    assert second.close(10)


def test_an_exception_reaches_the_future() -> None:
    lane = Lane("raises", 1)

    def work() -> Steps[int]:
        yield lane
        raise KeyError("x")

    with pytest.raises(KeyError):
        Operation(work(), lambda: 0).start().result(10)
    assert lane.close(10)


def test_one_that_is_ended_early_cleans_up_at_its_next_hop() -> None:
    lane, gate, cleaned = Lane("late", 1), threading.Event(), threading.Event()
    expired: list[Lane] = []

    def work() -> Steps[str]:
        try:
            yield lane
            gate.wait(10)
            yield lane
            return "never"
        finally:
            cleaned.set()

    operation = Operation(work(), lambda: "partial", expired.append)
    future = operation.start()
    assert not future.cancel()
    operation.expire()
    operation.expire()
    operation.end()
    assert future.result(0) == "partial"
    assert expired == [lane]
    assert not cleaned.is_set()
    gate.set()
    assert cleaned.wait(10)
    assert lane.close(10)


def test_one_that_is_refused_by_a_closed_lane_has_its_other_result() -> None:
    lane, cleaned = Lane("closed", 1), []
    lane.close(1)

    def work() -> Steps[int]:
        try:
            yield lane
            return 1
        finally:
            cleaned.append(True)

    assert Operation(work(), lambda: 0).start().result(0) == 0
    assert cleaned == [True]


def test_exactly_one_of_many_ends_counts() -> None:
    lane = Lane("race", 2)
    for _ in range(200):
        results: list[int] = []

        def work() -> Steps[int]:
            yield lane
            return 1

        operation = Operation(work(), lambda results=results: results.append(0) or 0)
        future = operation.start()
        operation.end()
        assert future.result(10) in (0, 1)
        assert len(results) == (future.result() == 0)
    assert lane.close(10)


def test_the_alarm_calls_in_order_of_time() -> None:
    alarm, seen, done = Alarm(), [], threading.Event()
    now = time.monotonic()
    alarm.at(now + 0.04, done.set)
    alarm.at(now + 0.02, lambda: seen.append("b"))
    alarm.at(now + 0.01, lambda: seen.append("a"))
    alarm.at(now + 0.015, lambda: 1 // 0)
    assert done.wait(10)
    assert seen == ["a", "b"]
    alarm.at(time.monotonic() + 60, done.clear)
    alarm.close()
    alarm.close()
    alarm.at(0, done.clear)
    assert done.is_set()


def test_an_alarm_that_nobody_wants_any_more_may_be_set() -> None:
    # Work may be over before somebody watches it; the last of many such finds nothing else in the list.
    alarm, done = Alarm(), threading.Event()
    for _ in range(1000):
        alarm.at(time.monotonic() + 60, done.clear, lambda: None)
    alarm.at(time.monotonic() + 0.01, done.set)
    assert done.wait(10)
    alarm.close()
