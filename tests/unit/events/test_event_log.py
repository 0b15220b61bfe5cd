"""EventLog: numbering, bounds, waiting, listening."""

import threading

import pytest

from kvtier.errors import ConfigError
from kvtier.events import EventLog
from kvtier.testing.blocks import chain_refs

REFS = chain_refs(4, salt="a")
OTHERS = chain_refs(4, salt="b")


def test_events_are_numbered_and_each_is_of_one_namespace() -> None:
    log = EventLog(clock=lambda: 7.0)
    log.stored("host", [REFS[0], OTHERS[0], REFS[1]])
    log.removed("nvme", [(REFS[0].ns, REFS[0].key)], "capacity")
    log.cleared("host", None)
    events, gap = log.since(0)
    assert not gap
    assert [(e.sequence, e.kind, e.tier, e.ns, e.reason) for e in events] == [
        (1, "stored", "host", REFS[0].ns, ""),
        (2, "stored", "host", OTHERS[0].ns, ""),
        (3, "removed", "nvme", REFS[0].ns, "capacity"),
        (4, "cleared", "host", None, "cleared"),
    ]
    assert events[0].refs == (REFS[0], REFS[1])
    assert events[0].keys == (REFS[0].key, REFS[1].key)
    assert {event.time for event in events} == {7.0}
    assert log.last == 4


def test_nothing_is_no_event() -> None:
    log = EventLog()
    log.stored("host", [])
    log.removed("host", [], "capacity")
    assert log.last == 0
    assert log.since(0) == ([], False)


def test_what_is_beyond_the_capacity_is_forgotten_and_missed() -> None:
    log = EventLog(4)
    for ref in REFS:
        log.stored("host", [ref, ref])
    assert [event.sequence for event in log.since(2).events] == [3, 4]
    assert not log.since(2).gap
    assert log.since(1).gap
    assert [event.sequence for event in log.since(1).events] == [3, 4]
    assert log.since(99).gap, "a number of another log"


def test_one_event_is_kept_however_large() -> None:
    log = EventLog(1)
    log.stored("host", REFS)
    assert len(log.since(0).events[0].refs) == 4


def test_limit_and_continuation() -> None:
    log = EventLog()
    for ref in REFS:
        log.stored("host", [ref])
    seen, at = [], 0
    while events := log.since(at, 3).events:
        seen += [event.sequence for event in events]
        at = seen[-1]
    assert seen == [1, 2, 3, 4]


def test_wait_returns_as_soon_as_there_is_something() -> None:
    log = EventLog()
    assert not log.wait(0, 0.01)
    thread = threading.Timer(0.05, lambda: log.cleared("host", None))
    thread.start()
    assert log.wait(0, 10)
    thread.join()
    assert log.wait(0)


def test_listeners_are_told_until_they_end() -> None:
    log = EventLog()
    heard: list[int] = []
    end = log.listen(lambda: heard.append(log.last))
    log.cleared("host", None)
    log.stored("host", REFS)
    end()
    log.cleared("host", None)
    assert heard == [1, 2]
    assert log.epoch != EventLog().epoch


def test_a_log_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 blocks: expected at least 1"):
        EventLog(0)
