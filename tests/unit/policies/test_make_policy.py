"""Policies by name."""

import pytest

from kvtier.errors import CapacityError, ConfigError
from kvtier.policies import (
    ArcPolicy,
    Clock2Policy,
    LruPolicy,
    NextTurn,
    NoPrefetch,
    S3FifoPolicy,
    SecondTouch,
    make_admission,
    make_policy,
    make_prefetch,
)


def test_built_in_names_and_third_parties() -> None:
    kinds = {"lru": LruPolicy, "arc": ArcPolicy, "clock2": Clock2Policy, "s3fifo": S3FifoPolicy}
    assert {name: type(make_policy(name, 4)) for name in kinds} == kinds
    assert isinstance(make_policy("kvtier.policies.arc:ArcPolicy", 4), ArcPolicy)


def test_unknown_names_and_absurd_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'arc'"):
        make_policy("arcc", 4)
    with pytest.raises(CapacityError, match="policy 'lru' for 0 blocks"):
        make_policy("lru", 0)


def test_prefetch_policies_by_name_and_from_elsewhere() -> None:
    kinds = {"none": NoPrefetch, "next_turn": NextTurn, "kvtier.policies.prefetch:NextTurn": NextTurn}
    assert {name: type(make_prefetch(name)) for name in kinds} == kinds
    with pytest.raises(ConfigError, match="did you mean 'next_turn'"):
        make_prefetch("next_tern")
    with pytest.raises(ConfigError, match="called without arguments"):
        make_prefetch("kvtier.policies.arc:ArcPolicy")
    with pytest.raises(ConfigError, match=r"is a OrderedDict: expected a class of kvtier\.policies\.PrefetchPolicy"):
        make_prefetch("collections:OrderedDict")


def test_admission_policies_by_name_and_from_elsewhere() -> None:
    assert isinstance(make_admission("second_touch"), SecondTouch)
    assert isinstance(make_admission("kvtier.policies.admission:SecondTouch"), SecondTouch)
    with pytest.raises(ConfigError, match="admission 'always': unknown, expected one of second_touch or"):
        make_admission("always")


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_ghosts_are_bounded_by_the_capacity(name: str) -> None:
    capacity = 50
    policy = make_policy(name, capacity)
    empty = policy.nbytes
    for at in range(2000):
        slot = at % capacity
        if at >= capacity:
            policy.remove(policy.victims(1), evicted=True)
            slot = next(slot for slot in range(capacity) if not policy._slots.owner[slot])
        policy.insert([slot], [at.to_bytes(16, "little")], [None])
        if at % 3 == 0:
            policy.hit([slot])
    ghosts = [value for value in vars(policy._order).values() if type(value).__name__ == "GhostList"]
    assert 0 < sum(map(len, ghosts)) <= 2 * capacity
    assert policy.nbytes > empty
    assert policy._order.nbytes >= sum(map(len, ghosts)) * 49
