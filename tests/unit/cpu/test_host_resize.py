"""The host tier's capacity and policy at run time."""

import os
import threading

import pytest

from kvtier.cpu import HostTier
from kvtier.errors import CapacityError
from kvtier.hints import Hint
from kvtier.policies import LruPolicy, make_policy
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import Handle, Status

PAGE = 4096
SIZE = 2 * PAGE


def tier_of(blocks: int, limit: int | None = None) -> HostTier:
    return HostTier(blocks * SIZE, limit_bytes=None if limit is None else limit * SIZE)


def ready(tier: HostTier, refs) -> list[bool]:
    return [status is Status.OK for status in tier.contains([ref.key for ref in refs]).wait().statuses]


def resident(tier: HostTier) -> int:
    return os.fstat(tier._slab.region._fd).st_blocks * 512


def test_a_smaller_tier_keeps_the_blocks_that_its_policy_would_keep():
    tier = tier_of(8)
    refs = chain_refs(8)
    put(tier, refs, SIZE)
    assert tier.resize(3 * SIZE) == 0
    assert ready(tier, refs) == [True] * 3 + [False] * 5
    assert tier.stats()["capacity_bytes"] == 3 * SIZE
    assert tier.stats()["evicted"] == 5
    tier.check()


def test_a_larger_tier_takes_more_without_evicting():
    tier = tier_of(2, limit=8)
    refs = chain_refs(8)
    put(tier, refs[:2], SIZE)
    tier.resize(8 * SIZE)
    put(tier, refs[2:], SIZE)
    assert ready(tier, refs) == [True] * 8
    assert tier.stats()["evicted"] == 0


@pytest.mark.parametrize("nbytes", [0, PAGE - 1, 9 * SIZE])
def test_what_was_not_reserved_is_refused_and_nothing_changes(nbytes):
    tier = tier_of(4, limit=8)
    refs = chain_refs(4)
    put(tier, refs, SIZE)
    with pytest.raises(CapacityError, match=f"{nbytes} bytes: expected 4096 to {8 * SIZE}"):
        tier.resize(nbytes)
    assert ready(tier, refs) == [True] * 4
    assert tier.stats()["capacity_bytes"] == 4 * SIZE


def test_a_limit_below_the_capacity_is_refused():
    with pytest.raises(CapacityError, match="above its limit"):
        tier_of(4, limit=2)


def test_leased_blocks_outlast_a_shrink_and_go_when_they_are_released():
    tier = tier_of(6)
    held, free = chain_refs(3, salt="held"), chain_refs(3, salt="free")
    put(tier, held, SIZE)
    put(tier, free, SIZE)
    handles = tier.acquire([ref.key for ref in held], "reader").wait().handles
    assert tier.resize(SIZE) == 2 * SIZE
    assert ready(tier, free) == [False] * 3
    assert [bytes(tier.buffer(handle)[:SIZE]) for handle in handles] == [bytes(content(ref, SIZE)) for ref in held]
    # Beyond the capacity nothing comes in, not even in place of something else.
    assert not any(isinstance(one, Handle) for one in put(tier, chain_refs(1, salt="new"), SIZE))
    tier.release(handles)
    assert ready(tier, held) == [True, False, False]
    assert tier.stats()["bytes"] == SIZE
    tier.check()


def test_a_reservation_that_outlasts_a_shrink_can_be_committed():
    tier = tier_of(4)
    (ref,) = chain_refs(1)
    (handle,) = tier.reserve([ref], [2 * SIZE], ["raw"], "writer")
    assert tier.resize(SIZE) == SIZE
    tier.write([(handle, content(ref, 2 * SIZE))]).wait()
    tier.commit([handle])
    assert tier.stats()["bytes"] <= SIZE
    tier.check()


def test_a_shrink_gives_memory_back_to_the_system():
    tier = tier_of(1024)
    for salt in range(8):
        put(tier, chain_refs(128, salt=str(salt)), SIZE)
    before = resident(tier)
    assert before >= 1024 * SIZE
    tier.resize(64 * SIZE)
    # The blocks that stay lie where they lay; a page of theirs may be a huge one.
    assert resident(tier) <= 64 * SIZE + (2 << 20)
    last = chain_refs(128, salt="7")
    kept = sum(ready(tier, last))
    assert kept == 64
    assert [status for status, _ in load(tier, [ref.key for ref in last[:kept]])] == [Status.OK] * kept
    tier.resize(1024 * SIZE)
    put(tier, chain_refs(128, salt="again"), SIZE)
    assert run_length(tier, chain_refs(128, salt="again")) == 128


def test_memory_that_others_map_is_kept_and_used_again():
    tier = tier_of(64)
    refs = chain_refs(64)
    put(tier, refs, SIZE)
    tier.regions()
    before = resident(tier)
    assert tier.resize(SIZE) == 0
    assert resident(tier) == before
    tier.resize(64 * SIZE)
    put(tier, chain_refs(64, salt="again"), SIZE)
    assert resident(tier) == before


def test_leases_hold_and_bytes_are_right_while_the_capacity_swings():
    tier = tier_of(32, limit=64)
    chains = [chain_refs(12, salt=str(salt)) for salt in range(8)]
    failures: list[str] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for refs in chains:
                put(tier, refs, SIZE)

    def read(at: int) -> None:
        turn = at
        while not stop.is_set():
            refs = chains[turn % len(chains)]
            turn += 1
            handles = tier.acquire([ref.key for ref in refs], f"reader{at}").wait().handles
            failures.extend(
                f"{handle.ref.depth}" for handle in handles if tier.buffer(handle)[:SIZE] != content(handle.ref, SIZE)
            )
            tier.release(handles)

    threads = [threading.Thread(target=write), *(threading.Thread(target=read, args=(at,)) for at in range(2))]
    for thread in threads:
        thread.start()
    try:
        for turn in range(60):
            tier.resize([8, 64, 1, 40][turn % 4] * SIZE)
            tier.set_policy(make_policy(["lru", "arc", "s3fifo"][turn % 3], 32))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    tier.check()
    assert tier.stats()["leases"] == 0
    assert tier.stats()["corrupt"] == 0
    tier.resize(SIZE)
    assert tier.stats()["bytes"] <= SIZE


# ---- policies


def test_another_policy_goes_on_with_the_order_and_the_hints_of_the_first():
    tier = tier_of(4)
    old, dead, new = (chain_refs(1, salt=salt) for salt in ("old", "dead", "new"))
    for refs in (old, dead, new):
        put(tier, refs, SIZE)
    tier.hint([dead[0].key], [Hint(reuse="none")])
    tier.acquire([old[0].key], "reader")
    for name in ("lru", "s3fifo", "arc", "clock2"):
        tier.set_policy(make_policy(name, 4))
        # The dead one first; the one that is leased, never.
        assert tier.coldest(4) == [dead[0].key, new[0].key]
        tier.check()
    tier.release_owner("reader")
    assert sorted(tier.coldest(4)) == sorted(ref.key for refs in (old, dead, new) for ref in refs)


class _Refusing(LruPolicy):
    def pin(self, slots):
        raise CapacityError("this policy cannot")


def test_a_policy_that_fails_is_not_taken():
    tier = tier_of(4)
    refs = chain_refs(4)
    put(tier, refs, SIZE)
    with pytest.raises(CapacityError, match="cannot"):
        tier.set_policy(_Refusing())
    put(tier, chain_refs(2, salt="more"), SIZE)
    assert ready(tier, refs) == [True, True, False, False]
    tier.check()


def test_usage_counts_what_is_ready_by_namespace():
    tier = tier_of(8)
    one, two = chain_refs(3, salt="one"), chain_refs(2, salt="two")
    put(tier, one, SIZE)
    put(tier, two, 100)
    assert tier.usage() == {one[0].ns: (3, 3 * SIZE), two[0].ns: (2, 200)}
    tier.remove([two[0].key])
    assert tier.usage() == {one[0].ns: (3, 3 * SIZE)}
