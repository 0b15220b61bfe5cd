"""Blocks that were used where the store cannot see it: a use in every tier, and nobody's hit."""

from collections.abc import Sequence

import pytest
from store_world import BLOCK, FarTier, held, holds_nothing_soon, items, keys, memory_tier, nothing_is_held

from kvtier.cpu import HostTier
from kvtier.metrics import Metrics
from kvtier.store import StoreOptions, TieredStore
from kvtier.tiers import Owner, Ticket, Tier

CHAIN = keys("renewed", 4)


def store_over(lower: list[Tier], host_blocks: int = 64, **options: object) -> TieredStore:
    metrics = Metrics()
    return TieredStore(
        HostTier(host_blocks * BLOCK, metrics=metrics), lower, metrics=metrics, options=StoreOptions(**options)
    )


def renewed(store: TieredStore, chain: list[bytes]) -> None:
    store.renew(chain)
    # After what was sent to the host tier's threads.
    store.put([]).result(30)
    store.settle()


def test_what_was_renewed_leaves_host_after_what_was_not() -> None:
    store = store_over([], host_blocks=12)
    for chain in ("renewed", "other"):
        store.put(items(chain, 4)).result(30)
    renewed(store, CHAIN)
    store.put(items("more", 8)).result(30)
    assert store.held(CHAIN, exact=True) == [True] * 4
    assert not any(store.held(keys("other", 4), exact=True))
    assert store.metrics.value("hit_blocks_total", tier="host") == 0
    assert nothing_is_held(store)
    store.close()


def test_it_is_the_second_touch() -> None:
    below = memory_tier(64)
    store = store_over([below], write_rule="second_touch")
    store.put(items("renewed", 4)).result(30)
    store.settle()
    assert not any(held(below, CHAIN))
    renewed(store, CHAIN[:3])
    assert held(below, CHAIN) == [True] * 3 + [False]
    store.close()


@pytest.mark.parametrize("chain", [[], [b"nobody's........"], [*CHAIN[:1], b"nobody's........", *CHAIN[1:]]])
def test_what_is_not_there_is_no_miss(chain: list[bytes]) -> None:
    store = store_over([memory_tier(64)])
    store.put(items("renewed", 4)).result(30)
    renewed(store, chain)
    assert store.metrics.value("missed_blocks_total", tier="host") == 0
    assert holds_nothing_soon(store)  # the tier below is told in a thread of its own
    store.close()


def test_a_remote_tier_is_not_asked() -> None:
    class Asked(FarTier):
        acquired = 0

        def acquire(
            self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
        ) -> Ticket:
            self.acquired += 1
            return super().acquire(keys, owner, deadline, exact=exact)

    far = Asked()
    store = store_over([far])
    store.put(items("renewed", 4)).result(30)
    renewed(store, CHAIN)
    # Its threads do what was sent to them first.
    store.close()
    assert far.acquired == 0
