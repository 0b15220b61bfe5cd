"""What the store's verbs promise: parts, exactness, joins, owners, pins, prefetch, deletion, hints."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from patience import until
from store_world import BLOCK, NS, FarTier, fetched, held, items, key, keys, memory_tier, nothing_is_held, verify

from kvtier.cpu import HostTier
from kvtier.errors import ConfigError, FormatMismatch
from kvtier.hints import Hint
from kvtier.keys import namespace_index
from kvtier.metrics import Metrics
from kvtier.policies import NextTurn
from kvtier.store import PrefetchResult, StoreOptions, TieredStore
from kvtier.tiers import Ticket


@pytest.fixture
def below() -> HostTier:
    return memory_tier(256)


@pytest.fixture
def store(below: HostTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(32 * BLOCK), [below])
    with contextlib.closing(store):
        yield store
        store.flush()
        assert nothing_is_held(store)


# ---- parts


def test_runs_are_counted_in_blocks(store: TieredStore) -> None:
    assert store.put(items("a", 4, parts=3), parts=3).result() == (4, 0, 0)
    wanted = keys("a", 6, parts=3)
    assert store.match(wanted, parts=3).tiers == ("host",) * 4
    assert store.wanted(wanted, exact=True, parts=3) == 4
    lease = store.acquire(wanted, "test", parts=3).result()
    assert len(lease) == 4
    assert len(store.located(lease, 1, 3)) == 6
    assert lease.nbytes(1, 3) == 6 * BLOCK
    store.release(lease)


def test_a_block_without_one_of_its_parts_is_a_miss(store: TieredStore) -> None:
    store.put(items("a", 4, parts=2), parts=2).result()
    store.flush()
    store.delete([key("a", 2, 1)])
    wanted = keys("a", 4, parts=2)
    assert len(store.match(wanted, parts=2).tiers) == 2
    assert fetched(store, wanted, parts=2) == 2


def test_parts_that_lie_in_different_tiers_make_a_block(store: TieredStore, below: HostTier) -> None:
    store.put(items("a", 3, parts=2), parts=2).result()
    store.flush()
    store.host.remove([key("a", 1, 1)])
    below.remove([key("a", 0, 0)])
    wanted = keys("a", 3, parts=2)
    assert store.match(wanted, parts=2).tiers == ("host", "below", "below")
    lease = store.acquire(wanted, "test", parts=2).result()
    assert lease.tiers() == ["host", "below", "below"]
    assert store.fetch(lease, 0, 3).result() == 3
    verify(store, lease, 0, 3)
    store.release(lease)


def test_a_block_that_does_not_fit_in_all_its_parts_is_not_stored_in_any(below: HostTier) -> None:
    with contextlib.closing(TieredStore(HostTier(7 * BLOCK), [below])) as store:
        blocker = items("held", 4)
        store.put(blocker).result()
        assert store.pin(keys("held", 4), "test") == 4
        # Room for three parts: one block of two, and half of the next.
        assert store.put(items("a", 4, parts=2), parts=2).result() == (1, 0, 3)
        store.flush()
        assert held(store.host, keys("a", 2, parts=2)) == [True, True, False, False]
        assert store.host.stats()["blocks"] == 6


@pytest.mark.parametrize(("count", "parts", "hints"), [(3, 2, None), (4, 2, 3), (2, 0, None)])
def test_a_batch_that_is_no_blocks_is_refused(store: TieredStore, count: int, parts: int, hints: int | None) -> None:
    with pytest.raises(FormatMismatch, match="expected whole blocks"):
        store.put(items("a", count), None if hints is None else [Hint()] * hints, parts=parts)
    if count % 2 or not parts:
        with pytest.raises(FormatMismatch, match="expected whole blocks"):
            store.match(keys("a", count), parts=parts)


# ---- exactness


def test_lossy_blocks_are_for_those_who_take_them(store: TieredStore) -> None:
    store.put(items("a", 6, exact_below=2)).result()
    wanted = keys("a", 6)
    assert fetched(store, wanted) == 2
    assert fetched(store, wanted, lossy=True) == 6
    assert len(store.match(wanted).tiers) == 2
    assert len(store.match(wanted, lossy=True).tiers) == 6
    assert store.wanted(wanted, exact=True) == 2
    assert store.wanted(wanted, exact=False) == 6
    lease = store.acquire(wanted, "test", lossy=True).result()
    assert lease.is_exact(0, 2)
    assert not lease.is_exact(1, 3)
    store.release(lease)


def test_an_exact_block_replaces_a_lossy_one_in_every_tier(store: TieredStore, below: HostTier) -> None:
    store.put(items("a", 4, exact_below=0)).result()
    store.flush()
    assert store.put(items("a", 4)).result() == (4, 0, 0)
    store.flush()
    assert all(held(below, keys("a", 4), exact=True))
    assert store.put(items("a", 4, exact_below=0)).result() == (0, 4, 0)
    store.clear("host")
    assert fetched(store, keys("a", 4)) == 4


def test_an_exact_copy_below_is_found_beneath_a_lossy_one(store: TieredStore) -> None:
    store.put(items("a", 4)).result()
    store.flush()
    store.clear("host")
    below, store_host_only = store.lower[0], store.host
    slots = store_host_only.reserve(
        [ref for ref, _ in items("a", 4, exact_below=0)], [BLOCK] * 4, ["raw"] * 4, "test", None
    )
    store_host_only.write([(slot, data) for slot, (_, data) in zip(slots, items("a", 4, exact_below=0), strict=True)])
    store_host_only.commit(slots)
    assert store.match(keys("a", 4)).tiers == (below.name,) * 4
    assert store.match(keys("a", 4), lossy=True).tiers == ("host",) * 4
    assert fetched(store, keys("a", 4)) == 4
    assert all(held(store.host, keys("a", 4), exact=True))


# ---- joins


def test_loads_of_one_chain_at_once_read_it_once(store: TieredStore, below: HostTier) -> None:
    store.put(items("a", 16)).result()
    store.flush()
    store.clear("host")
    leases = [store.acquire(keys("a", 16), f"r{at}") for at in range(8)]
    futures = [(lease.result(), store.fetch(lease.result(), 0, 16)) for lease in leases]
    for lease, future in futures:
        assert future.result(30) == 16
        verify(store, lease, 0, 16)
        store.release(lease)
    assert below._metrics.value("read_bytes_total", tier="below") == 16 * BLOCK


# ---- owners and pins


def test_the_death_of_an_owner_ends_all_that_it_holds(store: TieredStore) -> None:
    store.put(items("a", 8)).result()
    store.flush()
    first = store.acquire(keys("a", 8), "dies").result()
    second = store.acquire(keys("a", 4), "lives").result()
    assert store.pin(keys("a", 8), "dies") == 8
    late = store.acquire(keys("a", 8), "dies")
    store.release_owner("dies")
    store.release_owner("nobody")
    until(late.done)
    store.release_owner("dies")
    assert len(first) == 0
    assert store.stats()["host"]["leases"] == 4
    assert store.stats()["store"]["pins"] == 0
    store.release(first)
    store.release(second)


def test_pinned_blocks_stay_and_pins_end_with_their_time() -> None:
    now = [0.0]
    with contextlib.closing(TieredStore(HostTier(8 * BLOCK), clock=lambda: now[0])) as store:
        store.put(items("a", 4)).result()
        assert store.pin(keys("a", 6), "one", ttl=10.0) == 4
        assert store.pin(keys("a", 2), "two") == 2
        store.put(items("b", 8)).result()
        assert all(held(store.host, keys("a", 4)))
        now[0] = 11.0
        store.put(items("c", 6)).result()
        assert held(store.host, keys("a", 4)) == [True, True, False, False]
        assert store.metrics.value("expired_pins_total") == 1
        store.unpin("two")
        store.unpin("two")
        assert store.put(items("d", 8)).result().stored == 8
        assert nothing_is_held(store)


def test_a_pin_of_what_is_not_in_host_pins_nothing(store: TieredStore) -> None:
    assert store.pin(keys("a", 4), "test") == 0
    store.put(items("a", 3, parts=2)[:5] + items("a", 3, parts=2)[5:], parts=2).result()
    store.host.remove([key("a", 2, 1)])
    assert store.pin(keys("a", 3, parts=2), "test", parts=2) == 2
    assert store.stats()["store"]["pins"] == 4
    store.unpin("test")


# ---- prefetch


def test_a_prefetch_brings_blocks_and_leases_nothing(store: TieredStore) -> None:
    store.put(items("a", 20)).result()
    store.flush()
    store.clear("host")
    prefetch = store.prefetch(keys("a", 24), "test")
    assert prefetch.result(30) == PrefetchResult(20, None)
    assert prefetch.done()
    assert all(held(store.host, keys("a", 20)))
    until(lambda: nothing_is_held(store))
    assert store.prefetch(keys("none", 3), "test").result(30) == PrefetchResult(0, None)
    assert store.metrics.value("prefetched_blocks_total") == 20


def test_a_prefetch_without_space_finds_nothing_and_says_why(below: HostTier) -> None:
    with contextlib.closing(TieredStore(HostTier(8 * BLOCK), [below])) as store:
        store.put(items("a", 8)).result()
        store.flush()
        store.clear("host")
        store.put(items("held", 6)).result()
        assert store.pin(keys("held", 6), "test") == 6
        assert store.prefetch(keys("a", 8), "test").result(30) == PrefetchResult(0, "no_space")
        assert store.metrics.value("prefetches_total", outcome="no_space") == 1
        store.unpin("test")


def test_a_cancelled_prefetch_stops_before_its_next_batch(store: TieredStore, below: HostTier) -> None:
    entered, go_on = threading.Event(), threading.Event()
    read = below.read

    def slow(*arguments: object, **named: object) -> object:
        entered.set()
        assert go_on.wait(30)
        return read(*arguments, **named)

    store.put(items("a", 32)).result()
    store.flush()
    store.clear("host")
    below.read = slow
    one, other = store.prefetch(keys("a", 32), "test"), store.prefetch(keys("a", 32), "dies")
    assert entered.wait(30)
    one.cancel()
    store.release_owner("dies")
    assert one.result(0) == PrefetchResult(0, "cancelled")
    assert other.result(0) == PrefetchResult(0, "cancelled")
    go_on.set()
    until(lambda: nothing_is_held(store))


def test_what_a_session_needs_next_is_prefetched(below: HostTier) -> None:
    now = [0.0]
    options = StoreOptions(prefetch=NextTurn(lead_seconds=1.0))
    with contextlib.closing(TieredStore(HostTier(16 * BLOCK), [below], options=options, clock=lambda: now[0])) as store:
        for turn in range(1, 3):
            start, stop = 4 * (turn - 1), 4 * turn
            store.put(items("a", stop, start=start), [Hint(session="chat")] * 4).result()
            # The clock moves on only when the turn's end was noticed.
            now[0] += 2.0
            until(lambda: not store._turns._active)
            now[0] += 18.0
        store.flush()
        store.clear("host")
        now[0] += 60.0
        until(lambda: all(held(store.host, keys("a", 8))))


# ---- hints


def test_hints_reach_every_tier_and_order_evictions(store: TieredStore, below: HostTier) -> None:
    store.put(items("a", 8)).result()
    store.put(items("b", 8)).result()
    store.put(items("c", 8)).result()
    store.flush()
    store.hint(keys("c", 8), [Hint(reuse="none")] * 8)
    store.put(items("d", 12)).result()
    assert all(held(store.host, keys("a", 8)))
    assert not any(held(store.host, keys("c", 8)[4:]))
    with pytest.raises(FormatMismatch, match="one per key"):
        store.hint(keys("a", 2), [Hint()])


def test_the_end_of_a_session_gives_up_what_it_alone_used(store: TieredStore) -> None:
    shared, own = items("system", 4), items("chat", 8)
    store.put(shared, [Hint(session="one")] * 4).result()
    store.put(shared, [Hint(session="two")] * 4).result()
    store.put(own, [Hint(session="one")] * 8).result()
    store.put(items("other", 12)).result()
    store.flush()
    store.end_session("one")
    store.end_session("unknown")
    store.put(items("new", 16)).result()
    assert all(held(store.host, keys("system", 4)))
    assert not any(held(store.host, keys("chat", 8)))
    assert all(held(store.host, keys("other", 12)))


def test_what_the_device_holds_too_leaves_first(store: TieredStore) -> None:
    for chain in "abc":
        store.put(items(chain, 8)).result()
    store.flush()
    store.duplicate(keys("c", 8), above=True)
    store.put(items("d", 16)).result()
    assert all(held(store.host, keys("a", 8) + keys("b", 8)))
    assert not any(held(store.host, keys("c", 8)))


# ---- removal


def test_delete_takes_blocks_out_of_every_tier_with_what_descends_from_them(store: TieredStore) -> None:
    store.put(items("a", 8)).result()
    store.put(items("b", 4)).result()
    store.flush()
    assert store.delete([key("a", 3), key("none", 0)]) == 1
    assert len(store.match(keys("a", 8)).tiers) == 3
    assert len(store.match(keys("b", 4)).tiers) == 4
    assert store.delete([key("a", 3)]) == 0


def test_what_is_deleted_on_its_way_down_does_not_come_back(store: TieredStore, below: HostTier) -> None:
    entered, go_on = threading.Event(), threading.Event()
    write = below.write

    def slow(*arguments: object, **named: object) -> object:
        entered.set()
        assert go_on.wait(30)
        return write(*arguments, **named)

    below.write = slow
    store.put(items("a", 4)).result()
    assert entered.wait(30)
    store.put(items("b", 4)).result()
    with ThreadPoolExecutor(1) as threads:
        deleted = threads.submit(store.delete, [key("a", 1), key("b", 0)])
        # What is being written may arrive: nobody is told that it is gone before it has, and went again.
        until(lambda: store._demoters[0]._inflight._deleted)
        assert not deleted.done()
        go_on.set()
        assert deleted.result(30) == 2
    store.flush()
    assert held(below, keys("a", 2)) == [True, False]
    assert not held(below, [key("b", 0)])[0]
    assert len(store.match(keys("a", 4)).tiers) == 1
    assert store.match(keys("b", 4)).tiers == ()


def test_what_is_deleted_on_its_way_up_does_not_come_back(store: TieredStore, below: HostTier) -> None:
    entered, go_on = threading.Event(), threading.Event()
    read = below.read

    def slow(*arguments: object, **named: object) -> object:
        entered.set()
        assert go_on.wait(30)
        return read(*arguments, **named)

    store.put(items("a", 4)).result()
    store.flush()
    store.clear("host")
    below.read = slow
    lease = store.acquire(keys("a", 4), "test").result()
    future = store.fetch(lease, 0, 4)
    assert entered.wait(30)
    assert store.delete([key("a", 0)]) == 1
    go_on.set()
    assert future.result(30) == 0
    store.release(lease)
    assert store.match(keys("a", 4)).tiers == ()


def test_clear_takes_one_namespace(store: TieredStore) -> None:
    other = namespace_index(hashlib.sha256(b"another").digest())
    store.put(items("a", 4)).result()
    store.put(items("b", 4, ns=other)).result()
    store.clear(ns=NS)
    assert store.match(keys("a", 4)).tiers == ()
    assert len(store.match(keys("b", 4)).tiers) == 4
    with pytest.raises(ConfigError, match="nmve"):
        store.clear("nmve")
    with pytest.raises(FormatMismatch, match="namespace 100000"):
        store.put(items("c", 1, ns=100_000))


# ---- what is counted


def test_only_what_requests_find_counts_as_hits() -> None:
    metrics = Metrics()
    host, below = HostTier(32 * BLOCK, metrics=metrics), memory_tier(64, metrics=metrics)
    with contextlib.closing(TieredStore(host, [below], metrics=metrics)) as store:
        store.put(items("a", 8)).result()
        store.flush()
        store.clear("host")
        for expected in ((0, 8), (8, 8)):
            assert fetched(store, keys("a", 8)) == 8
            found = tuple(metrics.value("hit_blocks_total", tier=tier) for tier in ("host", "below"))
            assert found == expected
        store.clear("host")
        assert store.prefetch(keys("a", 8), "test").result(30).blocks == 8
        assert metrics.value("hit_blocks_total", tier="below") == 8
        assert metrics.value("written_bytes_total", tier="below") == store.stats()["below"]["written_bytes"] > 0


# ---- speeds


def test_speeds_are_learned_from_loads(store: TieredStore) -> None:
    assert set(store.speeds()) == {"host", "below"}
    assert store.speeds()["below"].bytes_per_second is None
    store.put(items("a", 8)).result()
    store.flush()
    store.clear("host")
    assert fetched(store, keys("a", 8)) == 8
    assert store.speeds()["below"].bytes_per_second > 0
    assert store.speeds()["below"].queued_bytes == 0
    assert fetched(store, keys("a", 8)) == 8
    assert store.speeds()["host"].bytes_per_second > 0


# ---- integrity


class Flipping(HostTier):
    """A tier below whose reads say OK and bring a flipped bit."""

    def read(self, entries, deadline=None):
        ticket = super().read(entries, deadline)
        entries[0][1][5] ^= 1
        return ticket


def test_a_checksum_guards_the_bytes_from_the_first_put_to_the_last_read() -> None:
    below = Flipping(256 * BLOCK, name="below")
    with contextlib.closing(TieredStore(HostTier(32 * BLOCK), [below])) as store:
        store.put(items("a", 2)).result()
        store.flush()
        store.clear("host")
        assert fetched(store, keys("a", 2)) == 0
        assert store.host.stats()["corrupt"] == 1
        assert nothing_is_held(store)


class _Ending(HostTier):
    """A tier below, of which `meanwhile` is called between a lease and the read of what it holds."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def read(self, items: object, deadline: float | None = None) -> Ticket:
        self.meanwhile()
        return super().read(items, deadline)


def test_an_owner_that_dies_while_its_blocks_are_brought_up_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    below = _Ending(64 * BLOCK, name="below")
    store = TieredStore(HostTier(32 * BLOCK), [below])
    with contextlib.closing(store):
        store.put(items("a", 8)).result(10)
        store.flush()
        store.clear("host")
        lease = store.acquire(keys("a", 8), "dying").result(10)
        assert len(lease) == 8
        below.meanwhile = lambda: store.release_owner("dying")
        assert store.fetch(lease, 0, 8).result(10) == 0
        assert store.metrics.value("errors_total", tier="below", operation="promote") == 0
        assert "promote" not in caplog.text
        assert nothing_is_held(store)
        below.meanwhile = lambda: None
        assert fetched(store, keys("a", 8)) == 8


def test_who_joined_a_load_whose_owner_dies_loads_it_alone() -> None:
    below = _Ending(64 * BLOCK, name="below")
    store = TieredStore(HostTier(32 * BLOCK), [below])
    with contextlib.closing(store):
        store.put(items("a", 8)).result(10)
        store.flush()
        store.clear("host")
        dying, living = (store.acquire(keys("a", 8), owner).result(10) for owner in ("dying", "living"))
        second: list[Future[int]] = []

        def die() -> None:
            below.meanwhile = lambda: None
            second.append(store.fetch(living, 0, 8))
            until(lambda: store.metrics.value("joined_blocks_total", operation="load"))
            store.release_owner("dying")

        below.meanwhile = die
        assert store.fetch(dying, 0, 8).result(10) == 0
        assert second[0].result(10) == 8
        verify(store, living, 0, 8)
        store.release(living)
        assert nothing_is_held(store)


def test_who_joined_a_load_of_blocks_that_are_deleted_does_not_bring_them_back() -> None:
    below = _Ending(64 * BLOCK, name="below")
    store = TieredStore(HostTier(32 * BLOCK), [below])
    with contextlib.closing(store):
        store.put(items("a", 8)).result(10)
        store.flush()
        store.clear("host")
        first, joining = (store.acquire(keys("a", 8), owner).result(10) for owner in ("first", "joining"))
        second: list[Future[int]] = []

        def delete() -> None:
            below.meanwhile = lambda: None
            second.append(store.fetch(joining, 0, 8))
            until(lambda: store.metrics.value("joined_blocks_total", operation="load"))
            store.delete(keys("a", 8))

        below.meanwhile = delete
        store.fetch(first, 0, 8).result(10)
        assert second[0].result(10) == 0
        store.release(first)
        store.release(joining)
        assert store.match(keys("a", 8)).tiers == ()
        assert nothing_is_held(store)


@pytest.mark.parametrize("whole", [False, True])
def test_a_lease_does_not_bring_back_what_was_deleted(store: TieredStore, whole: bool) -> None:
    store.put(items("a", 8)).result(10)
    store.put(items("b", 8)).result(10)
    store.flush()
    store.clear("host")
    lease = store.acquire(keys("a", 8), "reader").result(10)
    other = store.acquire(keys("b", 8), "other").result(10)
    if whole:
        store.clear()
    else:
        assert store.delete(keys("a", 8)[2:]) == 6
    assert store.fetch(lease, 0, 8).result(10) == (0 if whole else 2)
    assert store.fetch(other, 0, 8).result(10) == (0 if whole else 8)
    store.release(lease)
    store.release(other)
    assert len(store.match(keys("a", 8)).tiers) == (0 if whole else 2)


def test_what_was_in_host_before_does_not_count_as_prefetched(store: TieredStore) -> None:
    store.put(items("a", 8)).result(10)
    store.flush()
    assert store.prefetch(keys("a", 8), "early").result(10).blocks == 8
    assert store.metrics.value("prefetched_blocks_total") == 0
    store.clear("host")
    assert fetched(store, keys("a", 3)) == 3
    assert store.prefetch(keys("a", 8), "early").result(10).blocks == 8
    assert store.metrics.value("prefetched_blocks_total") == 5


def test_whereabouts_do_not_wait_for_a_remote_tier(below: HostTier) -> None:
    far = FarTier()
    store = TieredStore(HostTier(32 * BLOCK), [below, far])
    with contextlib.closing(store):
        store.put(items("a", 2)).result(10)
        store.flush()
        far.asked.clear()
        far.answers.clear()
        assert store.whereabouts(keys("a", 2)).result(0) == ["host", "host"]
        found = store.whereabouts([*keys("a", 1), *keys("b", 1)])
        assert not found.done()
        late = store.whereabouts([*keys("a", 1), *keys("b", 1)], deadline=time.monotonic() + 0.05)
        assert late.result(10) == ["host", None]
        far.answers.set()
        assert found.result(10) == ["host", None]
        assert set(far.asked) == {"kvtier-lookup-far"}
        store.clear("host")
        store.clear("below")
        assert store.whereabouts([*keys("b", 1), *keys("a", 2)]).result(10) == [None, "far", "far"]


def test_a_remote_tier_is_not_asked_for_more_than_it_can_answer_for_at_a_time(below: HostTier) -> None:
    far = FarTier()
    store = TieredStore(HostTier(32 * BLOCK), [below, far])
    with contextlib.closing(store):
        store.put(items("a", 2)).result(10)
        store.flush()
        store.clear("host")
        store.clear("below")
        far.asked.clear()
        wanted = [*keys("b", 600), *keys("a", 2)]
        assert store.whereabouts(wanted).result(10) == [None] * 600 + ["far", "far"]
        assert len(far.asked) == 3
