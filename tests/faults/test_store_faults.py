"""A failing tier below host: every fault is a miss or a counted drop, never an exception and never a leak."""

import contextlib
import os
from collections.abc import Iterator

import pytest
from store_world import BLOCK, ExtentTier, fetched, items, keys, nothing_is_held

from kvtier.cpu import HostTier
from kvtier.errors import BlocksRemain
from kvtier.metrics import Metrics
from kvtier.store import StoreOptions, TieredStore
from kvtier.testing import Fault, FaultyTier, Kind

PERSISTENT = [
    Fault("reserve", Kind.ENOSPC),
    Fault("write", Kind.ENOSPC),
    Fault("write", Kind.EIO),
    Fault("reserve", Kind.UNAVAILABLE),
    Fault("write", Kind.UNAVAILABLE),
    Fault("commit", Kind.UNAVAILABLE),
    Fault("contains", Kind.UNAVAILABLE),
    Fault("*", Kind.UNAVAILABLE),
]


@pytest.fixture
def below() -> FaultyTier:
    return FaultyTier(ExtentTier(64 * BLOCK, name="faulty"))


@pytest.fixture
def store(below: FaultyTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(16 * BLOCK), [below])
    with contextlib.closing(store):
        yield store
        below.heal()
        store.flush()
        assert nothing_is_held(store)


@pytest.mark.parametrize("fault", PERSISTENT, ids=lambda fault: f"{fault.verb} {fault.kind}")
def test_what_the_tier_does_not_take_stays_in_host(store: TieredStore, below: FaultyTier, fault: Fault) -> None:
    below.inject(fault)
    batch = items("a", 4)
    assert store.put(batch).result().stored == 4
    store._placement.settle()
    assert fetched(store, keys("a", 4)) == 4
    store.flush()  # what the tier did not take is owed, and was tried again because it was used
    below.heal()
    assert below.stats()["reservations"] == 0
    store.clear("host")
    left = fetched(store, keys("a", 4))
    assert left in (0, 4)
    # Nothing of the failure is left behind: the same blocks are taken now.
    assert store.put(batch).result().dropped == 0
    store.flush()
    store.clear("host")
    assert fetched(store, keys("a", 4)) == 4


def test_a_demotion_that_failed_is_made_up_for_when_the_block_is_used(store: TieredStore, below: FaultyTier) -> None:
    below.inject(Fault("write", Kind.EIO))
    store.put(items("a", 4)).result()
    store.flush()
    assert store.metrics.value("dropped_blocks_total", tier="faulty", reason="not_written") == 4
    below.heal()
    assert fetched(store, keys("a", 4)) == 4
    store.flush()
    store.clear("host")
    assert fetched(store, keys("a", 4)) == 4


@pytest.mark.parametrize(
    ("fault", "good"),
    [
        (Fault("read", Kind.UNAVAILABLE), 0),
        (Fault("read", Kind.CORRUPT, first_item=1), 1),
        (Fault("read", Kind.EIO, first_item=2), 2),
        (Fault("read", Kind.SHORT, first_item=3), 3),
        (Fault("read", Kind.VANISH, first_item=1), 1),
        (Fault("read", Kind.TIMEOUT), 0),
        (Fault("acquire", Kind.UNAVAILABLE), 0),
        (Fault("acquire", Kind.VANISH, first_item=2), 2),
        (Fault("acquire", Kind.CORRUPT, first_item=1), 1),
        (Fault("*", Kind.UNAVAILABLE), 0),
    ],
    ids=lambda value: f"{value.verb} {value.kind}" if isinstance(value, Fault) else "",
)
def test_what_the_tier_does_not_give_is_a_miss(store: TieredStore, below: FaultyTier, fault: Fault, good: int) -> None:
    store.put(items("a", 4)).result()
    store.flush()
    store.clear("host")
    below.inject(fault)
    assert fetched(store, keys("a", 4)) == good
    below.heal()
    # What was damaged is gone for good; anything else is there again.
    gone = fault.kind in (Kind.CORRUPT, Kind.VANISH)
    assert fetched(store, keys("a", 4)) == (good if gone else 4)


def test_a_full_writeback_queue_drops_and_counts() -> None:
    below = FaultyTier(ExtentTier(64 * BLOCK, name="faulty"), [Fault("reserve", Kind.HANG)])
    store = TieredStore(HostTier(16 * BLOCK), [below], options=StoreOptions(writeback_bytes=2 * BLOCK))
    with contextlib.closing(store):
        store.put(items("a", 8)).result()
        assert store.metrics.value("dropped_blocks_total", tier="faulty", reason="queue_full") == 6
        below.heal()
        store.flush()
        # The leading blocks that fit go down all the same.
        assert store.stats()["faulty"]["blocks"] == 2
        assert nothing_is_held(store)


def test_puts_of_one_key_at_once_write_it_once(store: TieredStore) -> None:
    batch = items("a", 8)
    results = [store.put(batch) for _ in range(6)]
    assert sum(future.result().stored for future in results) == 8
    assert sum(future.result().joined for future in results) == 40


def test_a_put_that_host_refuses_leaves_no_reservation(store: TieredStore) -> None:
    batch = items("a", 2)
    strided = [(ref, memoryview(bytes(2 * BLOCK))[::2]) for ref, _ in batch]
    with contextlib.suppress(Exception):
        store.put(strided).result()
    assert store.host.stats()["reservations"] == 0
    assert store.put(batch).result().stored == 2


def test_clear_takes_what_is_on_its_way(store: TieredStore) -> None:
    futures = [store.put(items("a", length)) for length in range(1, 13)]
    store.clear()
    assert all(future.done() for future in futures)
    store.flush()
    assert store.match(keys("a", 12)).tiers == ()


def test_one_key_twice_in_a_batch(store: TieredStore) -> None:
    (item,) = items("a", 1)
    assert store.put([item, item]).result() == (1, 1, 0)
    assert fetched(store, keys("a", 1)) == 1
    assert store.put([item]).result().joined == 1


def test_a_closed_store_is_a_miss() -> None:
    store = TieredStore(HostTier(16 * BLOCK), [ExtentTier(16 * BLOCK, name="below")])
    store.put(items("a", 2)).result()
    store.close()
    store.close()
    assert store.put(items("a", 2)).result().dropped == 2
    assert store.match(keys("a", 2)).tiers == ()
    lease = store.acquire(keys("a", 2), "test").result()
    assert lease.blocks == []
    assert store.fetch(lease, 0, 0).result() == 0
    assert store.prefetch(keys("a", 2), "test").result(10) == (0, "closed")
    assert store.pin(keys("a", 2), "test") == 0
    store.hint([], [])
    store.end_session("none")
    store.release_owner("test")
    store.release(lease)
    store.flush()
    # What is on a disk or a server stays there, so that nothing is said to be gone.
    for remove in (lambda: store.delete(keys("a", 2)), store.clear):
        with pytest.raises(BlocksRemain, match=r"blocks remain in host .*closed.*; below .*closed"):
            remove()


def test_a_child_of_fork_waits_for_nobody() -> None:
    """The store's threads are its parent's."""
    with contextlib.closing(TieredStore(HostTier(16 * BLOCK), [ExtentTier(16 * BLOCK, name="below")])) as store:
        store.put(items("a", 2)).result(30)
        store.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                dropped = store.put(items("b", 2)).result(5).dropped
                loaded = store.fetch(store.acquire(keys("a", 2), "child").result(5), 0, 2).result(5)
                store.flush()
                store.close()
                status = 10 * dropped + loaded
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 20
        assert fetched(store, keys("a", 2)) == 2


def test_close_drains_what_was_put() -> None:
    below = ExtentTier(64 * BLOCK, name="below")
    closing, below.close = below.close, lambda: None
    store = TieredStore(HostTier(32 * BLOCK), [below])
    futures = [store.put(items(chain, 8)) for chain in range(3)]
    store.close()
    assert [future.result(0).stored for future in futures] == [8, 8, 8]
    assert below.stats()["blocks"] == 24
    closing()


def test_what_is_damaged_in_host_is_not_carried_down() -> None:
    metrics = Metrics()
    host, below = HostTier(16 * BLOCK, metrics=metrics), ExtentTier(64 * BLOCK, name="below")
    options = StoreOptions(write_rule="second_touch")
    with contextlib.closing(TieredStore(host, [below], metrics=metrics, options=options)) as store:
        store.put(items("a", 3)).result()
        handles = host.acquire(keys("a", 3), "test").wait().handles
        host._memories(handles[1:2])[0][7] ^= 1
        host.release(handles)
        store.put(items("a", 3)).result()
        store.flush()
        assert metrics.value("corrupt_blocks_total", tier="host") == 1
        assert below.stats()["blocks"] == 1
        assert fetched(store, keys("a", 3)) == 1
