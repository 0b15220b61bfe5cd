"""The verbs of the cache service on blocks: what is put is found, whole and under its own name only."""

import threading
import time

import numpy as np
import pytest
import xxhash
from cache_world import BLOCK, LAYOUT, OPAQUE, OWNER, blocks, caller, chain, data, open_cache, put, read
from patience import until

from kvtier.errors import LeaseError
from kvtier.hints import Hint, RequestHints
from kvtier.keys import Chain
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.service.cache import LOCAL, BlockPut, NamespaceSpec, PutOutcome, Scope, ServiceError

STORED, EXISTS, DROPPED = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.DROPPED


@pytest.fixture
def cache():
    opened = open_cache()
    opened.create_namespace(LOCAL, OPAQUE)
    yield opened
    opened.close()


@pytest.fixture
def tiered(tmp_path):
    opened = open_cache(tmp_path)
    opened.create_namespace(LOCAL, OPAQUE)
    yield opened
    opened.close()


def code(caught: pytest.ExceptionInfo[ServiceError]) -> tuple[int, str]:
    return caught.value.status, caught.value.code


# ---- put, match, read


def test_what_was_put_is_matched_and_read_in_place(cache):
    keys = chain(5)
    assert put(cache, keys[:3]) == [STORED] * 3
    assert cache.match(LOCAL, "blocks", keys) == ("host",) * 3
    with cache.read(LOCAL, "blocks", keys, owner=OWNER).result(10) as reading:
        assert [bytes(view) for view in reading.views] == [data(key) for key in keys[:3]]
        assert all(view.readonly for view in reading.views)
        assert [(one.key, one.part, one.depth, one.exact, one.nbytes, one.tier) for one in reading.blocks] == [
            (key, 0, at, True, BLOCK, "host") for at, key in enumerate(keys[:3])
        ]
        assert [one.parent for one in reading.blocks] == [None, keys[0][:16], keys[1][:16]]
        assert reading.blocks[2].digest == xxhash.xxh3_128_digest(data(keys[2]))
        assert (reading.found, reading.nbytes) == (3, 3 * BLOCK)


def test_each_block_of_a_batch_has_an_outcome_of_its_own(cache):
    keys = chain(4)
    put(cache, keys[:2])
    assert put(cache, keys) == [EXISTS, EXISTS, STORED, STORED]
    assert put(cache, [keys[0], keys[0]]) == [EXISTS, EXISTS]


def test_keys_count_by_their_first_16_bytes(cache):
    (key,) = chain(1)
    put(cache, [key[:16]])
    assert read(cache, [key]) == [data(key[:16])]


def test_a_better_copy_replaces_one_that_is_not_exact(cache):
    keys = chain(1)
    assert cache.put(LOCAL, "blocks", blocks(keys, tag="lossy", exact=False)).result(10) == [STORED]
    assert cache.match(LOCAL, "blocks", keys) == ()
    assert cache.match(LOCAL, "blocks", keys, lossy=True) == ("host",)
    assert read(cache, keys) == []
    assert read(cache, keys, lossy=True) == [data(keys[0], tag="lossy")]
    assert put(cache, keys) == [STORED]
    assert read(cache, keys) == [data(keys[0])]
    assert cache.put(LOCAL, "blocks", blocks(keys, tag="worse", exact=False)).result(10) == [EXISTS]


def test_reading_each_leaps_over_holes(tiered):
    keys = chain(9)
    for at in (0, 1, 4, 7, 8):
        tiered.put(LOCAL, "blocks", [blocks([keys[at]])[0]._replace(depth=-1)]).result(10)
    assert read(tiered, keys) == [data(key) for key in keys[:2]]
    with tiered.read(LOCAL, "blocks", keys, owner=OWNER, each=True).result(10) as reading:
        assert [one.key for one in reading.blocks] == [keys[at] for at in (0, 1, 4, 7, 8)]
        assert [bytes(view) for view in reading.views] == [data(keys[at]) for at in (0, 1, 4, 7, 8)]
    assert read(tiered, chain(3, "other"), each=True) == []
    assert read(tiered, [], each=True) == []


def test_what_left_host_is_fetched_from_below(tiered):
    first, rest = chain(10, "first"), [chain(16, str(at)) for at in range(4)]
    put(tiered, first)
    tiered.flush()
    for keys in rest:
        put(tiered, keys)
    assert tiered.match(LOCAL, "blocks", first) == ("nvme",) * 10
    with tiered.read(LOCAL, "blocks", first, owner=OWNER).result(10) as reading:
        assert [bytes(view) for view in reading.views] == [data(key) for key in first]
        assert {one.tier for one in reading.blocks} == {"nvme"}
    assert tiered.match(LOCAL, "blocks", first) == ("host",) * 10


def test_delete_removes_blocks_with_what_descends_from_them(tiered):
    keys = chain(4)
    put(tiered, keys)
    tiered.flush()
    assert tiered.delete(LOCAL, "blocks", [keys[2], *chain(1, "absent")]) == 1
    assert tiered.match(LOCAL, "blocks", keys) == ("host",) * 2
    assert read(tiered, keys) == [data(key) for key in keys[:2]]
    assert read(tiered, keys[2:3], each=True) == []


def test_a_full_host_drops_what_it_cannot_take_with_its_descendants(cache):
    held = chain(64, "held")
    put(cache, held)
    with cache.read(LOCAL, "blocks", held, owner=OWNER).result(10) as reading:
        assert reading.found == 64
        assert put(cache, chain(3, "new")) == [DROPPED] * 3
    assert put(cache, chain(3, "new")) == [STORED] * 3


# ---- readings


def test_a_reading_keeps_its_blocks_until_it_is_closed(cache):
    keys = chain(2)
    put(cache, keys)
    reading = cache.read(LOCAL, "blocks", keys, owner=OWNER).result(10)
    views = reading.views
    cache.delete(LOCAL, "blocks", keys)
    put(cache, chain(62, "more"))
    assert [bytes(view) for view in views] == [data(key) for key in keys]
    assert cache.stats(LOCAL).tenants[0].leases == 1
    reading.close()
    reading.close()
    with pytest.raises(LeaseError, match="closed"):
        _ = reading.views
    stats = cache.stats(LOCAL).tenants[0]
    assert (stats.leases, stats.inflight_bytes, stats.tiers["host"]["leases"]) == (0, 0, 0)


def test_the_death_of_an_owner_closes_its_readings_and_nobody_elses(cache):
    keys = chain(2)
    put(cache, keys)
    dead = [cache.read(LOCAL, "blocks", keys, owner="dead").result(10) for _ in range(3)]
    alive = cache.read(LOCAL, "blocks", keys, owner="alive").result(10)
    cache.release_owner("dead")
    cache.release_owner("never seen")
    assert [reading.closed for reading in dead] == [True] * 3
    assert not alive.closed
    assert cache.stats(LOCAL).tenants[0].tiers["host"]["leases"] == 2
    alive.close()
    assert cache.stats(LOCAL).tenants[0].inflight_bytes == 0


def test_an_owner_that_dies_while_it_reads_leaves_nothing_held(tiered):
    keys = chain(40)
    put(tiered, keys)
    tiered.flush()
    futures, stop = [], threading.Event()

    def kill() -> None:
        while not stop.is_set():
            tiered.release_owner("dying")

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        for turn in range(40):
            if turn % 4 == 0:
                put(tiered, chain(60, str(turn)))
            futures.append(tiered.read(LOCAL, "blocks", keys, owner="dying", each=turn % 2 == 0))
            time.sleep(0.001)
        errors = [future.exception(10) for future in futures]
    finally:
        stop.set()
        thread.join()
    tiered.release_owner("dying")
    assert all(error is None or isinstance(error, LeaseError | ServiceError) for error in errors)

    def rests() -> bool:
        stats = tiered.stats(LOCAL).tenants[0]
        return not (
            stats.leases or stats.inflight_bytes or stats.tiers["host"]["leases"] or stats.tiers["store"]["leases"]
        )

    until(rests)


def test_what_does_not_arrive_in_time_is_told_so(cache):
    keys = chain(2)
    put(cache, keys)
    with pytest.raises(ServiceError) as caught:
        cache.read(LOCAL, "blocks", keys, owner=OWNER, deadline=time.monotonic() - 1).result(10)
    assert code(caught) == (504, "timeout")
    assert cache.put(LOCAL, "blocks", blocks(chain(1, "late")), deadline=time.monotonic() - 1).result(10) == [DROPPED]
    assert cache.stats(LOCAL).tenants[0].inflight_bytes == 0


# ---- parts and layouts


@pytest.fixture
def parted(tiered):
    tiered.create_namespace(LOCAL, NamespaceSpec("parted", LAYOUT, model="m"))
    return tiered


def part_puts(keys, parts=range(4)):
    sizes = NamespaceSpec("parted", LAYOUT).block_bytes
    return [
        BlockPut(key, part, keys[at - 1] if at else None, at, True, memoryview(data(key, sizes[part], str(part))))
        for at, key in enumerate(keys)
        for part in parts
    ]


def test_a_block_is_there_once_all_of_its_parts_are(parted):
    keys = chain(3)
    info = parted.namespace(LOCAL, "parted")
    assert (info.parts, info.block_bytes, info.fingerprint) == (4, (2048, 2048, 512, 512), LAYOUT.fingerprint)
    assert parted.put(LOCAL, "parted", part_puts(keys, (0, 2, 3))).result(10) == [STORED] * 9
    assert parted.match(LOCAL, "parted", keys) == ()
    assert read(parted, keys, ns="parted") == []
    assert read(parted, keys, ns="parted", parts=[2]) == [data(key, 512, "2") for key in keys]
    # Another shard brings its part in its own time.
    parted.put(LOCAL, "parted", part_puts(keys[:2], (1,))).result(10)
    assert parted.match(LOCAL, "parted", keys) == ("host",) * 2
    sizes = info.block_bytes
    assert read(parted, keys, ns="parted") == [
        data(key, sizes[part], str(part)) for key in keys[:2] for part in range(4)
    ]
    with parted.read(LOCAL, "parted", keys, owner=OWNER, parts=[3, 1], each=True).result(10) as reading:
        assert [(one.key, one.part) for one in reading.blocks] == [(k, p) for k in keys[:2] for p in (3, 1)]
        assert [one.parent for one in reading.blocks] == [None, None, keys[0][:16], keys[0][:16]]
        assert reading.found == 2
    assert parted.delete(LOCAL, "parted", keys) == 3


def test_parts_come_back_from_below_in_their_own_shapes(tmp_path):
    cache = open_cache(tmp_path, nvme={"format": "bitsplit"})
    try:
        cache.create_namespace(LOCAL, NamespaceSpec("parted", LAYOUT))
        cache.create_namespace(LOCAL, OPAQUE)
        keys = chain(4)
        cache.put(LOCAL, "parted", part_puts(keys)).result(10)
        cache.flush()
        put(cache, chain(64, "fill"))
        assert cache.match(LOCAL, "parted", keys) == ("nvme",) * 4
        for part in range(4):
            size = LAYOUT.block_bytes(part // 2)
            assert read(cache, keys, ns="parted", parts=[part]) == [data(key, size, str(part)) for key in keys]
    finally:
        cache.close()


def test_host_in_another_format_is_read_raw():
    layout = Layout(16, (LayerGroup(GroupKind.GQA, (0,), planes=2, kv_heads=1, head_dim=32),), shards=2)
    cache = open_cache(host={"format": "int8"}, accept_lossy=True)
    try:
        cache.create_namespace(LOCAL, NamespaceSpec("rows", layout))
        (key,) = chain(1)
        values = np.linspace(-1, 1, layout.block_bytes() // 4, dtype=np.float32)
        raw = memoryview(values.tobytes())
        cache.put(LOCAL, "rows", [BlockPut(key, part, None, 0, True, raw) for part in range(2)]).result(10)
        assert cache.match(LOCAL, "rows", [key]) == ()
        with cache.read(LOCAL, "rows", [key], owner=OWNER, lossy=True).result(10) as reading:
            for one in reading.blocks:
                assert (one.exact, one.span, one.nbytes) == (False, None, raw.nbytes)
                np.testing.assert_allclose(np.frombuffer(one.data, np.float32), values, atol=0.02)
    finally:
        cache.close()


def test_a_block_of_another_size_than_its_layout_says_is_refused(parted):
    keys = chain(1)
    wrong = part_puts(keys)[0]._replace(data=memoryview(bytes(100)))
    with pytest.raises(ServiceError) as caught:
        parted.put(LOCAL, "parted", [*part_puts(chain(1, "good")), wrong])
    assert code(caught) == (409, "wrong_layout")
    assert parted.match(LOCAL, "parted", chain(1, "good")) == ()


# ---- token ids


def test_token_ids_name_blocks_as_engines_do(parted):
    tokens = list(range(100, 118))
    named = Chain(LAYOUT.block_size)
    named.extend(tokens)
    parted.put(LOCAL, "parted", part_puts(named.keys[:3])).result(10)
    assert parted.match_tokens(LOCAL, "parted", tokens) == (named.keys, ("host",) * 3)
    assert parted.match_tokens(LOCAL, "parted", tokens, {1: b"image"})[1] == ("host",)
    assert parted.match_tokens(LOCAL, "parted", [1, 2]) == ([], ())
    with pytest.raises(ServiceError) as caught:
        parted.match_tokens(LOCAL, "blocks", tokens)
    assert code(caught) == (409, "wrong_layout")
    with pytest.raises(ServiceError) as caught:
        parted.match_tokens(LOCAL, "parted", [-1] * 8)
    assert code(caught) == (400, "invalid")


# ---- pins, prefetches, hints, sessions


def test_a_pin_keeps_blocks_in_host_until_it_ends(cache):
    keys = chain(4)
    put(cache, keys[:3])
    pin = cache.pin(LOCAL, "blocks", keys, ttl=60)
    assert pin.blocks == 3
    assert 50 < pin.expires - time.time() < 70
    for turn in range(3):
        put(cache, chain(64, str(turn)))
    assert cache.match(LOCAL, "blocks", keys) == ("host",) * 3
    assert cache.stats(LOCAL).tenants[0].pins == 1
    cache.unpin(LOCAL, pin.id)
    put(cache, chain(64, "last"))
    assert cache.match(LOCAL, "blocks", keys) == ()
    with pytest.raises(ServiceError) as caught:
        cache.unpin(LOCAL, pin.id)
    assert code(caught) == (404, "unknown_pin")
    with pytest.raises(ServiceError) as caught:
        cache.pin(LOCAL, "blocks", keys, ttl=60)
    assert code(caught) == (404, "unknown_block")


def test_a_pin_expires_by_itself():
    now = [1000.0]
    cache = open_cache(clock=lambda: now[0])
    try:
        cache.create_namespace(LOCAL, OPAQUE)
        put(cache, chain(1))
        cache.pin(LOCAL, "blocks", chain(1), ttl=5)
        now[0] += 6
        put(cache, chain(64, "more"))
        assert cache.match(LOCAL, "blocks", chain(1)) == ()
        assert cache.stats(LOCAL).tenants[0].pins == 0
    finally:
        cache.close()


def test_a_prefetch_brings_blocks_into_host(tiered):
    keys = chain(6)
    put(tiered, keys)
    tiered.flush()
    put(tiered, chain(64, "fill"))
    assert tiered.match(LOCAL, "blocks", keys) == ("nvme",) * 6
    info = tiered.prefetch(LOCAL, "blocks", keys)
    until(lambda: tiered.prefetched(LOCAL, info.id).state != "running")
    assert tiered.prefetched(LOCAL, info.id) == (info.id, "done", 6)
    assert tiered.match(LOCAL, "blocks", keys) == ("host",) * 6
    assert tiered.cancel(LOCAL, info.id).state == "done"
    for one in (info.id, "0" * 16):
        with pytest.raises(ServiceError) as caught:
            tiered.prefetched(LOCAL, one)
        assert code(caught) == (404, "unknown_prefetch")


def test_hints_say_who_leaves_first(cache):
    dead, kept = chain(30, "dead"), chain(30, "kept")
    put(cache, kept)
    put(cache, dead)
    cache.hint(LOCAL, "blocks", dead, RequestHints(dead_from_depth=10))
    put(cache, chain(24, "new"))
    assert len(cache.match(LOCAL, "blocks", dead)) == 10
    assert len(cache.match(LOCAL, "blocks", kept)) == 30


def test_hints_count_depths_from_the_first_key_on(cache):
    keys = chain(30)
    put(cache, keys)
    put(cache, chain(30, "later"))
    cache.hint(LOCAL, "blocks", keys[20:], RequestHints(dead_from_depth=25), first=20)
    put(cache, chain(9, "new"))
    assert len(cache.match(LOCAL, "blocks", keys)) == 25


def test_the_end_of_a_session_frees_what_only_it_used(cache):
    keys, other = chain(20, "a"), chain(20, "b")
    hinted = [block._replace(hint=Hint(session="s")) for block in blocks(keys)]
    put(cache, other)
    cache.put(LOCAL, "blocks", hinted).result(10)
    cache.end_session(LOCAL, "s")
    until(lambda: put(cache, chain(24, "new")))
    put(cache, chain(20, "newer"))
    assert len(cache.match(LOCAL, "blocks", other)) == 20
    assert cache.match(LOCAL, "blocks", keys) == ()


def test_a_token_for_some_namespaces_ends_only_its_own_sessions(cache):
    cache.create_namespace(LOCAL, NamespaceSpec("other", None))
    some = caller(namespaces=("other",))
    keys = chain(20, "a")
    cache.put(LOCAL, "blocks", [one._replace(hint=Hint(session="s")) for one in blocks(keys)]).result(10)
    cache.end_session(some, "s")
    put(cache, chain(20, "b"))
    put(cache, chain(40, "c"))
    assert cache.stats(LOCAL).tenants[0].tiers["store"]["sessions"] == 1


# ---- events


def test_events_speak_of_chain_keys(parted):
    keys = chain(2)
    before = parted.events(LOCAL).last
    put(parted, keys)
    parted.put(LOCAL, "parted", part_puts(keys, (1,))).result(10)
    parted.flush()
    parted.delete(LOCAL, "blocks", keys[1:])
    parted.clear_namespace(LOCAL, "parted")
    told = parted.events(LOCAL).since(before)
    heads = tuple(key[:16] for key in keys)
    rows = [(one.kind, one.tier, one.namespace, one.part, one.keys) for one in told.events]
    assert ("stored", "host", "blocks", 0, heads) in rows
    assert ("stored", "host", "parted", 1, heads) in rows
    assert ("stored", "nvme", "blocks", 0, heads) in rows
    assert ("removed", "host", "blocks", 0, heads[1:]) in rows
    assert ("cleared", "host", "parted", 1, ()) in rows
    (stored,) = [one for one in told.events if rows[told.events.index(one)] == ("stored", "host", "parted", 1, heads)]
    assert (stored.parents, stored.depths) == ((None, heads[0]), (0, 1))
    assert (told.gap, told.last) == (False, parted.events(LOCAL).last)
    assert parted.events(LOCAL).since(told.last).events == []


def test_events_tell_a_token_of_its_own_namespaces_only(parted):
    some = parted.events(caller(namespaces=("parted",)))
    before = some.last
    put(parted, chain(2))
    until(lambda: some.last > before)
    told = some.since(before)
    assert told.events == []
    # Others' numbers are skipped, or who follows would be told of them for ever.
    assert told.last > before
    with pytest.raises(ServiceError) as caught:
        parted.events(caller(scopes=frozenset({Scope.WRITE})))
    assert code(caught) == (403, "forbidden")
