"""A store over a tier of runs: what goes down, when, and how it is found again."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from objects_world import objects_in
from store_world import BLOCK, content, fetched, items, key, keys, memory_tier, nothing_is_held

from kvtier.config.remote import RemoteSettings
from kvtier.cpu import HostTier
from kvtier.hints import Hint
from kvtier.remote import RemoteTier, open_remote
from kvtier.store import StoreOptions, TieredStore
from kvtier.tiers import BlockRef, Reservation, Ticket, Tier

RUN = 4


@contextlib.contextmanager
def opened(
    host_blocks: int = 256, middle: Sequence[Tier] = (), parts: int = 1, **options: object
) -> Iterator[tuple[TieredStore, RemoteTier]]:
    below = open_remote(RemoteSettings(url="memory:///", options=f"run={RUN}", absent_ttl=0))
    host = HostTier(host_blocks * BLOCK)
    store = TieredStore(host, [*middle, below], metrics=below._state.counts.metrics, options=StoreOptions(**options))
    with contextlib.closing(store):
        yield store, below
        store.flush()
        assert nothing_is_held(store)


def put(store: TieredStore, chain: object, stop: int, *, start: int = 0, parts: int = 1) -> None:
    assert store.put(items(chain, stop, parts, start=start), parts=parts).result(30).dropped == 0


def below_only(store: TieredStore) -> None:
    store.flush()
    store.clear("host")


def dropped(store: TieredStore, reason: str) -> float:
    return store.metrics.value("dropped_blocks_total", tier="remote", reason=reason)


# ---- down


def test_only_whole_aligned_runs_go_down() -> None:
    with opened() as (store, below):
        put(store, "a", 11)
        store.flush()
        assert below.stats()["blocks"] == 8
        assert sum(dropped(store, reason) for reason in ("incomplete_run", "queue_full", "refused")) == 0
        below_only(store)
        assert fetched(store, keys("a", 11)) == 8


def test_a_run_goes_when_its_last_block_comes_one_at_a_time() -> None:
    with opened() as (store, below):
        for depth in range(10):
            put(store, "a", depth + 1, start=depth)
            store.flush()
            assert below.stats()["blocks"] == (depth + 1) // RUN * RUN
        put(store, "a", 10)
        store.flush()
        assert len(objects_in(below)) == 2


def test_blocks_of_several_parts_go_down_by_part() -> None:
    with opened() as (store, below):
        put(store, "a", 6, parts=3)
        store.flush()
        assert len(objects_in(below)) == 3
        below_only(store)
        assert store.match(keys("a", 6, 3), parts=3).tiers == ("remote",) * 4
        assert fetched(store, keys("a", 6, 3), 3) == 4


def test_a_run_that_lost_a_block_stays_above_and_goes_when_it_is_whole_again() -> None:
    with opened() as (store, below):
        put(store, "a", 3)
        store.delete([key("a", 1)])
        put(store, "a", 4, start=3)
        store.flush()
        assert objects_in(below) == []
        assert dropped(store, "incomplete_run") == 1
        put(store, "a", 4)
        # What was dropped is owed, and tried again when it is used.
        assert fetched(store, keys("a", 4)) == 4
        store.flush()
        assert below.stats()["blocks"] == 4


def test_chains_that_part_within_a_run_in_one_batch() -> None:
    with opened() as (store, below):
        one = items("a", 4)
        ref = BlockRef(key("b", 3), one[3][0].ns, 3, one[2][0].key, True)
        other = (ref, memoryview(content(ref.key)))
        assert store.put([*one, other]).result(30).dropped == 0
        below_only(store)
        assert len(objects_in(below)) == 2
        assert fetched(store, [*keys("a", 3), ref.key]) == 4
        below_only(store)
        assert fetched(store, keys("a", 4)) == 4


def test_a_queue_takes_whole_runs() -> None:
    with opened(writeback_bytes=6 * BLOCK) as (store, below):
        put(store, "a", 16)
        store.flush()
        went = below.stats()["blocks"]
        assert went % RUN == 0
        assert went + dropped(store, "queue_full") == 16
        for _ in range(4):
            assert fetched(store, keys("a", 16)) == 16
            store.flush()
        assert below.stats()["blocks"] == 16


def test_what_is_deleted_on_its_way_takes_its_run_along() -> None:
    with opened() as (store, below):
        writing, gate = threading.Event(), threading.Event()
        reserve = below.reserve

        def held(*args: object) -> list[Reservation]:
            writing.set()
            assert gate.wait(10)
            return reserve(*args)

        below.reserve = held
        put(store, "first", 4)
        assert writing.wait(10)
        put(store, "a", 12)
        below.remove = lambda keys, remove=below.remove: gate.set() or remove(keys)
        store.delete([key("a", 5)])
        below_only(store)
        # Of three runs that waited together the first and the last were left whole.
        assert below.stats()["blocks"] == 4 + 8
        assert dropped(store, "refused") == 0
        assert fetched(store, keys("a", 12)) == 4


def test_second_touch_by_run() -> None:
    with opened(write_rule="second_touch") as (store, below):
        put(store, "once", 8)
        put(store, "twice", 8)
        store.put(items("likely", 8), [Hint(reuse="likely")] * 8).result(30)
        store.flush()
        assert below.stats()["blocks"] == 8
        put(store, "twice", 8)
        store.flush()
        assert below.stats()["blocks"] == 16


def test_leave_writes_whole_runs_oldest_first_before_they_go() -> None:
    with opened(64, write_rule="leave") as (store, below):
        for chain in range(50):
            put(store, chain, 6)
            store.flush()
        assert below.stats()["blocks"] >= 30 * RUN
        assert dropped(store, "refused") == 0
        for chain in range(30):
            assert fetched(store, keys(chain, 6)) >= RUN
            store.flush()


def test_leave_writes_the_runs_before_a_cold_one_first() -> None:
    with opened(32, write_rule="leave") as (store, below):
        put(store, "a", 30)
        store.flush()
        there = [below.contains([key("a", depth)]).wait(30).statuses[0].value == "ok" for depth in range(3, 28, 4)]
        assert any(there)
        assert there == sorted(there, reverse=True)


def test_a_run_that_is_there_is_not_written_again() -> None:
    with opened() as (store, below):
        put(store, "a", 8)
        store.flush()
        written = store.metrics.value("written_bytes_total", tier="remote")
        below_only(store)
        put(store, "a", 8)
        store.flush()
        assert store.metrics.value("written_bytes_total", tier="remote") == written
        assert below.stats()["blocks"] == 8


def test_blocks_of_unknown_depth_stay_above() -> None:
    with opened() as (store, below):
        ref = items("a", 1)[0][0]._replace(depth=-1)
        store.put([(ref, memoryview(content(ref.key)))]).result(30)
        store.flush()
        assert objects_in(below) == []


# ---- up


def test_a_look_up_that_begins_within_a_run() -> None:
    with opened() as (store, _):
        put(store, "a", 16)
        below_only(store)
        for first in range(16):
            rest = keys("a", 16, start=first)
            assert store.match(rest, depth=first).tiers == ("remote",) * (16 - first)
            lease = store.acquire(rest, "test", depth=first).result(30)
            assert [handle.ref.key for _, handle in lease.blocks] == rest
            store.release(lease)
        assert store.prefetch(keys("a", 16, start=6), "test", depth=6).result(30).blocks == 10


@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("parts", [1, 2])
def test_what_host_has_of_a_run_is_not_read_again(first: int, parts: int) -> None:
    with opened() as (store, below):
        put(store, "a", 12, parts=parts)
        below_only(store)
        put(store, "a", first, parts=parts)
        wanted = keys("a", 12, parts)
        assert store.match(wanted, parts=parts).tiers == ("host",) * first + ("remote",) * (12 - first)
        before = store.metrics.value("read_bytes_total", tier="remote")
        assert fetched(store, wanted, parts) == 12
        read = store.metrics.value("read_bytes_total", tier="remote") - before
        assert read == (12 - first) * parts * BLOCK
        assert below.stats()["leases"] == 0


def test_parts_in_several_tiers() -> None:
    with opened() as (store, below):
        put(store, "a", 8, parts=2)
        store.flush()
        below.remove([key("a", 7, 1)]).wait(30)
        store.clear("host")
        wanted = keys("a", 8, 2)
        assert fetched(store, wanted, 2) == 4
        # The second part of the last blocks comes back into host alone.
        only = [item for item in items("a", 8, 2, start=4) if item[0].key in keys("a", 8, 2, start=4)[1::2]]
        store.put(only).result(30)
        assert store.acquire(wanted, "test", parts=2).result(30).tiers() == ["host"] * 4 + ["remote"] * 4
        store.release_owner("test")


def test_nvme_above_takes_single_blocks_and_the_rest_comes_from_runs() -> None:
    middle = memory_tier(64, name="nvme")
    with opened(middle=[middle]) as (store, below):
        put(store, "a", 10)
        store.flush()
        assert middle.stats()["blocks"] == 10
        assert below.stats()["blocks"] == 8
        middle.remove([key("a", 2)]).wait(30)
        store.clear("host")
        assert store.match(keys("a", 10)).tiers == ("nvme",) * 2 + ("remote",) * 6
        assert fetched(store, keys("a", 10)) == 8


def test_what_only_the_remote_tier_has_is_saved_in_host_again() -> None:
    with opened() as (store, _):
        put(store, "a", 16)
        store.flush()
        assert store.wanted(keys("a", 16), exact=True) == 16
        store.clear("host")
        assert store.wanted(keys("a", 16), exact=True) == 0
        put(store, "a", 6)
        assert store.wanted(keys("a", 16), exact=True) == 6


def test_finding_does_not_wait_for_a_remote_tier() -> None:
    with opened() as (store, below):
        put(store, "a", 16)
        below_only(store)
        put(store, "a", 2)
        gate = threading.Event()
        exists = below._backend.exists
        below._backend.exists = lambda names, deadline: gate.wait(10) and exists(names, deadline)
        found = store.find(keys("a", 16))
        late = store.find(keys("a", 16), deadline=time.monotonic() + 0.01)
        assert store.match(keys("a", 16), remote=False).tiers == ("host",) * 2
        assert not found.done()
        assert late.result(30).tiers == ("host",) * 2
        gate.set()
        assert found.result(30).tiers == ("host",) * 2 + ("remote",) * 14
        below._backend.exists = exists


@pytest.mark.parametrize("held", [0, 1, 3, 6, 11, 16])
def test_a_look_up_takes_two_round_trips_at_most(held: int) -> None:
    with opened() as (store, below):
        put(store, "a", 16 * RUN)
        below_only(store)
        for end in range(held * RUN, 16 * RUN, RUN):
            below.remove([key("a", end)]).wait(30)
        trips = []
        contains = below.contains

        def counted(names: Sequence[bytes], deadline: float, *, exact: bool) -> Ticket:
            trips.append(len(names))
            return contains(names, deadline, exact=exact)

        below.contains = counted
        assert store.match(keys("a", 16 * RUN)).tiers == ("remote",) * (held * RUN)
        assert len(trips) <= 2
