"""Bytes that are received into host memory stay where they are when they are put."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import hypothesis.strategies as st
import numpy as np
import pytest
from data_world import BLOCK, NOTHING, PARTS, PLAIN, World, blocks, chain, content, world
from hypothesis import given, settings

from kvtier.client.results import Block
from kvtier.cpu import HostTier
from kvtier.cpu.region import round_up
from kvtier.errors import FormatMismatch, LeaseError
from kvtier.hints import Hint
from kvtier.layout import Layout
from kvtier.native.receiving import hashed
from kvtier.service.cache import BlockNames, BlockPut, PutOutcome
from kvtier.store import Received, TieredStore
from kvtier.testing.blocks import chain_refs
from kvtier.tiers import BlockRef, Handle, block_checksum, checksum_head

SIZE = 5000
PAGES = 8192


@pytest.fixture
def store() -> Iterator[TieredStore]:
    made = TieredStore(HostTier(8 * PAGES))
    yield made
    made.host.check()  # type: ignore[attr-defined]
    made.close()


def received(store: TieredStore, *names: str) -> list[Handle]:
    handles = store.private.room([SIZE] * len(names))
    for handle, name in zip(handles, names, strict=False):
        store.host.buffer(handle)[:SIZE] = name.encode() * (SIZE // len(name))
    return handles


def named(keys: list[bytes]) -> BlockNames:
    return BlockNames(keys, [0] * len(keys), [None] * len(keys))


def put(store: TieredStore, refs: list[BlockRef], handles: list[Handle]) -> list[str]:
    items = [(ref, store.host.buffer(handle)[:SIZE]) for ref, handle in zip(refs, handles, strict=True)]
    outcomes = store.put_each(items, owned=[Received(handle) for handle in handles]).result(30)
    store.private.give_up(handles)
    return list(outcomes)


def read(store: TieredStore, refs: list[BlockRef]) -> list[str]:
    lease = store.acquire([ref.key for ref in refs], "reader").result(30)
    found = [bytes(store.host.buffer(handle)[:4]).decode() for _, handle in lease.blocks]
    store.release(lease)
    return found


def test_the_memory_becomes_the_blocks_without_a_copy(store: TieredStore) -> None:
    refs = chain_refs(3)
    handles = received(store, "aaaa", "bbbb", "cccc")
    where = [store.host.span(handle) for handle in handles]
    assert put(store, refs, handles) == ["stored"] * 3
    assert read(store, refs) == ["aaaa", "bbbb", "cccc"]
    lease = store.acquire([ref.key for ref in refs], "reader").result(30)
    assert [found.span for found in store.located(lease, 0, 3)] == where
    store.release(lease)
    stats = store.stats()["host"]
    assert (stats["reservations"], stats["bytes"]) == (0, 3 * PAGES)


def test_the_checksum_made_on_the_way_is_the_records_if_its_head_is(store: TieredStore) -> None:
    refs = chain_refs(4)
    handles = received(store, "aaaa", "bbbb", "cccc", "dddd")
    good = [block_checksum(ref, "raw", store.host.buffer(h)[:SIZE]) for ref, h in zip(refs, handles, strict=True)]
    told = [
        Received(handles[0], checksum_head(refs[0], "raw"), good[0]),
        Received(handles[1], checksum_head(refs[0], "raw"), good[0]),  # of another block
        Received(handles[2]),
        Received(handles[3], checksum_head(refs[3], "raw"), bytes(16)),  # what came is not what lies there
    ]
    items = [(ref, store.host.buffer(handle)[:SIZE]) for ref, handle in zip(refs, handles, strict=True)]
    assert store.put_each(items, owned=told).result(5) == ["stored"] * 4
    store.private.give_up(handles)
    lease = store.acquire([ref.key for ref in refs], "reader").result(5)
    assert [handle.checksum for _, handle in lease.blocks] == good[:3]
    store.release(lease)
    assert store.host.stats()["corrupt"] == 1


def test_a_part_that_is_none_has_no_head(tmp_path: Path) -> None:
    with world(tmp_path) as service, service.client() as client:
        client.create_namespace("parts", None)
        names = BlockNames([b"p" * 16] * 3, [0, 1, -1], [None] * 3)
        room = service.cache.room(service.admin, "parts", names, [BLOCK] * 3)
        assert room is not None
        assert [head is None for head in room.heads] == [False, True, True]
        assert [one.checksum for one in room.received(hashed(room.views, room.heads))][1:] == [b""] * 2
        room.close()


def test_what_is_there_already_stays_and_the_room_is_freed(store: TieredStore) -> None:
    refs = chain_refs(2)
    put(store, refs, received(store, "aaaa", "bbbb"))
    assert put(store, refs, received(store, "xxxx", "yyyy")) == ["joined"] * 2
    assert read(store, refs) == ["aaaa", "bbbb"]
    assert store.stats()["host"]["bytes"] == 2 * PAGES


def test_where_nothing_may_leave_there_is_no_room(store: TieredStore) -> None:
    refs = chain_refs(6)
    put(store, refs[:4], received(store, *"abcd"))
    put(store, refs[4:], received(store, *"ef"))
    lease = store.acquire([ref.key for ref in refs], "reader").result(30)
    assert store.private.room([SIZE] * 3) == []
    assert store.stats()["host"]["reservations"] == 0
    handles = received(store, "gggg")
    assert len(handles) == 1
    store.release(lease)
    store.private.give_up(handles)
    store.private.give_up(handles)


def test_only_live_reservations_are_renamed() -> None:
    tier = HostTier(8 * PAGES)
    one, other = (tier.reserve(chain_refs(1, seed=seed), [SIZE], ["raw"], "w")[0] for seed in (1, 2))
    assert isinstance(one, Handle)
    assert isinstance(other, Handle)
    refs = chain_refs(2, seed=3)
    with pytest.raises(FormatMismatch, match="2 refs, 1 sizes"):
        tier.rename([one], refs, "w", [Hint()] * 2)
    tier.abort([other])
    with pytest.raises(LeaseError):
        tier.rename([one, other], refs, "w", [Hint()] * 2)
    assert one.ref == chain_refs(1, seed=1)[0]
    assert tier.rename([one], refs[:1], "w", [Hint()]) == [one]
    assert one.ref == refs[0]
    tier.check()
    tier.close()


def test_memory_of_another_size_is_copied_from(store: TieredStore) -> None:
    (ref,) = chain_refs(1)
    handles = received(store, "aaaa")
    items = [(ref, store.host.buffer(handles[0])[:4096])]
    assert store.put_each(items, owned=[Received(handles[0])]).result(5) == ["stored"]
    assert handles[0].ref != ref
    store.private.give_up(handles)
    assert read(store, [ref]) == ["aaaa"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.booleans(), st.booleans()), max_size=25))
@settings(max_examples=25)
def test_any_mixture_of_ways_reads_back_what_was_put(steps: list[tuple[int, int, bool, bool]]) -> None:
    """Against a dict: what is found is what was put first; nothing is held at the end."""
    host = HostTier(6 * PAGES)
    store = TieredStore(host)
    kept: dict[bytes, str] = {}
    for number, (seed, count, in_place, forgets) in enumerate(steps):
        refs = chain_refs(count, seed=seed)
        names = [f"{number:03d}{at}" for at in range(count)]
        handles = received(store, *names) if in_place else []
        if forgets:
            store.private.give_up(handles)
            continue
        if handles:
            outcomes = put(store, refs, handles)
        else:
            data = [memoryview(name.encode() * (SIZE // 4)) for name in names]
            outcomes = store.put_each(list(zip(refs, data, strict=True))).result(30)
        for ref, name, outcome in zip(refs, names, outcomes, strict=True):
            if outcome == "stored":
                kept[ref.key] = name
        found = read(store, refs)
        assert found == [kept[ref.key] for ref in refs[: len(found)]]
        host.check()
    stats = host.stats()
    assert (stats["reservations"], stats["leases"]) == (0, 0)
    store.close()


def test_a_tenant_lends_a_part_of_its_memory_only(tmp_path: Path) -> None:
    with world(tmp_path) as service, service.client() as client:
        client.create_namespace("rooms", None)
        caller = service.admin
        share = (16 << 20) // 8
        count = share // BLOCK
        room = service.cache.room(caller, "rooms", named([b"r" * 16] * count), [BLOCK] * count)
        assert room is not None
        assert service.cache.room(caller, "rooms", named([b"s" * 16]), [1]) is None
        keys = chain(20, "beside")
        assert set(client.put_many("rooms", blocks(keys))) == {PutOutcome.STORED}
        room.close()
        room.close()
        again = service.cache.room(caller, "rooms", named([b"k" * 16]), [BLOCK])
        assert again is not None
        again.views[0][:] = content(keys[0])
        (owned,) = again.received(hashed(again.views, again.heads))
        block = BlockPut(b"k" * 16, 0, None, -1, exact=True, data=again.views[0], owned=owned)
        (outcome,) = service.cache.put(caller, "rooms", [block]).result(30)
        again.close()
        assert outcome == "stored"
        found = client.get("rooms", b"k" * 16)
        assert found is not None
        assert bytes(found.data) == content(keys[0])
        client.close()
        assert service.settled() == NOTHING


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
def test_blocks_that_are_there_drive_out_no_others(service: World, way: str) -> None:
    def evicted() -> int:
        (red,) = (tenant for tenant in service.cache.stats(service.admin).tenants if tenant.name == "red")
        return red.tiers["host"]["evicted"]

    with service.client(way) as client:
        client.create_namespace("twice", None)
        latest = chain(8, "latest")
        for keys in [chain(64, f"older{turn}") for turn in range(8)] + [latest]:
            client.put_many("twice", blocks(keys))
        before = evicted()
        assert before
        assert set(client.put_many("twice", blocks(latest))) == {PutOutcome.EXISTS}
        assert evicted() == before


def test_a_full_tenant_still_takes_puts(service: World) -> None:
    with service.client() as client:
        client.create_namespace("full", None)
        for turn in range(8):
            keys = chain(60, f"full{turn}")
            assert set(client.put_many("full", blocks(keys))) == {PutOutcome.STORED}
            assert len(client.get_many("full", keys)) == 60


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
@pytest.mark.parametrize("layout", [None, PARTS], ids=["one part", "four parts"])
def test_what_a_put_hangs_from_does_not_leave_to_make_room_for_it(
    tmp_path: Path, way: str, layout: Layout | None
) -> None:
    """The beginning of a conversation is the coldest that there is when its next turn is put."""
    with world(tmp_path) as service, service.client(way) as client:
        sizes = client.create_namespace("turns", layout).block_bytes or (BLOCK,)
        host = service.cache._tenants["red"].store.host
        block_bytes = sum(map(round_up, sizes))
        more = (2 << 20) // block_bytes - 1  # a room is lent for so many

        def turn(keys: list[bytes], start: int = 0) -> None:
            made = [
                Block(key, content(key, size, part), part, parent=keys[at - 1] if at else None, depth=at)
                for at, key in enumerate(keys)
                for part, size in enumerate(sizes)
                if at >= start
            ]
            assert set(client.put_many("turns", made)) == {PutOutcome.STORED}

        talk = chain(20 + more, "talk")
        turn(talk[:20])
        for number in range(((16 << 20) // block_bytes - 20 - more // 2) // 20):
            turn(chain(20, f"other{number}"))
        assert host.stats()["evicted"] == 0
        turn(talk, 20)
        assert host.stats()["evicted"] > 0
        assert len(client.match("turns", talk).tiers) == len(talk)


def test_many_short_blocks_are_lent_what_they_occupy(tmp_path: Path) -> None:
    with world(tmp_path) as service, service.client() as client:
        client.create_namespace("short", None)
        share = (16 << 20) // 8 // 4096
        first, *others = chain(share + 1, "short")
        assert service.cache.room(service.admin, "short", named([first, *others]), [1] * (share + 1)) is None
        room = service.cache.room(service.admin, "short", named(others), [1] * share)
        assert room is not None
        assert service.cache.room(service.admin, "short", named([first]), [1]) is None
        room.close()
        again = service.cache.room(service.admin, "short", named([first]), [1])
        assert again is not None
        again.close()


def test_what_a_tenant_lends_follows_its_quota(tmp_path: Path) -> None:
    with world(tmp_path) as service, service.client() as client:
        client.create_namespace("resized", None)
        caller = service.admin

        def most() -> int:
            for count in range(64, 0, -1):
                room = service.cache.room(caller, "resized", named(chain(count, "resized")), [BLOCK] * count)
                if room is not None:
                    room.close()
                    return count
            return 0

        assert most() == 32
        service.cache.set_capacity(caller, "red", "host", 4 << 20)
        assert most() == 8
        service.cache.set_capacity(caller, "red", "host", 16 << 20)
        assert most() == 32


def test_blocks_that_find_no_room_are_dropped_once(tmp_path: Path) -> None:
    with world(tmp_path) as service, service.client() as client:
        client.create_namespace("held", None)
        keys = chain(236, "held")
        client.put_many("held", blocks(keys))
        reading = service.cache.read(service.admin, "held", keys, owner="reader").result(30)
        outcomes = client.put_many("held", blocks(chain(30, "late")))
        reading.close()
        assert outcomes == [PutOutcome.STORED] * 20 + [PutOutcome.DROPPED] * 10
        metrics = service.cache._tenants["red"].metrics
        reasons = ("no_space", "parent_refused")
        dropped = [metrics.value("dropped_blocks_total", tier="host", reason=reason) for reason in reasons]
        assert sum(dropped) == 10


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
def test_what_lay_in_a_room_before_does_not_show_behind_a_block(tmp_path: Path, way: str) -> None:
    """Lower tiers write whole pages."""
    with world(tmp_path) as service, service.client(way) as client:
        client.create_namespace("padded", None)
        region = service.cache._tenants["red"].store.host._slab.region  # type: ignore[attr-defined]
        keys = chain(20, "padded")
        client.put_many("padded", [Block(key, b"\xee" * PAGES, depth=-1) for key in keys])
        client.delete("padded", keys)
        client.put_many("padded", [Block(key, b"\x11" * SIZE, depth=-1) for key in keys])
        with service.cache.read(service.admin, "padded", keys, owner="reader", each=True).result(30) as reading:
            spans = [found.span for found in reading.blocks]
            pages = [bytes(region.view(span.offset, PAGES)) for span in spans if span is not None]
        assert pages == [b"\x11" * SIZE + bytes(PAGES - SIZE)] * 20


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
def test_blocks_that_are_encoded_fill_host_whole(tmp_path: Path, way: str) -> None:
    """Raw bytes on their way do not lie where encoded blocks could."""
    tiering = {"host": {"capacity": "32MiB", "format": "int8"}, "accept_lossy": True}
    with world(tmp_path, tiering=tiering) as service, service.client(way) as client:
        client.create_namespace("encoded", PLAIN)
        host = service.cache._tenants["red"].store.host
        values = np.random.default_rng(7).standard_normal(BLOCK // 4).astype(np.float32)
        for turn in range(40):
            made = [Block(key, values.tobytes(), depth=-1) for key in chain(32, f"encoded{turn}")]
            assert set(client.put_many("encoded", made)) == {PutOutcome.STORED}
        stats = host.stats()
        assert stats["evicted"] > 0
        assert (16 << 20) - stats["bytes"] < stats["bytes"] // stats["blocks"]
        (found,) = client.get_many("encoded", [made[-1].key], lossy=True)
        assert np.abs(np.frombuffer(found.data, np.float32) - values).max() < 0.05


@pytest.mark.parametrize("ways", [("tcp", "tcp"), ("unix", "shared"), ("shared", "shared")])
def test_of_two_that_put_the_same_blocks_at_once_one_joins(tmp_path: Path, ways: tuple[str, str]) -> None:
    """Both have rooms for them; each block is stored once, told once, and whole, as one of the two sent it."""
    with world(tmp_path) as service:
        with service.client() as client:
            client.create_namespace("both", None)
        store = service.cache._tenants["red"].store
        told: dict[bytes, int] = {}
        at_once = Barrier(2)

        def puts(number: int) -> list[list[PutOutcome]]:
            outcomes = []
            with service.client(ways[number]) as client:
                client.connect()
                for turn in range(8):
                    made = [Block(key, content(key, SIZE, number), depth=-1) for key in chain(24, f"both{turn}")]
                    at_once.wait(30)
                    outcomes.append(client.put_many("both", made))
            return outcomes

        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(puts, range(2))
        assert service.settled() == NOTHING
        for event in service.cache.events(service.admin).since(0).events:
            assert event.kind == "stored"
            told.update((key, told.get(key, 0) + 1) for key in event.keys)
        assert set(told.values()) == {1}
        with service.client() as client:
            for turn in range(8):
                keys = chain(24, f"both{turn}")
                found = client.get_many("both", keys)
                assert len(found) == 24
                for item, *outcomes in zip(found, one[turn], other[turn], strict=True):
                    assert sorted(outcomes) == [PutOutcome.EXISTS, PutOutcome.STORED]
                    assert item.data == content(item.key, SIZE, outcomes.index(PutOutcome.STORED))
        assert len(told) == store.host.stats()["blocks"] == 8 * 24
