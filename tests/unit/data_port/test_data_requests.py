"""How puts and gets are cut into requests, slots, buffers and windows: within the limits, blocks of any sizes."""

from itertools import groupby, pairwise
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from data_world import BLOCK, NOTHING, PLAIN, World, chain, content, world
from data_world import blocks as chain_blocks
from hypothesis import example, given
from patience import until

from kvtier.client.errors import DeadlineExceeded, TooLarge
from kvtier.client.results import Block, PutOutcome
from kvtier.client.transfers import requests
from kvtier.errors import FormatMismatch
from kvtier.hints import Hint
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.wire.frames import WireError

LAYER = 8 << 10
# Groups of as many layers: no two parts of a block fill a slot of six layers as the parts of the block before did.
LAYERS = (2, 3, 6, 1)
GROUPS = tuple(
    LayerGroup(GroupKind.GQA, tuple(range(20 * at, 20 * at + count)), 2, 2, 32, dtype="float32")
    for at, count in enumerate(LAYERS)
)
UNEVEN = Layout(16, GROUPS)

parts = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([None, Hint(priority=3)])), min_size=1, max_size=5)


@example([[(3, None), (4, None), (9, None), (1, None)]] * 2, 6, 9)  # what stays after a cut is still too much
@given(st.lists(parts, max_size=6), st.integers(1, 6), st.integers(9, 24))
def test_requests_stay_within_the_limits(sizes: list[list[tuple[int, Hint | None]]], keys: int, nbytes: int) -> None:
    blocks = [
        Block(bytes([at]) * 16, bytes(size), part=part, hint=hint)
        for at, block in enumerate(sizes)
        for part, (size, hint) in enumerate(block)
    ]
    made = list(requests(blocks, keys, nbytes))
    assert [block for some in made for block in some] == blocks
    assert all(made)
    for some in made:
        assert len(some) <= keys
        assert sum(len(block.data) for block in some) <= nbytes
        assert len({block.hint for block in some}) == 1
    for before, after in pairwise(made):
        key = after[0].key
        if before[-1].key == key:  # a block apart: it could not go in one, with one hint
            whole = [block for block in blocks if block.key == key]
            assert (
                len(whole) > keys
                or sum(len(block.data) for block in whole) > nbytes
                or len(list(groupby(whole, lambda block: block.hint))) > 1
            )


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
def test_blocks_whose_parts_exceed_a_request_arrive_as_they_were(tmp_path: Path, way: str) -> None:
    limits = {"max_block": 6 * LAYER, "max_batch": 6 * LAYER}
    with world(tmp_path, **limits if way != "shared" else {}) as service:
        with service.client(way, staging=12 * LAYER) as client:
            client.create_namespace("uneven", UNEVEN)
            blocks = [
                Block(key, content(key, count * LAYER, part), part=part, depth=-1)
                for key in chain(8, "uneven")
                for part, count in enumerate(LAYERS)
            ]
            assert set(client.put_many("uneven", blocks)) == {PutOutcome.STORED}
            for block in blocks:
                found = client.get("uneven", block.key, block.part)
                assert found is not None
                assert found.data == block.data
        assert service.settled() == NOTHING


def test_a_put_of_two_windows_does_not_wait_for_its_own_buffers(tmp_path: Path) -> None:
    limits = {"max_batch": "63MiB", "inflight_bytes": "63MiB"}
    with world(tmp_path, **limits) as service, service.client() as client:
        client.create_namespace("windows", None)
        blocks = [Block(key, content(key, 1 << 20), depth=-1) for key in chain(63, "windows")]
        outcomes = client.put_many("windows", blocks)
        assert len(outcomes) == 63
        assert outcomes[32] is PutOutcome.STORED  # the first of the second; the tenant has room for half a window
        found = client.get("windows", blocks[32].key)
        assert found is not None
        assert found.data == blocks[32].data


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
def test_an_empty_block_is_refused_and_the_connection_stays(service: World, way: str) -> None:
    with service.client(way) as client:
        client.create_namespace("empty", None)
        connection = client._pipeline
        keys = chain(2, f"empty{way}")
        with pytest.raises(TooLarge, match="blocks of 0 to 5 bytes"):
            client.put_many("empty", [Block(keys[0], b"whole", depth=-1), Block(keys[1], b"", depth=-1)])
        assert client.put("empty", Block(keys[0], b"whole", depth=-1)) is PutOutcome.STORED
        assert client._pipeline is connection


def test_who_gets_no_slot_in_time_leaves_the_connection_to_others(service: World) -> None:
    with service.client("shared") as client:
        client.create_namespace("slots", None)
        connection, memory = client._pipeline, client._memory
        assert memory is not None
        taken = [memory._slots.get(timeout=5) for _ in range(2)]  # as puts of other threads have them
        block = Block(chain(1, "slots")[0], b"whole", depth=-1)
        with pytest.raises(DeadlineExceeded, match="other puts took all of the time"):
            client.put("slots", block, timeout=0.05)
        for slot in taken:
            memory._slots.put(slot)
        assert client.put("slots", block) is PutOutcome.STORED
        assert client._pipeline is connection


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (Block(bytes(16), np.zeros((64, 64), np.uint8)[:, ::2].data, depth=-1), TypeError),
        (Block(b"short", b"data", depth=-1), WireError),
        (Block(bytes(16), b"data", parent=b"short", depth=1), WireError),
    ],
    ids=["not contiguous", "key", "parent"],
)
def test_what_is_no_block_leaves_the_connection_to_others(
    service: World, way: str, wrong: Block, error: type[Exception]
) -> None:
    with service.client(way) as client:
        client.create_namespace("wrong", None)
        connection, good = client._pipeline, Block(chain(1, "wrong")[0], b"whole", depth=-1)
        with pytest.raises(error):
            client.put_many("wrong", [good, wrong])
        client.put("wrong", good)
        assert client._pipeline is connection


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
def test_a_buffer_that_is_too_short_leaves_the_connection_to_others(tmp_path: Path, way: str) -> None:
    with world(tmp_path) as service, service.client(way) as client:
        client.create_namespace("buffers", None)
        keys = chain(40, "buffers")
        client.put_many("buffers", chain_blocks(keys))
        into = [memoryview(bytearray(BLOCK)) for _ in keys]
        for short in (0, 12, 39):
            connection = client._pipeline
            with pytest.raises(FormatMismatch, match="a buffer of 5 bytes"):
                client.get_many("buffers", keys, into=[*into[:short], memoryview(bytearray(5)), *into[short + 1 :]])
            until(lambda: service.holds() | {"buffers": 0} == NOTHING | {"connections": 1})
            assert len(client.get_many("buffers", keys, into=into)) == 40
            assert client._pipeline is connection


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
@pytest.mark.parametrize("each", [False, True], ids=["run", "each"])
def test_gets_of_blocks_of_many_sizes_are_cut_until_they_fit(tmp_path: Path, way: str, each: bool) -> None:
    """What was read last, a few short blocks, says nothing of those that are read next."""
    with world(tmp_path, max_batch="2MiB", max_block="1MiB") as service, service.client(way) as client:
        client.create_namespace("mixed", None)
        keys = chain(64, "mixed")
        sizes = [(1 << 20) if at == 9 else 512 if at < 8 or at > 40 else 200 << 10 for at in range(64)]
        blocks = [Block(key, content(key, size), depth=-1) for key, size in zip(keys, sizes, strict=True)]
        assert set(client.put_many("mixed", blocks)) == {PutOutcome.STORED}
        for _ in range(3):
            found = client.get_many("mixed", keys, each=each)
            assert [(item.key, bytes(item.data)) for item in found] == [(block.key, block.data) for block in blocks]


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
def test_windows_of_a_get_are_no_larger_than_a_batch(tmp_path: Path, way: str) -> None:
    with world(tmp_path, max_batch="1MiB", max_block="64KiB") as service, service.client(way) as client:
        client.create_namespace("narrow", PLAIN)
        keys = chain(100, "narrow")
        client.put_many("narrow", chain_blocks(keys))
        found = client.get_many("narrow", keys)
        assert [bytes(item.data) for item in found] == [content(key) for key in keys]
    assert service.settled() == NOTHING
