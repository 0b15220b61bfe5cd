"""A removal that a tier did not do is told, names the tier, and is done everywhere else."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import until
from store_world import BLOCK, NS, ExtentTier, fetched, held, items, keys, nothing_is_held

from kvtier.cpu import HostTier
from kvtier.errors import BlocksRemain
from kvtier.keys import namespace_index
from kvtier.store import StoreOptions, TieredStore
from kvtier.testing import Fault, FaultyTier, Kind

VERBS: dict[str, Callable[[TieredStore], object]] = {
    "remove": lambda store: store.delete(keys("a", 4)),
    "clear": lambda store: store.clear(ns=NS),
}
STRIKES = [(verb, kind) for verb in VERBS for kind in (Kind.UNAVAILABLE, Kind.TIMEOUT, Kind.HANG, Kind.LOST)]
UNTAKEN = [
    Fault("reserve", Kind.ENOSPC),
    Fault("write", Kind.EIO),
    Fault("write", Kind.UNAVAILABLE),
    Fault("commit", Kind.REFUSE),
]


class World:
    """host over a tier that fails over one that does not."""

    def __init__(self) -> None:
        self.host = HostTier(64 * BLOCK)
        self.faulty = FaultyTier(ExtentTier(128 * BLOCK, name="faulty"))
        self.sound = ExtentTier(128 * BLOCK, name="sound")
        options = StoreOptions(load_deadline=1.0, breaker_timeouts=100)
        self.store = TieredStore(self.host, [self.faulty, self.sound], options=options)

    def lay(self) -> None:
        assert self.store.put(items("a", 4)).result(30).stored == 4
        until(lambda: all(all(held(tier, keys("a", 4))) for tier in (self.faulty, self.sound)))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with contextlib.closing(world.store):
        yield world
        world.faulty.heal()
        until(lambda: nothing_is_held(world.store))


@pytest.mark.parametrize(("verb", "kind"), STRIKES)
def test_a_tier_that_keeps_blocks_is_named_and_the_others_have_none(world: World, verb: str, kind: Kind) -> None:
    world.lay()
    world.faulty.inject(Fault(verb, kind))
    with pytest.raises(BlocksRemain, match="blocks remain in faulty") as caught:
        VERBS[verb](world.store)
    assert (caught.value.tiers, caught.value.late) == (("faulty",), kind is not Kind.UNAVAILABLE)
    assert held(world.host, keys("a", 4)) == held(world.sound, keys("a", 4)) == [False] * 4
    counted = "errors_total" if kind is Kind.UNAVAILABLE else "timeouts_total"
    assert world.store.metrics.value(counted, tier="faulty", operation=verb) == 1
    if kind in (Kind.UNAVAILABLE, Kind.TIMEOUT):
        assert world.store.match(keys("a", 4)).tiers == ("faulty",) * 4
    world.faulty.heal()
    VERBS[verb](world.store)
    assert world.store.match(keys("a", 4)).tiers == ()


def test_a_tier_that_is_not_asked_fails_nobody(world: World) -> None:
    world.lay()
    world.faulty.inject(Fault("*", Kind.UNAVAILABLE))
    world.store.clear("host")
    world.store.clear("sound", ns=NS)
    assert held(world.sound, keys("a", 4)) == [False] * 4


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_still_being_written_is_not_gone(world: World, verb: str) -> None:
    world.faulty.inject(Fault("write", Kind.LOST))
    world.store.put(items("a", 4)).result(30)
    until(lambda: world.faulty.injected["write", Kind.LOST])
    with pytest.raises(BlocksRemain, match=r"faulty \(what was on its way there") as caught:
        VERBS[verb](world.store)
    assert caught.value.late
    world.faulty.heal()
    VERBS[verb](world.store)
    assert world.store.match(keys("a", 4)).tiers == ()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tier_with_a_defect_has_not_cleared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.lay()
    monkeypatch.setattr(world.faulty, "clear", lambda ns: {}[ns])
    with pytest.raises(BlocksRemain, match=r"faulty \(clear died\)"):
        world.store.clear()


@pytest.mark.parametrize("fault", UNTAKEN, ids=lambda fault: f"{fault.verb} {fault.kind}")
def test_what_no_lower_tier_took_is_counted(fault: Fault) -> None:
    below = FaultyTier(ExtentTier(64 * BLOCK, name="faulty"))
    with contextlib.closing(TieredStore(HostTier(64 * BLOCK), [below])) as store:
        store.put(items("taken", 2)).result(30)
        store.flush()
        below.inject(fault)
        for chain in ("a", "b", "c"):
            store.put(items(chain, 4)).result(30)
        store.flush()
        assert store.untaken() == 12
        store.delete(keys("c", 4))
        assert store.untaken() == 8
        below.heal()
        # Used again, it goes again.
        assert fetched(store, keys("a", 4)) == 4
        store.flush()
        assert store.untaken() == 4
        # What left host was lost then, not now.
        store.clear("host")
        assert store.untaken() == 0


def test_what_another_tier_took_is_not_lost(world: World) -> None:
    world.faulty.inject(Fault("write", Kind.EIO))
    world.store.put(items("a", 4)).result(30)
    world.store.flush()
    assert held(world.sound, keys("a", 4)) == [True] * 4
    assert world.store.untaken() == 0


def test_a_removal_waits_for_nothing_that_is_not_on_its_way(world: World) -> None:
    world.lay()
    world.faulty.inject(Fault("write", Kind.LOST))
    world.store.put(items("b", 4)).result(30)
    until(lambda: world.faulty.injected["write", Kind.LOST])
    done = threading.Event()
    threading.Thread(target=lambda: (world.store.delete(keys("a", 4)), done.set()), daemon=True).start()
    assert done.wait(30)
    assert world.store.match(keys("a", 4)).tiers == ()


@pytest.mark.parametrize("late", [False, True], ids=["amid", "after"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_use_in_the_midst_of_a_removal_does_not_bring_blocks_back(verb: str, late: bool) -> None:
    """Host still has them when they are used, which is a reason to write them below, where they went meanwhile."""
    host, below = HostTier(64 * BLOCK), ExtentTier(64 * BLOCK, name="below")
    leave_host, leave_below, reserve = getattr(host, verb), getattr(below, verb), below.reserve
    left, leased, over = threading.Event(), threading.Event(), threading.Event()

    def used(*arguments: object) -> object:
        setattr(host, verb, leave_host)
        assert fetched(store, keys("a", 4)) == 4
        assert leased.wait(30)
        return leave_host(*arguments)

    def gone(*arguments: object) -> object:
        ticket = leave_below(*arguments)
        left.set()
        return ticket

    def queue(handles: Sequence[object]) -> int:
        leased.set()
        assert not late or over.wait(30)
        return enqueue(handles)

    def write(*arguments: object) -> object:
        assert left.wait(30)
        return reserve(*arguments)

    with contextlib.closing(TieredStore(host, [below], options=StoreOptions(write_rule="second_touch"))) as store:
        store.put(items("a", 4)).result(30)
        enqueue, store._demoters[0].enqueue = store._demoters[0].enqueue, queue
        setattr(host, verb, used)
        setattr(below, verb, gone)
        below.reserve = write
        VERBS[verb](store)
        over.set()
        store.settle()
        assert store.match(keys("a", 4)).tiers == ()
        assert nothing_is_held(store)
        # Nothing is refused for longer than that.
        store.put(items("a", 4)).result(30)
        assert fetched(store, keys("a", 4)) == 4
        store.settle()
        assert held(below, keys("a", 4)) == [True] * 4


@pytest.mark.parametrize("verb", VERBS)
def test_what_was_being_leased_does_not_come_back(world: World, verb: str) -> None:
    """The tier has granted the lease, but the store does not have it yet when the blocks are removed."""
    acquire, granted, removed = world.sound.acquire, threading.Event(), threading.Event()

    def slow(*arguments: object, **named: object) -> object:
        ticket = acquire(*arguments, **named)
        granted.set()
        assert removed.wait(30)
        return ticket

    world.lay()
    world.store.clear("host")
    world.store.clear("faulty")
    world.sound.acquire = slow
    later = time.monotonic() + 60
    leasing = world.store.acquire(keys("a", 4), "test", deadline=later)
    assert granted.wait(30)
    VERBS[verb](world.store)
    removed.set()
    lease = leasing.result(30)
    assert len(lease) == 4
    assert world.store.fetch(lease, 0, 4, deadline=later).result(30) == 0
    world.store.release(lease)
    assert world.store.match(keys("a", 4)).tiers == ()


def test_a_namespace_that_is_cleared_takes_no_load_of_another_with_it(world: World) -> None:
    other = namespace_index(bytes(31) + b"o")
    world.store.put(items("a", 4)).result(30)
    world.store.put(items("b", 4, ns=other)).result(30)
    world.store.flush()
    world.store.clear("host")
    world.faulty.inject(Fault("read", Kind.HANG))
    later = time.monotonic() + 60
    lease = world.store.acquire(keys("b", 4), "test", deadline=later).result(30)
    loaded = world.store.fetch(lease, 0, 4, deadline=later)
    until(lambda: world.faulty.injected["read", Kind.HANG])
    world.store.clear(ns=NS)
    world.faulty.heal()
    assert loaded.result(30) == 4
    world.store.release(lease)
    assert world.store.match(keys("b", 4)).tiers == ("host",) * 4
    assert world.store.match(keys("a", 4)).tiers == ()


@pytest.mark.parametrize("verb", VERBS)
def test_what_its_only_writer_removed_is_nowhere_whatever_others_do(verb: str) -> None:
    """Each thread alone puts and removes its chains; all threads use all chains in every way that moves blocks."""
    spaces = [namespace_index(bytes(31) + bytes([number])) for number in range(4)]
    chains = [(number, chain) for number in range(4) for chain in range(3)]
    host, below = HostTier(40 * BLOCK), ExtentTier(256 * BLOCK, name="below")
    options = StoreOptions(write_rule="second_touch", writeback_bytes=16 * BLOCK)
    with contextlib.closing(TieredStore(host, [below], options=options)) as store:
        uses = [
            lambda chain: fetched(store, keys(chain, 6)),
            lambda chain: store.renew(keys(chain, 6)),
            lambda chain: store.demote(keys(chain, 6)),
            lambda chain: store.prefetch(keys(chain, 6), "test").result(30),
            lambda _: store.clear("host"),
        ]

        def work(number: int) -> None:
            dice = random.Random(number)
            for _ in range(200):
                mine = (number, dice.randrange(3))
                what = dice.random()
                if what < 0.3:
                    store.put(items(mine, dice.randint(1, 6), ns=spaces[number])).result(30)
                elif what < 0.9:
                    dice.choices(uses, [50, 5, 5, 5, 1])[0](dice.choice(chains))
                else:
                    gone = [key for one in range(3) for key in keys((number, one), 6)]
                    if verb == "clear":
                        store.clear(ns=spaces[number])
                    else:
                        gone = gone[::3]
                        store.delete(gone)
                    for _ in range(2):
                        assert not any(held(host, gone) + held(below, gone))
                        time.sleep(dice.random() / 100)

        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(work, number) for number in range(4)]:
                done.result(100)
        store.settle()
        assert nothing_is_held(store)
