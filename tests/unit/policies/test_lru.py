"""LruPolicy: misuse, and what it costs."""

import pytest

from kvtier.errors import LeaseError
from kvtier.policies import LruPolicy

KEYS = [bytes([at]) * 16 for at in range(4)]


def test_misuse_is_refused() -> None:
    policy = LruPolicy()
    policy.insert([1, 0], KEYS[:2], [0, None])
    for misuse in (
        lambda: policy.remove([0]),
        lambda: policy.remove([7]),
        lambda: policy.insert([1], KEYS[2:3], [None]),
        lambda: policy.insert([2, 2], KEYS[2:], [None, None]),
        lambda: policy.unpin([1]),
        lambda: policy.hit([3]),
        lambda: policy.adopt(1, 0),
    ):
        with pytest.raises(LeaseError, match="slot"):
            misuse()
    assert policy.victims(2) == [1, 0]


def test_a_slot_takes_few_bytes_and_hints_are_kept_only_where_they_say_something() -> None:
    policy = LruPolicy()
    slots = range(10_000)
    policy.insert(slots, [at.to_bytes(16, "little") for at in slots], [None] * len(slots))
    assert policy.nbytes < 64 * len(slots)
    assert not policy._expiry.hints
