"""Prefetch: the next turn comes after the usual gap."""

import pytest

from kvtier.errors import CapacityError
from kvtier.policies import NextTurn, NoPrefetch

KEYS = [b"a" * 16, b"b" * 16]


def test_nothing_is_due_without_a_policy() -> None:
    policy = NoPrefetch()
    policy.turn_ended("s", KEYS, 0)
    policy.ended("s")
    assert policy.due(1e9) == []


def test_a_session_follows_its_own_gaps() -> None:
    policy = NextTurn(lead_seconds=5)
    for now in (0, 100, 200, 300):
        policy.turn_ended("s", KEYS, now)
    assert policy.due(394) == []
    assert policy.due(395) == [("s", KEYS)]
    assert policy.due(500) == [], "once per turn"
    policy.turn_ended("s", KEYS[:1], 500)
    assert policy.due(594) == []
    assert policy.due(595) == [("s", KEYS[:1])]


def test_a_new_session_follows_all_others() -> None:
    policy = NextTurn(lead_seconds=0)
    policy.turn_ended("first", KEYS, 0)
    assert policy.due(1e9) == [], "no gap is known yet"
    for gap in (10, 20, 90):
        policy.turn_ended(f"s{gap}", KEYS, 0)
        policy.turn_ended(f"s{gap}", KEYS, gap)
        policy.ended(f"s{gap}")
    policy.turn_ended("new", KEYS, 1000)
    assert policy.due(1019) == []
    assert policy.due(1020) == [("new", KEYS)]


def test_an_ended_or_forgotten_session_is_never_due() -> None:
    policy = NextTurn(lead_seconds=0, capacity=2)
    for session in "abc":
        policy.turn_ended(session, KEYS, 0)
    policy.turn_ended("b", KEYS, 10)
    policy.turn_ended("c", KEYS, 10)
    policy.ended("b")
    assert policy.due(1e9) == [("c", KEYS)]
    policy.turn_ended("a", KEYS, 2000)
    assert policy.due(2009) == []
    assert policy.due(2010) == [("a", KEYS)], "its first turn was forgotten: no gap of 2000 s"
    with pytest.raises(CapacityError, match="0 sessions"):
        NextTurn(capacity=0)


def test_memory_is_bounded() -> None:
    policy = NextTurn(lead_seconds=0, capacity=10)
    for turn in range(5000):
        policy.turn_ended(f"s{turn % 30}", KEYS, turn)
    assert len(policy._sessions) <= 10
    assert len(policy._queue) <= 21


def test_so_are_the_keys_of_all_sessions_together() -> None:
    policy = NextTurn(lead_seconds=0, most_keys=100)
    for turn in range(300):
        policy.turn_ended(f"s{turn % 30}", [bytes([at]) for at in range(turn % 50)], turn)
        if turn % 7 == 0:
            policy.ended(f"s{turn % 30}")
        held = sum(len(state.keys) for state in policy._sessions.values())
        assert held == policy._count <= 100
    policy.turn_ended("longer than may be", [bytes([at]) for at in range(101)], 300)
    assert policy._sessions == {}
