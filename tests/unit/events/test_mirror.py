"""Mirror: device and tiers joined; changes and snapshot add up to the same."""

import random
import threading
from typing import Any

import pytest
from events_world import View, folded
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.events import EventLog
from kvtier.events.frames import BlockEvent, BlocksCleared, BlockStored
from kvtier.events.mirror import Mirror
from kvtier.keys import Chain, Namespace, namespace_index, store_keys
from kvtier.tiers import BlockRef

SIZE = 4
SPACE = Namespace("mirror", b"layout")
OTHER = Namespace("other", b"layout")


def chain_of(seed: int, blocks: int = 5) -> tuple[list[bytes], list[int]]:
    tokens = [seed, *range(1, blocks * SIZE)]
    chain = Chain(SIZE)
    chain.extend(tokens)
    return chain.keys, tokens


CHAINS = [chain_of(seed) for seed in range(3)]
EXPECTED = {
    key[:16]: (None if not at else keys[at - 1][:16], tuple(tokens[at * SIZE : (at + 1) * SIZE]))
    for keys, tokens in CHAINS
    for at, key in enumerate(keys)
}


def refs(chain: int, start: int, stop: int, space: Namespace = SPACE) -> list[BlockRef]:
    keys = store_keys(CHAINS[chain][0], space.mask())
    ns = namespace_index(space.digest)
    return [BlockRef(keys[at], ns, at, keys[at - 1] if at else None, True) for at in range(start, stop)]


def test_the_first_block_of_a_salted_chain_says_its_salt() -> None:
    mirror = Mirror(SIZE)
    keys, tokens = CHAINS[0]
    mirror.named(keys[:2], None, tokens[: 2 * SIZE], "ours")
    mirror.named(keys[2:3], keys[1], tokens[2 * SIZE : 3 * SIZE], "ours")
    told = [event for event in mirror.take() if isinstance(event, BlockStored)]
    assert [(len(event.block_hashes), event.extra_keys) for event in told] == [(3, [["ours"], None, None])]


def named(mirror: Mirror, chain: int, start: int, stop: int) -> None:
    keys, tokens = CHAINS[chain]
    mirror.named(keys[start:stop], keys[start - 1] if start else None, tokens[start * SIZE : stop * SIZE])


class World:
    """A mirror, and what it should say: the plainest way to keep it."""

    def __init__(self, bound: int = 1 << 16) -> None:
        self.log = EventLog()
        self.mirror = Mirror(SIZE, self.log, SPACE, bound=bound)
        self.view = View()
        self.held: dict[bytes, set[str]] = {}
        self.known: set[bytes] = set()

    def do(self, verb: str, chain: int, start: int, stop: int) -> None:
        heads = [key[:16] for key in CHAINS[chain][0][start:stop]]
        ns = namespace_index(SPACE.digest)
        match verb.split():
            case ["named"]:
                named(self.mirror, chain, start, stop)
                self.known.update(heads)
                self.add(heads, "GPU")
            case ["unnamed"]:
                self.mirror.unnamed(CHAINS[chain][0][start:stop])
                self.drop(heads, "GPU")
            case ["stored", tier]:
                self.log.stored(tier, refs(chain, start, stop))
                self.log.stored(tier, refs(chain, start, stop, OTHER))
                self.add(heads, {"host": "CPU", "nvme": "STORAGE"}[tier])
            case ["removed", tier]:
                self.log.removed(tier, [(ns, ref.key) for ref in refs(chain, start, stop)], "capacity")
                self.drop(heads, {"host": "CPU", "nvme": "STORAGE"}[tier])
            case ["cleared", tier]:
                self.log.cleared(tier, ns if chain else None)
                self.drop(list(self.held), {"host": "CPU", "nvme": "STORAGE"}[tier])
        self.mirror._follow()

    def add(self, heads: list[bytes], medium: str) -> None:
        for head in heads:
            self.held.setdefault(head, set()).add(medium)

    def drop(self, heads: list[bytes], medium: str) -> None:
        for head in heads:
            self.held.get(head, set()).discard(medium)
            if not self.held.get(head):
                self.held.pop(head, None)
                self.known.discard(head)

    def truth(self) -> dict[str, dict[bytes, tuple[bytes | None, tuple[int, ...]]]]:
        told: dict[str, dict[bytes, tuple[bytes | None, tuple[int, ...]]]] = {}
        for head, media in self.held.items():
            for medium in media if head in self.known else ():
                told.setdefault(medium, {})[head] = EXPECTED[head]
        return told

    def check(self) -> None:
        while events := self.mirror.take():
            self.view.apply(events)
        assert {medium: held for medium, held in self.view.media.items() if held} == self.truth()
        assert folded(self.mirror.snapshot()) == self.truth()


VERBS = ["named"] * 4 + ["unnamed", "unnamed"]
VERBS += [f"{verb} {tier}" for tier in ("host", "nvme") for verb in ("stored", "stored", "removed", "cleared")]
steps = st.tuples(st.sampled_from(VERBS), st.integers(0, 2), st.integers(0, 4), st.integers(1, 5), st.booleans())


@given(st.lists(steps, max_size=30), st.sampled_from([3, 1 << 16]))
@settings(max_examples=50)
def test_changes_and_snapshots_add_up_to_what_is_held(walk: list[tuple[str, int, int, int, bool]], bound: int) -> None:
    world = World(bound)
    for verb, chain, start, stop, look in walk:
        world.do(verb, chain, start, max(start + 1, stop))
        if look:
            world.check()
    world.check()


def test_a_run_is_one_event_with_its_parent_and_tokens() -> None:
    world = World()
    named(world.mirror, 0, 1, 3)
    named(world.mirror, 0, 3, 5)
    keys, tokens = CHAINS[0]
    heads = [key[:16] for key in keys]
    assert world.mirror.take() == [BlockStored(heads[1:], heads[0], tokens[SIZE:], SIZE, None, "GPU", None)]
    assert world.mirror.take() == []


def test_a_snapshot_has_parents_first_whatever_the_order_of_arrival() -> None:
    world = World()
    for at in (4, 2, 0, 3, 1):
        named(world.mirror, 0, at, at + 1)
    cleared, stored = world.mirror.snapshot()
    assert cleared == BlocksCleared()
    assert stored.block_hashes == [key[:16] for key in CHAINS[0][0]]


def test_what_was_stored_before_is_told_with_its_first_use() -> None:
    world = World()
    world.log.stored("nvme", refs(0, 0, 2))
    assert world.mirror.take() == []
    named(world.mirror, 0, 0, 1)
    assert sorted(event.medium for event in world.mirror.take()) == ["GPU", "STORAGE"]


def test_more_changes_than_may_wait_become_all_there_is() -> None:
    world = World(bound=4)
    named(world.mirror, 0, 0, 5)
    events = world.mirror.take()
    assert events[0] == BlocksCleared()
    assert world.mirror.counts() == (5, 1, 0)
    named(world.mirror, 1, 0, 1)
    assert [type(event) for event in world.mirror.take()] == [BlockStored], "and then changes again"


def test_the_engine_is_heard_while_all_there_is_is_put_into_words(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(bound=4)
    named(world.mirror, 0, 0, 5)
    put = Mirror._append
    others: list[int] = []

    def put_meanwhile(mirror: Mirror, events: list[BlockEvent], *rest: Any) -> None:
        if events and isinstance(events[0], BlocksCleared) and not others:
            others.append(1)
            engine = threading.Thread(target=named, args=(mirror, 1, 0, 3))
            engine.start()
            engine.join(10)
            assert not engine.is_alive()
        put(mirror, events, *rest)

    monkeypatch.setattr(Mirror, "_append", put_meanwhile)
    view = View()
    view.apply(world.mirror.take())
    assert view.hashes() == {key[:16] for key in CHAINS[0][0]}
    others.clear()
    assert len(folded(world.mirror.snapshot())["GPU"]) == 8
    view.apply(world.mirror.take())
    assert view.hashes() == {key[:16] for key in [*CHAINS[0][0], *CHAINS[1][0][:3]]}


def test_a_log_that_forgot_makes_tiers_unknown_not_wrong() -> None:
    log = EventLog(4)
    mirror = Mirror(SIZE, log, SPACE)
    view = View()
    named(mirror, 0, 0, 2)
    log.stored("host", refs(0, 0, 2))
    view.apply(mirror.take())
    assert len(view.hashes("CPU")) == 2
    log.removed("host", [(ref.ns, ref.key) for ref in refs(0, 1, 2)], "capacity")
    for _ in range(6):
        log.stored("host", refs(1, 0, 2))
    view.apply(mirror.take())
    assert view.hashes("CPU") == set()
    assert len(view.hashes()) == 2, "the device tells by itself"
    assert mirror.counts().missed == 1


def test_wakes_whoever_publishes_until_closed() -> None:
    log = EventLog()
    mirror = Mirror(SIZE, log, SPACE)
    heard: list[int] = []
    mirror.wake = lambda: heard.append(1)
    named(mirror, 0, 0, 1)
    log.cleared("host", None)
    mirror.unnamed(CHAINS[0][0][:1])
    assert len(heard) == 3
    mirror.close()
    log.cleared("host", None)
    assert len(heard) == 3


def test_threads_that_change_at_once() -> None:
    world = World()

    def device() -> None:
        chance = random.Random(1)
        for _ in range(300):
            at = chance.randrange(5)
            named(world.mirror, 0, at, 5)
            world.mirror.unnamed(CHAINS[0][0][at:])

    def tier() -> None:
        chance = random.Random(2)
        for _ in range(300):
            some = refs(0, chance.randrange(5), 5)
            world.log.stored("host", some)
            world.log.removed("host", [(ref.ns, ref.key) for ref in some], "capacity")

    threads = [threading.Thread(target=device), threading.Thread(target=tier)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        world.view.apply(world.mirror.take())
    for thread in threads:
        thread.join()
    world.check()
    assert not any(world.view.media.values())
