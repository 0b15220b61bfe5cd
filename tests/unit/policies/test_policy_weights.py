"""However many different priorities there are, a policy keeps few classes, and strict ones stay strict."""

import math

from kvtier.hints import Hint
from kvtier.policies import LruPolicy


def test_many_priorities_share_few_classes() -> None:
    now = [0.0]
    policy = LruPolicy(clock=lambda: now[0])
    count = 40_000  # more than a queue's number can count
    for slot in range(count):
        policy.insert([slot], [b"%015d" % slot], [None], [Hint(priority=2 + slot / 1000, priority_ttl=1e6)])
    policy.insert([count], [b"strict"], [None], [Hint(priority=math.inf, priority_ttl=1e6)])
    policy.insert([count + 1], [b"least"], [None], [Hint(priority=5e-324, priority_ttl=1e6)])
    assert len(policy._classes) <= 66
    now[0] = 100.0
    victims = policy.victims(count + 2)
    assert sorted(victims) == list(range(count + 2))
    assert victims[-1] == count
    policy.remove(victims)
    assert policy._classes == {}


def test_few_priorities_are_exact() -> None:
    now = [0.0]
    policy = LruPolicy(clock=lambda: now[0])
    for slot in range(60):
        now[0] = slot * 1e-6
        policy.insert([slot], [b"%015d" % slot], [None], [Hint(priority=2 + slot / 1e3, priority_ttl=1e6)])
    now[0] = 1000.0
    assert policy.victims(60) == list(range(60))
