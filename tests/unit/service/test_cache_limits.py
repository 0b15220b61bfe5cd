"""Limits: what does not fit is refused by its name, and nothing is changed or held."""

import time

import pytest
from cache_world import BLOCK, LAYOUT, OPAQUE, OWNER, blocks, caller, chain, open_cache, put, read

from kvtier.config import load_config
from kvtier.errors import ConfigError
from kvtier.hints import RequestHints
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.service.cache import (
    LOCAL,
    BlockPut,
    NamespaceSpec,
    PutOutcome,
    ServiceError,
    layout_as_data,
    layout_from_data,
)

LIMITS = {
    "max_block": 2 * BLOCK,
    "max_batch": 4 * BLOCK,
    "inflight_bytes": 6 * BLOCK,
    "max_batch_keys": 8,
    "max_namespaces": 2,
    "max_pins": 2,
    "max_pin_ttl": 100,
    "max_prefetches": 2,
    "request_timeout": 5,
}


@pytest.fixture
def cache():
    opened = open_cache(service=LIMITS)
    opened.create_namespace(LOCAL, OPAQUE)
    yield opened
    stats = opened.stats(LOCAL).tenants[0]
    assert (stats.leases, stats.inflight_bytes, stats.tiers["host"]["leases"]) == (0, 0, 0)
    opened.close()


def one(**changes) -> BlockPut:
    return blocks(chain(1))[0]._replace(**changes)


KEY, PARENT = chain(2)


@pytest.mark.parametrize(
    ("block", "status", "code"),
    [
        (one(data=memoryview(bytes(2 * BLOCK + 1))), 413, "too_large"),
        (one(data=memoryview(b"")), 400, "invalid"),
        (one(data=memoryview(bytes(64))[::2]), 400, "invalid"),
        (one(key=b"short"), 400, "invalid"),
        (one(key=bytes(33)), 400, "invalid"),
        (one(parent=b"short", depth=1), 400, "invalid"),
        (one(part=1), 409, "wrong_layout"),
        (one(part=-1), 409, "wrong_layout"),
        (one(depth=-2), 400, "invalid"),
        (one(depth=1 << 31, parent=PARENT), 400, "invalid"),
        (one(depth=1), 409, "conflict"),
        (one(depth=0, parent=PARENT), 409, "conflict"),
        (one(depth=-1, parent=PARENT), 409, "conflict"),
    ],
)
def test_a_block_that_cannot_be_is_refused_with_its_whole_batch(cache, block, status, code):
    with pytest.raises(ServiceError) as caught:
        cache.put(LOCAL, "blocks", [*blocks(chain(1, "good")), block])
    assert (caught.value.status, caught.value.code) == (status, code)
    assert cache.match(LOCAL, "blocks", chain(1, "good")) == ()
    assert cache.stats(LOCAL).tenants[0].tiers["host"]["blocks"] == 0


def test_a_block_larger_than_the_quota_is_refused_as_such():
    opened = open_cache(host={"capacity": BLOCK})
    opened.create_namespace(LOCAL, OPAQUE)
    with pytest.raises(ServiceError, match="quota in host is 4096") as caught:
        opened.put(LOCAL, "blocks", [one(data=memoryview(bytes(2 * BLOCK)))])
    assert (caught.value.status, caught.value.code) == (507, "quota_exceeded")
    opened.close()


def test_batches_are_bounded_in_keys_and_bytes(cache):
    for call in (
        lambda: cache.match(LOCAL, "blocks", chain(9)),
        lambda: cache.read(LOCAL, "blocks", chain(9), owner=OWNER),
        lambda: cache.delete(LOCAL, "blocks", chain(9)),
        lambda: cache.pin(LOCAL, "blocks", chain(9), ttl=1),
        lambda: cache.prefetch(LOCAL, "blocks", chain(9)),
        lambda: cache.put(LOCAL, "blocks", blocks(chain(9), 10)),
        lambda: cache.put(LOCAL, "blocks", blocks(chain(5))),
    ):
        with pytest.raises(ServiceError) as caught:
            call()
        assert (caught.value.status, caught.value.code) == (413, "too_large")
    put(cache, chain(4))
    put(cache, [*chain(4), *chain(4, "b")][4:])
    with pytest.raises(ServiceError, match="20480 bytes were found: at most 16384") as caught:
        cache.read(LOCAL, "blocks", [*chain(4), *chain(4, "b")[:1]], owner=OWNER, each=True).result(10)
    assert caught.value.code == "too_large"


def test_keys_count_by_their_parts():
    opened = open_cache(service={"max_batch_keys": 8})
    try:
        group = LayerGroup(GroupKind.GQA, (0,), planes=2, kv_heads=1, head_dim=4)
        opened.create_namespace(LOCAL, NamespaceSpec("parted", Layout(1, (group,), shards=64)))
        fitting, long = chain(2), chain(3)
        calls = [
            lambda keys: opened.match(LOCAL, "parted", keys),
            lambda keys: opened.match_tokens(LOCAL, "parted", range(len(keys))),
            lambda keys: opened.read(LOCAL, "parted", keys, owner="test").result(10).close(),
            lambda keys: opened.delete(LOCAL, "parted", keys),
            lambda keys: opened.prefetch(LOCAL, "parted", keys),
            lambda keys: opened.hint(LOCAL, "parted", keys, RequestHints()),
        ]
        for call in calls:
            call(fitting)
            with pytest.raises(ServiceError, match="3 keys of 64 parts each: at most 128 parts") as caught:
                call(long)
            assert (caught.value.status, caught.value.code) == (413, "too_large")
        opened.read(LOCAL, "parted", chain(8), parts=range(16), owner="test").result(10).close()
    finally:
        opened.close()


def test_what_is_held_is_bounded_and_told_as_back_pressure(cache):
    put(cache, chain(4))
    with cache.read(LOCAL, "blocks", chain(4), owner=OWNER).result(10):
        with pytest.raises(ServiceError) as caught:
            cache.read(LOCAL, "blocks", chain(4), owner=OWNER).result(10)
        assert (caught.value.status, caught.value.code) == (503, "busy")
        assert caught.value.retry_after is not None
        with pytest.raises(ServiceError) as caught:
            cache.put(LOCAL, "blocks", blocks(chain(3, "b")))
        assert caught.value.code == "busy"
        assert put(cache, chain(2, "c")) == [PutOutcome.STORED] * 2
    assert put(cache, chain(3, "b")) == [PutOutcome.STORED] * 3


def test_namespaces_are_bounded_and_keep_what_they_are(cache):
    assert cache.create_namespace(LOCAL, OPAQUE).spec == OPAQUE
    with pytest.raises(ServiceError) as caught:
        cache.create_namespace(LOCAL, NamespaceSpec("blocks", None, model="another"))
    assert (caught.value.status, caught.value.code) == (409, "conflict")
    cache.create_namespace(LOCAL, NamespaceSpec("second", None))
    with pytest.raises(ServiceError) as caught:
        cache.create_namespace(LOCAL, NamespaceSpec("third", None))
    assert (caught.value.status, caught.value.code) == (507, "quota_exceeded")
    cache.drop_namespace(LOCAL, "second")
    cache.create_namespace(LOCAL, NamespaceSpec("third", None))
    big = Layout(256, (LayerGroup(GroupKind.GQA, (0,), planes=2, kv_heads=1, head_dim=64),))
    with pytest.raises(ServiceError) as caught:
        cache.create_namespace(LOCAL, NamespaceSpec("big", big))
    assert (caught.value.status, caught.value.code) == (409, "wrong_layout")


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a b", "é", "x" * 129, "a\n", "..\0"])
def test_a_name_is_of_few_letters(cache, name):
    with pytest.raises(ServiceError) as caught:
        NamespaceSpec(name, None)
    assert caught.value.code == "invalid"
    with pytest.raises(ServiceError) as caught:
        cache.match(LOCAL, name, chain(1))
    assert caught.value.code == "invalid"


def test_an_unknown_namespace_is_told(cache):
    with pytest.raises(ServiceError, match="create it first") as caught:
        cache.match(LOCAL, "nothing", chain(1))
    assert (caught.value.status, caught.value.code) == (404, "unknown_namespace")


def test_pins_are_bounded_in_number_and_time(cache):
    put(cache, chain(2))
    for ttl in (0, -1, 101, float("nan"), float("inf")):
        with pytest.raises(ServiceError) as caught:
            cache.pin(LOCAL, "blocks", chain(2), ttl=ttl)
        assert caught.value.code == "invalid"
    pins = [cache.pin(LOCAL, "blocks", chain(2), ttl=100) for _ in range(2)]
    with pytest.raises(ServiceError) as caught:
        cache.pin(LOCAL, "blocks", chain(2), ttl=100)
    assert (caught.value.status, caught.value.code) == (507, "quota_exceeded")
    cache.unpin(LOCAL, pins[0].id)
    cache.pin(LOCAL, "blocks", chain(2), ttl=100)
    cache.clear_namespace(LOCAL, "blocks")
    assert cache.stats(LOCAL).tenants[0].tiers["host"]["leases"] == 2 * 2
    for row in list(cache._tenants["default"].pins._pins):
        cache.unpin(LOCAL, row)


def test_the_latest_prefetches_are_remembered(cache):
    put(cache, chain(1))
    ids = []
    for _ in range(4):
        info = cache.prefetch(LOCAL, "blocks", chain(1))
        ids.append(info.id)
        cache._tenants["default"].prefetches._known[info.id][1].result(10)
    assert cache.prefetched(LOCAL, ids[3]).state == "done"
    with pytest.raises(ServiceError):
        cache.prefetched(LOCAL, ids[0])


def test_deadlines_are_no_longer_than_the_longest(cache):
    with pytest.raises(ServiceError) as caught:
        cache.read(LOCAL, "blocks", chain(1), owner=OWNER, deadline=float("nan"))
    assert caught.value.code == "invalid"
    cache.read(LOCAL, "blocks", chain(1), owner=OWNER, deadline=time.monotonic() + 1e12).result(10).close()


@pytest.mark.parametrize(
    ("parts", "code"), [([], "invalid"), ([1], "unknown_block"), ([0, 0], "invalid"), ([-1], "unknown_block")]
)
def test_parts_that_are_none_are_refused(cache, parts, code):
    with pytest.raises(ServiceError) as caught:
        cache.read(LOCAL, "blocks", chain(1), owner=OWNER, parts=parts)
    assert caught.value.code == code


def test_a_layout_is_read_back_as_it_was_written():
    assert layout_from_data(layout_as_data(LAYOUT)) == LAYOUT
    short = {"block_size": 4, "groups": [{"kind": "gqa", "layers": [0], "planes": 2, "kv_heads": 1, "head_dim": 8}]}
    assert layout_from_data(short).shards == 1


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": "4"},
        {"block_size": True},
        {"block_size": 0},
        {"shards": 1.5},
        {"unknown": 1},
        {"groups": []},
        {"groups": [{"kind": "gqa"}]},
        {"groups": [{"kind": "other", "layers": [0], "planes": 2, "kv_heads": 1, "head_dim": 8}]},
        {"groups": [{"kind": "gqa", "layers": ["0"], "planes": 2, "kv_heads": 1, "head_dim": 8}]},
        {"groups": [{"kind": "gqa", "layers": [0], "planes": 3, "kv_heads": 1, "head_dim": 8}]},
        {"groups": [{"kind": "gqa", "layers": [0], "planes": 2, "kv_heads": 1, "head_dim": 8, "dtype": "int128"}]},
        {"groups": [{"kind": "gqa", "layers": [0], "planes": 2, "kv_heads": 1, "head_dim": 8, "order": 3}]},
        {"groups": [{"kind": "gqa", "layers": 0, "planes": 2, "kv_heads": 1, "head_dim": 8}]},
    ],
)
def test_a_layout_that_is_none_is_refused(change):
    with pytest.raises(ServiceError, match="layout") as caught:
        layout_from_data(layout_as_data(LAYOUT) | change)
    assert caught.value.code == "invalid"


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="a batch into what may be in flight"):
        load_config({"service": {"max_batch": "2GiB"}}, environ={}, search=False)
    with pytest.raises(ConfigError, match="belong together"):
        load_config({"service": {"tls_cert": "a.pem"}}, environ={}, search=False)


@pytest.mark.parametrize("namespaces", [None, ("*",)])
def test_a_sessions_name_is_bounded_on_every_way(cache, namespaces):
    who, long = caller(namespaces=namespaces), "s" * 129
    ways = [
        lambda name: put_hinted(cache, who, name),
        lambda name: cache.hint(who, "blocks", chain(1), RequestHints(session=name)),
        lambda name: cache.end_session(who, name),
    ]
    for way in ways:
        with pytest.raises(ServiceError, match="session of 129 characters: expected at most 128") as caught:
            way(long)
        assert caught.value.code == "invalid"
        assert cache.stats(LOCAL).tenants[0].tiers["store"]["sessions"] == 0
    for way in ways:
        way(long[1:])


def put_hinted(cache, who, name):
    hint = RequestHints(session=name).at(0)
    assert cache.put(who, "blocks", [one(hint=hint)]).result(10) == [PutOutcome.STORED]


def test_a_tenants_book_of_sessions_is_as_large_as_its_quota():
    opened = open_cache(service={"max_batch_keys": 1 << 14})
    opened.create_namespace(LOCAL, OPAQUE)
    for turn in range(3):
        # Keys that hold nothing cost the caller nothing, and are remembered all the same.
        for at in range(2):
            opened.hint(LOCAL, "blocks", chain(1 << 12, f"{turn}/{at}"), RequestHints(session=f"{turn}/{at}"))
    # Four of 4096 keys are what a quota of a few blocks may have remembered.
    assert opened.stats(LOCAL).tenants[0].tiers["store"]["sessions"] == 4
    opened.close()


def test_blocks_that_lie_encoded_count_as_they_are_handed_out():
    layout = Layout(16, (LayerGroup(GroupKind.GQA, (0,), planes=2, kv_heads=1, head_dim=128),))
    raw, keys = layout.block_bytes(), chain(4)
    limits = {"max_block": raw, "max_batch": 3 * raw, "inflight_bytes": 6 * raw}
    cache = open_cache(service=limits, host={"format": "int4r"}, accept_lossy=True)
    try:
        cache.create_namespace(LOCAL, NamespaceSpec("rows", layout))
        # Any bytes are numbers; none of these is infinite.
        zeros = memoryview(bytes(raw))
        for block in blocks(keys, raw):
            cache.put(LOCAL, "rows", [block._replace(data=zeros)]).result(10)
        info = cache.namespace(LOCAL, "rows")
        assert info.host_blocks == 4
        assert info.host_bytes < raw * 4 / 3
        with pytest.raises(ServiceError, match=f"{4 * raw} bytes were found: at most {3 * raw}"):
            read(cache, keys, ns="rows", lossy=True)
        tenant = cache._tenants["default"]
        readings = [cache.read(LOCAL, "rows", keys[:3], owner="a", lossy=True).result(10) for _ in range(2)]
        assert tenant.inflight.nbytes == sum(reading.nbytes for reading in readings) == 6 * raw
        with pytest.raises(ServiceError) as caught:
            read(cache, keys[:1], ns="rows", lossy=True)
        assert caught.value.code == "busy"
        for reading in readings:
            reading.close()
        assert tenant.inflight.nbytes == 0
    finally:
        cache.close()
