"""Every policy of the registry passes the public suite."""

from collections.abc import Callable

from kvtier.policies import POLICIES, EvictionPolicy, make_policy
from kvtier.testing import PolicySuite

CAPACITY = 100


class TestLru(PolicySuite):
    name = "lru"

    def make_policy(self, clock: Callable[[], float]) -> EvictionPolicy:
        return make_policy(self.name, CAPACITY, clock)


class TestArc(TestLru):
    name = "arc"


class TestClock2(TestLru):
    name = "clock2"


class TestS3Fifo(TestLru):
    name = "s3fifo"
    recency = False  # first in, first out: one use does not save a block on probation


def test_every_built_in_policy_is_here() -> None:
    tested = {suite.name for suite in (TestLru, TestArc, TestClock2, TestS3Fifo)}
    assert tested <= set(POLICIES.names())
    assert tested == {"lru", "arc", "clock2", "s3fifo"}
