"""Every verb over TCP, over the Unix socket and through shared memory, against a real service."""

import time
from collections.abc import Iterator

import pytest
from data_world import BLOCK, NOTHING, PARTS, PLAIN, World, blocks, chain, content
from patience import until

from kvtier.client.data import DataClient
from kvtier.client.errors import Conflict, Invalid, NotFound, TooLarge, Unreachable
from kvtier.client.results import Block, PutOutcome
from kvtier.errors import FormatMismatch
from kvtier.hints import Hint
from kvtier.keys import Chain

WAYS = ("tcp", "unix", "shared")


@pytest.fixture(scope="module", params=WAYS)
def client(service: World, request: pytest.FixtureRequest) -> Iterator[DataClient]:
    with service.client(request.param) as made:
        made.connect()
        assert made.shares_memory == (request.param == "shared")
        for name, layout in (("opaque", None), ("plain", PLAIN), ("parts", PARTS)):
            made.create_namespace(f"{request.param}-{name}", layout)
        made.way = request.param  # type: ignore[attr-defined]
        yield made


@pytest.fixture
def ns(client: DataClient) -> str:
    return f"{client.way}-opaque"  # type: ignore[attr-defined]


def test_what_was_put_is_read_back(client: DataClient, ns: str) -> None:
    keys = chain(5, "back")
    assert client.put_many(ns, blocks(keys)) == [PutOutcome.STORED] * 5
    assert client.put_many(ns, blocks(keys[:2])) == [PutOutcome.EXISTS] * 2
    found = client.get_many(ns, keys)
    assert [item.key for item in found] == keys
    assert [bytes(item.data) for item in found] == [content(key) for key in keys]
    assert [(item.depth, item.exact, item.part, item.tier) for item in found] == [
        (at, True, 0, "host") for at in range(5)
    ]
    assert [item.parent for item in found] == [None, *(key[:16] for key in keys[:-1])]


def test_one_block_at_a_time(client: DataClient, ns: str) -> None:
    (key,) = chain(1, "single")
    assert client.get(ns, key) is None
    assert client.put(ns, Block(key, b"x" * 4097)) is PutOutcome.STORED
    found = client.get(ns, key)
    assert found is not None
    assert (bytes(found.data), found.depth, found.parent) == (b"x" * 4097, -1, None)


def test_a_read_ends_at_the_first_hole_unless_each_block_is_wanted(client: DataClient, ns: str) -> None:
    keys = chain(20, "hole")
    kept = [Block(key, content(key, 5000)) for at, key in enumerate(keys) if at not in (3, 4, 17)]
    client.put_many(ns, kept)
    assert [item.key for item in client.get_many(ns, keys)] == keys[:3]
    each = client.get_many(ns, keys, each=True)
    assert [item.key for item in each] == [block.key for block in kept]
    assert all(bytes(item.data) == content(item.key, 5000) for item in each)


def test_bytes_land_in_the_callers_buffers(client: DataClient, ns: str) -> None:
    keys = chain(9, "into")
    client.put_many(ns, blocks(keys))
    buffers = [memoryview(bytearray(BLOCK + 10)) for _ in keys]
    found = client.get_many(ns, keys, into=buffers)
    for key, item, buffer in zip(keys, found, buffers, strict=True):
        assert bytes(buffer[:BLOCK]) == content(key)
        assert item.data.obj is buffer.obj
    with pytest.raises(FormatMismatch, match="a buffer of 9 bytes"):
        client.get_many(ns, keys[:1], into=[memoryview(bytearray(9))])
    with pytest.raises(FormatMismatch, match="read-only"):
        client.get_many(ns, keys[:1], into=[memoryview(bytes(BLOCK))])
    with pytest.raises(FormatMismatch, match="3 buffers for 9 keys"):
        client.get_many(ns, keys, into=buffers[:3])
    # The connection is in step after each of these.
    assert len(client.get_many(ns, keys)) == 9


def test_windows_larger_than_any_buffer_join(client: DataClient) -> None:
    ns = f"{client.way}-plain"  # type: ignore[attr-defined]
    keys = chain(150, "long")
    assert set(client.put_many(ns, blocks(keys))) == {PutOutcome.STORED}
    found = client.get_many(ns, [*keys, b"absent" * 4])
    assert [bytes(item.data) == content(key) for item, key in zip(found, keys, strict=True)] == [True] * 150


def test_a_block_of_several_parts_is_there_once_all_are(client: DataClient) -> None:
    ns = f"{client.way}-parts"  # type: ignore[attr-defined]
    info = client.namespace(ns)
    assert (info.parts, info.block_bytes, info.layout) == (4, (8192, 8192, 4096, 4096), PARTS)
    keys = chain(3, "parts")
    rows = [
        Block(key, content(key, info.block_bytes[part], part), part, keys[at - 1] if at else None, at)
        for at, key in enumerate(keys)
        for part in range(4)
    ]
    client.put_many(ns, rows[:-1])
    assert len(client.match(ns, keys).tiers) == 2
    client.put_many(ns, rows)
    assert len(client.match(ns, keys).tiers) == 3
    found = client.get_many(ns, keys)
    assert [(item.key, item.part) for item in found] == [(key, part) for key in keys for part in range(4)]
    some = client.get_many(ns, keys, parts=[2, 0])
    assert [(item.key, item.part) for item in some] == [(key, part) for key in keys for part in (2, 0)]
    assert all(
        bytes(item.data) == content(item.key, info.block_bytes[item.part], item.part) for item in [*found, *some]
    )
    buffers = [memoryview(bytearray(8192)) for _ in range(6)]
    client.get_many(ns, keys, parts=[2, 0], into=buffers)
    assert bytes(buffers[1]) == content(keys[0], 8192, 0)
    assert bytes(buffers[4][:4096]) == content(keys[2], 4096, 2)
    with pytest.raises(NotFound, match="parts"):
        client.get_many(ns, keys, parts=[4])


def test_a_namespace_that_was_made_anew_is_read_as_what_it_is(client: DataClient, service: World) -> None:
    ns, key = f"{client.way}-anew", chain(1, "anew")[0]  # type: ignore[attr-defined]
    for layout in (PLAIN, PARTS, PLAIN):
        sizes = client.create_namespace(ns, layout).block_bytes
        assert client.get_many(ns, [key]) == []
        rows = [Block(key, content(key, nbytes, part), part, depth=0) for part, nbytes in enumerate(sizes)]
        assert client.put_many(ns, rows) == [PutOutcome.STORED] * len(sizes)
        found = client.get_many(ns, [key])
        assert [bytes(item.data) for item in found] == [row.data for row in rows]
        service.cache.drop_namespace(service.admin, ns)


def test_blocks_of_another_size_than_the_layouts_are_refused(client: DataClient) -> None:
    ns = f"{client.way}-plain"  # type: ignore[attr-defined]
    keys = chain(2, "size")
    with pytest.raises(Conflict, match="65536"):
        client.put_many(ns, blocks(keys, BLOCK - 1))
    assert client.match(ns, keys).tiers == ()


def test_a_part_that_there_is_not_is_absent_and_a_depth_without_a_parent_contradicts_itself(
    client: DataClient, ns: str
) -> None:
    (key,) = chain(1, "odd")
    assert client.put_many(ns, [Block(key, content(key), depth=0)]) == [PutOutcome.STORED]
    assert client.get(ns, key, 9) is None
    with pytest.raises(Conflict, match="depth 5 without a parent"):
        client.put_many(ns, [Block(key, content(key), depth=5)])


def test_match_tells_the_leading_run(client: DataClient, ns: str) -> None:
    keys = chain(40, "match")
    client.put_many(ns, blocks(keys[:30], 4096))
    assert client.match(ns, keys).tiers == ("host",) * 30
    assert client.match(ns, keys[:7]).keys == tuple(keys[:7])
    assert client.match(ns, []).tiers == ()


def test_match_by_token_ids(client: DataClient) -> None:
    ns = f"{client.way}-plain"  # type: ignore[attr-defined]
    tokens = list(range(100, 170))
    known = Chain(16)
    known.extend(tokens)
    client.put_many(ns, blocks(known.keys[:3]))
    match = client.match_tokens(ns, tokens)
    assert (match.keys, match.tiers) == (tuple(known.keys), ("host",) * 3)
    other = client.match_tokens(ns, tokens, {0: b"image"})
    assert other.tiers == ()
    assert other.keys[0] != known.keys[0]
    with pytest.raises(Conflict, match="layout"):
        client.match_tokens(f"{client.way}-opaque", tokens)  # type: ignore[attr-defined]


def test_delete_takes_what_descends_along(client: DataClient, ns: str) -> None:
    keys = chain(6, "delete")
    client.put_many(ns, blocks(keys, 4096))
    assert client.delete(ns, keys[2:3]) == 1
    assert len(client.match(ns, keys).tiers) == 2
    assert client.get_many(ns, keys[3:], each=True) == []
    assert client.delete(ns, keys[2:3]) == 0


def test_pins_and_prefetches(client: DataClient, ns: str) -> None:
    keys = chain(4, "pin")
    client.put_many(ns, blocks(keys, 4096))
    pin = client.pin(ns, [*keys, b"nobody's" * 2], ttl=60)
    assert pin.blocks == 4
    assert 50 < pin.expires - time.time() <= 60
    client.unpin(pin.id)
    with pytest.raises(NotFound, match="pin"):
        client.unpin(pin.id)
    with pytest.raises(Invalid, match="ttl"):
        client.pin(ns, keys, ttl=0)
    prefetch = client.prefetch(ns, keys)
    until(lambda: client.prefetched(prefetch.id).state != "running")
    prefetch = client.prefetched(prefetch.id)
    assert (prefetch.state, prefetch.blocks) == ("done", 4)
    assert client.cancel(prefetch.id).blocks == 4
    assert client.cancel(prefetch.id).state == "cancelled"


def test_hints_sessions_and_stats(client: DataClient, ns: str) -> None:
    keys = chain(3, "hint")
    hinted = [block._replace(hint=Hint(priority=2.0, session="talk")) for block in blocks(keys, 4096)]
    assert set(client.put_many(ns, hinted)) == {PutOutcome.STORED}
    client.hint(ns, keys, Hint(reuse="likely"), dead_from_depth=1)
    client.end_session("talk")
    with pytest.raises(Invalid, match="dead_from_depth"):
        client.hint(ns, keys, dead_from_depth=-1)
    for call in (lambda: client.end_session("s" * 129), lambda: client.hint(ns, keys, Hint(session="s" * 129))):
        with pytest.raises(Invalid, match="session of 129 characters"):
            call()
    stats = client.stats()
    assert {tenant["name"] for tenant in stats["tenants"]} == {"red", "blue"}
    counts = client.namespace(ns).counts
    assert counts["stored"] >= 3
    assert counts["host_blocks"] > 0


def test_namespaces_are_made_once(client: DataClient) -> None:
    ns = f"{client.way}-plain"  # type: ignore[attr-defined]
    again = client.create_namespace(ns, PLAIN)
    assert (again.name, again.layout, again.fingerprint) == (ns, PLAIN, PLAIN.fingerprint)
    with pytest.raises(Conflict):
        client.create_namespace(ns, PARTS)
    assert ns in {info.name for info in client.namespaces()}
    with pytest.raises(NotFound):
        client.get_many("nowhere", chain(1))
    with pytest.raises(NotFound):
        client.put_many("nowhere", blocks(chain(3)))
    with pytest.raises(Invalid):
        client.namespace("../etc")


def test_limits_hold(client: DataClient, ns: str) -> None:
    (key,) = chain(1, "limits")
    with pytest.raises(TooLarge):
        client.put(ns, Block(key, bytes(5 << 20)))
    with pytest.raises(TooLarge, match="8193 keys"):
        client.match(ns, [key] * 8193)
    assert client.get(ns, key) is None


def test_leases_are_of_shared_memory_only(client: DataClient, ns: str) -> None:
    if not client.shares_memory:
        with pytest.raises(Unreachable, match="shares no memory"):
            client.lease(ns, chain(1))


def test_nothing_is_left_behind(service: World, client: DataClient) -> None:
    client.close()  # it connects again when it is used next
    for way in WAYS:
        with service.client(way) as client:
            client.create_namespace("left", None)
            keys = chain(3, way)
            client.put_many("left", blocks(keys))
            client.get_many("left", keys)
    assert service.settled() == NOTHING
