"""What callers and third parties may do to the host tier without breaking its books."""

from collections.abc import Sequence

import pytest

from kvtier.cpu import HostTier
from kvtier.policies import LruPolicy
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import BlockRef, Handle, Status

SIZE = 4096


def test_two_versions_of_a_new_block_in_one_commit() -> None:
    tier = HostTier(16 * SIZE)
    exact = chain_refs(2)
    lossy = [ref._replace(exact=False) for ref in exact]
    results = tier.reserve([lossy[0], exact[0], exact[1]], [SIZE] * 3, ["raw"] * 3, "writer")
    handles = [result for result in results if isinstance(result, Handle)]
    assert len(handles) == 3
    tier.write([(handle, content(handle.ref, SIZE)) for handle in handles]).wait()
    tier.commit(handles)
    tier.check()
    assert load(tier, [ref.key for ref in exact]) == [(Status.OK, bytes(content(ref, SIZE))) for ref in exact]
    tier.remove([exact[0].key])
    tier.check()
    assert tier.stats()["bytes"] == 0


@pytest.mark.parametrize("parent_comes", ["before", "between", "after", "never"])
@pytest.mark.parametrize("knows", ["second", "first"])
def test_a_new_version_may_know_another_parent(knows: str, parent_comes: str) -> None:
    tier = HostTier(16 * SIZE)
    parent, child = chain_refs(2)
    bare = child._replace(depth=-1, parent=None)
    first, second = (bare, child) if knows == "second" else (child, bare)
    order = {
        "before": [parent, first, second],
        "between": [first, parent, second],
        "after": [first, second, parent],
        "never": [first, second],
    }[parent_comes]
    for ref in order:
        put(tier, [ref._replace(exact=ref is second or ref is parent)], SIZE)
        tier.check()
    tier.remove([parent.key])
    tier.check()
    hangs_below = parent_comes != "never" and (knows == "second" or parent_comes != "after")
    assert run_length(tier, [child]) == (0 if hangs_below else 1)
    tier.remove([child.key])
    tier.check()
    assert tier.stats()["bytes"] == 0
    put(tier, chain_refs(2), SIZE)
    tier.check()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_ring_of_parents_can_be_evicted_and_removed(length: int) -> None:
    tier = HostTier(4 * SIZE)
    refs = chain_refs(length)
    ring = [ref._replace(depth=1, parent=refs[at - 1].key) for at, ref in enumerate(refs)]
    for ref in ring:
        put(tier, [ref], SIZE)
        tier.check()
    assert set(tier.coldest(8)) == {ref.key for ref in refs}
    put(tier, chain_refs(4, seed=9), SIZE)
    tier.check()
    assert run_length(tier, chain_refs(4, seed=9)) == 4
    for ref in ring:
        put(tier, [ref], SIZE)
    for ref in ring:
        tier.remove([ref.key])
        tier.check()
    assert not any(run_length(tier, [ref]) for ref in ring)


class _Nonsense(LruPolicy):
    """Names victims that nobody has, over and over."""

    def victims(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        return [-1, 7, 1 << 40]


class _Dying(LruPolicy):
    """Cannot say who leaves."""

    def victims(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        raise ZeroDivisionError


def test_a_policy_that_names_victims_nobody_has_makes_no_room_and_no_endless_search() -> None:
    tier = HostTier(4 * SIZE, policy=_Nonsense())
    put(tier, chain_refs(4), SIZE)
    tier.remove([chain_refs(4)[3].key])
    assert not any(isinstance(result, Handle) for result in put(tier, chain_refs(2, seed=1), SIZE)[1:])
    assert tier.coldest(3) == []
    tier.check()


def test_a_policy_that_dies_leaves_no_reservation_and_no_pin() -> None:
    policy = _Dying()
    tier = HostTier(4 * SIZE, policy=policy)
    old = chain_refs(3)
    put(tier, old, SIZE)
    with pytest.raises(ZeroDivisionError):
        put(tier, [*old, *chain_refs(2, seed=1)], SIZE)
    tier.check()
    assert tier.stats()["reservations"] == 0
    assert tier.stats()["bytes"] == 3 * SIZE
    assert LruPolicy.victims(policy, 9) == [2, 1, 0]


def test_no_index_of_a_namespace_counts_from_the_end() -> None:
    ref = chain_refs(1)[0]
    tier = HostTier(4 * SIZE)
    with pytest.raises(IndexError):
        put(tier, [BlockRef(ref.key, -1, 0, None, exact=True)], SIZE)
    assert run_length(tier, [ref]) == 0
