"""A tier that does not answer: its requests miss at their deadline, nobody else notices, it is skipped and retried."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from patience import until
from store_world import BLOCK, ExtentTier, fetched, held, items, keys, nothing_is_held, verify

from kvtier.cpu import HostTier
from kvtier.errors import BlocksRemain
from kvtier.hints import Hint
from kvtier.store import PrefetchResult, StoreOptions, TieredStore
from kvtier.testing import Fault, FaultyTier, Kind

HANGS = [Fault(verb, kind) for verb in ("acquire", "read") for kind in (Kind.HANG, Kind.LOST)]


class World:
    """host over a tier that can hang over one that does not, on a clock that only the breaker reads."""

    def __init__(self) -> None:
        self.now = 0.0
        self.hanging = FaultyTier(ExtentTier(128 * BLOCK, name="hanging"))
        self.slowest = ExtentTier(128 * BLOCK, name="slowest")
        # Long enough for a tier that does answer, on a machine that is busy with other things.
        options = StoreOptions(load_deadline=0.5, breaker_timeouts=2, breaker_pause=5.0)
        self.host = HostTier(64 * BLOCK)
        self.store = TieredStore(self.host, [self.hanging, self.slowest], options=options, clock=lambda: self.now)

    def lay(self) -> None:
        """`hung` in the tier that will hang, `spared` in the one below it, `warm` in host."""
        chains = ("hung", "spared", "warm")
        for chain in chains:
            assert self.store.put(items(chain, 8)).result(10).stored == 8
        until(lambda: all(all(held(tier, keys(chain, 8))) for tier in (self.hanging, self.slowest) for chain in chains))
        self.store.flush()
        self.host.remove(keys("hung", 8) + keys("spared", 8)).wait()
        self.hanging.remove(keys("spared", 8)).wait()
        self.slowest.remove(keys("hung", 8)).wait()

    def value(self, name: str, **labels: str) -> float:
        return self.store.metrics.value(name, tier="hanging", **labels)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with contextlib.closing(world.store):
        world.lay()
        yield world
        world.hanging.heal()
        until(lambda: nothing_is_held(world.store))


@pytest.mark.parametrize("fault", HANGS, ids=lambda fault: f"{fault.verb} {fault.kind}")
def test_a_hanging_load_is_a_miss_at_its_deadline_and_leaks_nothing(world: World, fault: Fault) -> None:
    world.hanging.inject(fault)
    lease = world.store.acquire(keys("hung", 8), "test").result(10)
    assert world.store.fetch(lease, 0, len(lease)).result(10) == 0
    world.store.release(lease)
    assert world.store.metrics.value("timeouts_total", tier="hanging", operation="acquire") + sum(
        world.value("timeouts_total", operation=operation) for operation in ("fetch", "read", "promote")
    )
    world.hanging.heal()
    until(lambda: nothing_is_held(world.store))
    assert fetched(world.store, keys("hung", 8), patience=20) == 8


def test_what_arrives_after_the_deadline_harms_nobody(world: World) -> None:
    world.hanging.inject(Fault("read", Kind.LOST))
    lease = world.store.acquire(keys("hung", 8), "test", deadline=time.monotonic() + 60).result(10)
    assert len(lease) == 8
    assert world.store.fetch(lease, 0, 8).result(10) == 0
    world.store.release(lease)
    # The slots that the late bytes go to are nobody else's, however full host becomes meanwhile.
    for chain in range(8):
        world.store.put(items(chain, 8)).result(10)
    world.hanging.heal()
    until(lambda: nothing_is_held(world.store))
    for chain in range(8):
        fetched(world.store, keys(chain, 8))
    assert fetched(world.store, keys("hung", 8), patience=20) == 8


def test_loads_from_other_tiers_go_on_while_one_hangs(world: World) -> None:
    world.hanging.inject(Fault("read", Kind.HANG))
    far = time.monotonic() + 60
    # Many more than the hanging tier has threads.
    hung = [world.store.acquire(keys("hung", 8), f"h{at}", deadline=far).result(10) for at in range(20)]
    futures = [world.store.fetch(lease, 0, 8, deadline=far) for lease in hung]
    for _ in range(5):
        assert fetched(world.store, keys("warm", 8), patience=20) == 8
    for at in range(3):
        lease = world.store.acquire(keys("spared", 8), "test", deadline=far).result(10)
        assert world.store.fetch(lease, 0, 8, deadline=far).result(10) == 8
        verify(world.store, lease, 0, 8)
        world.store.release(lease)
        world.host.remove(keys("spared", 8)).wait()
        assert at < 3
    assert world.store.put(items("new", 8)).result(10).stored == 8
    assert not any(future.done() for future in futures)
    # What waits for the tier is its queue, whether it has a thread or not.
    assert world.store.speeds()["hanging"].queued_bytes == 20 * 8 * BLOCK
    world.hanging.heal()
    assert [future.result(10) for future in futures] == [8] * 20
    assert world.store.speeds()["hanging"].queued_bytes == 0
    for lease in hung:
        world.store.release(lease)


def test_a_tier_that_hangs_is_skipped_and_tried_again_later(world: World) -> None:
    world.hanging.inject(Fault("acquire", Kind.HANG), Fault("contains", Kind.HANG))
    # Look-ups of what is only there cost the deadline until the breaker opens ...
    while not world.store._ports[1].breaker.is_open:
        assert len(world.store.acquire(keys("hung", 8), "test").result(10)) == 0
    assert world.value("breaker_trips_total") == 1
    # ... and nothing afterwards: no call reaches it.
    calls = dict(world.hanging.injected)
    for _ in range(5):
        assert world.store.match(keys("hung", 8)).tiers == ()
        assert world.store.acquire(keys("hung", 8), "test").result(10).blocks == []
        assert fetched(world.store, keys("spared", 8), patience=20) == 8
        world.host.remove(keys("spared", 8)).wait()
    assert dict(world.hanging.injected) == calls
    assert world.value("skipped_lookups_total") >= 10
    # After the pause one request tries it, in vain: twice the pause.
    world.now = 6.0
    assert world.store.acquire(keys("hung", 8), "test").result(10).blocks == []
    assert dict(world.hanging.injected) != calls
    world.hanging.heal()
    world.now = 12.0
    assert world.store.acquire(keys("hung", 8), "test").result(10).blocks == []
    # The next trial starts with a look-up, loads, and the tier is back.
    assert world.store.match(keys("hung", 8)).tiers == ()
    world.now = 17.0
    assert world.store.match(keys("hung", 8)).tiers == ("hanging",) * 8
    assert fetched(world.store, keys("hung", 8), patience=20) == 8
    assert not world.store._ports[1].breaker.is_open
    assert len(world.store.match(keys("hung", 8)).tiers) == 8


def left_alone(world: World) -> None:
    """The tier hung until its breaker opened; it answers again, and a trial is due."""
    world.hanging.inject(Fault("acquire", Kind.HANG), Fault("contains", Kind.HANG))
    while not world.store._ports[1].breaker.is_open:
        assert len(world.store.acquire(keys("hung", 8), "test").result(10)) == 0
    world.hanging.heal()
    world.now = 6.0


def test_a_prefetch_takes_no_trial_from_a_request(world: World) -> None:
    left_alone(world)
    assert world.store.prefetch(keys("hung", 8), "test").result(10).blocks == 0
    assert fetched(world.store, keys("hung", 8), patience=20) == 8
    assert not world.store._ports[1].breaker.is_open


@pytest.mark.parametrize("remote", [False, True])
def test_a_server_that_grants_a_lease_answers_again_a_disk_only_once_it_is_read(world: World, remote: bool) -> None:
    world.hanging.caps = replace(world.hanging.caps, remote=remote)
    left_alone(world)
    lease = world.store.acquire(keys("hung", 8), "test").result(10)
    assert len(lease) == 8
    assert world.store._ports[1].breaker.is_open is not remote
    world.store.release(lease)


def test_a_server_whose_reads_hang_is_left_alone_although_it_grants_leases(world: World) -> None:
    world.hanging.caps = replace(world.hanging.caps, remote=True)
    world.hanging.inject(Fault("read", Kind.HANG))
    for _ in range(2):
        lease = world.store.acquire(keys("hung", 8), "test").result(10)
        assert world.store.fetch(lease, 0, len(lease)).result(10) == 0
        world.store.release(lease)
    assert world.store._ports[1].breaker.is_open
    assert world.value("breaker_trips_total") == 1


def test_what_host_has_takes_no_trial_of_the_tiers_below_it(world: World) -> None:
    left_alone(world)
    assert fetched(world.store, keys("warm", 8), patience=20) == 8
    assert fetched(world.store, keys("hung", 8), patience=20) == 8
    assert not world.store._ports[1].breaker.is_open


def test_a_hanging_index_costs_a_match_a_bounded_time(world: World) -> None:
    world.hanging.inject(Fault("contains", Kind.LOST))
    assert world.store.match(keys("warm", 8)).tiers == ("host",) * 8
    assert world.store.match(keys("hung", 8)).tiers == ()
    assert world.value("timeouts_total", operation="match") >= 1


def test_a_prefetch_ends_at_its_deadline(world: World) -> None:
    world.hanging.inject(Fault("read", Kind.HANG))
    prefetch = world.store.prefetch(keys("hung", 8), "test", deadline=time.monotonic() + 0.05)
    assert prefetch.result(10) == PrefetchResult(0, "timeout")


def test_a_load_that_joins_one_that_hangs_waits_no_longer_than_its_own_deadline(world: World) -> None:
    world.hanging.inject(Fault("read", Kind.LOST, nth=1))
    far = time.monotonic() + 60
    first = world.store.acquire(keys("hung", 8), "first", deadline=far).result(10)
    second = world.store.acquire(keys("hung", 8), "second", deadline=far).result(10)
    slow = world.store.fetch(first, 0, 8, deadline=far)
    until(lambda: world.hanging.injected[("read", Kind.LOST)] == 1)
    assert world.store.fetch(second, 0, 8, deadline=time.monotonic() + 0.05).result(10) == 0
    world.hanging.heal()
    assert slow.result(10) == 8
    world.store.release(first)
    world.store.release(second)


@pytest.mark.parametrize("verb", ["flush", "clear", "hint", "remove"])
def test_what_hangs_otherwise_is_not_waited_for_either(world: World, verb: str) -> None:
    world.hanging.inject(Fault(verb, Kind.HANG))
    world.store.hint(keys("hung", 8), [Hint(reuse="likely")] * 8)
    world.store.flush()
    for remove, fault in ((partial(world.store.delete, keys("hung", 1)), "remove"), (world.store.clear, "clear")):
        # Not waited for, and not said to be done.
        with pytest.raises(BlocksRemain, match="in hanging") if verb == fault else contextlib.nullcontext():
            remove()
    assert world.store.put(items("new", 8)).result(10).stored == 8
    assert fetched(world.store, keys("new", 8), patience=20) == 8


@pytest.mark.parametrize("verb", ["reserve", "write", "commit"])
def test_a_hanging_write_holds_up_neither_puts_nor_other_tiers_nor_flush(world: World, verb: str) -> None:
    world.hanging.inject(Fault(verb, Kind.LOST if verb == "write" else Kind.HANG))
    for chain in range(4):
        assert world.store.put(items(chain, 8)).result(10).stored == 8
    world.store.flush()
    assert world.value("timeouts_total", operation="drain") >= 1
    until(lambda: all(all(held(world.slowest, keys(chain, 8))) for chain in range(4)))
    world.hanging.heal()
    until(lambda: all(all(held(world.hanging, keys(chain, 8))) for chain in range(4)))


def test_an_owner_that_dies_in_mid_load_holds_nothing_afterwards(world: World) -> None:
    world.hanging.inject(Fault("read", Kind.HANG), Fault("acquire", Kind.HANG, nth=2))
    far = time.monotonic() + 60
    lease = world.store.acquire(keys("hung", 8), "dies", deadline=far).result(10)
    world.store.fetch(lease, 0, 8, deadline=far)
    late = world.store.acquire(keys("hung", 8), "dies", deadline=far)
    world.store.release_owner("dies")
    world.hanging.heal()
    assert late.result(10).blocks == []
    until(lambda: nothing_is_held(world.store))


def test_close_does_not_wait_for_a_tier_that_hangs() -> None:
    world = World()
    world.lay()
    world.hanging.inject(Fault("read", Kind.LOST))
    lease = world.store.acquire(keys("hung", 8), "test", deadline=time.monotonic() + 60).result(10)
    future = world.store.fetch(lease, 0, 8, deadline=time.monotonic() + 600)
    until(lambda: world.hanging.injected[("read", Kind.LOST)] == 1)
    closer = threading.Thread(target=world.store.close)
    closer.start()
    closer.join(20)
    assert not closer.is_alive()
    assert world.store.metrics.value("errors_total", tier="hanging", operation="close") == 1
    assert not future.done()
    world.hanging.heal()
    assert future.result(10) == 0
    world.hanging.close()
