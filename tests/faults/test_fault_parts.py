"""Blocks of several parts (layer groups, shards): ready only as a whole, in whatever tier and order the parts go."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
from fault_world import World

from kvtier.keys import Chain, Namespace, namespace_index, store_keys
from kvtier.testing import Fault, Kind
from kvtier.testing.blocks import content
from kvtier.tiers import BlockRef

PARTS, BLOCKS = 3, 6
SPACE = Namespace("hybrid", b"three layer groups")


def parts_of(blocks: int, *, seed: int = 0) -> list[BlockRef]:
    """Block-major: the parts of block 0, of block 1, ... The parent of a part is the same part of the block before."""
    chain = Chain(1)
    chain.extend([seed, *range(1, blocks)])
    keys = [store_keys(chain.keys, SPACE.mask(part)) for part in range(PARTS)]
    ns = namespace_index(SPACE.digest)
    return [
        BlockRef(keys[part][at], ns, at, keys[part][at - 1] if at else None, exact=True)
        for at, part in product(range(blocks), range(PARTS))
    ]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.closing(World(tmp_path)) as world:
        yield world
        world.check()


def put(world: World, refs: Sequence[BlockRef]) -> None:
    world.store.put([(ref, content(ref, world.block)) for ref in refs], parts=PARTS).result(30)


def found(world: World, refs: Sequence[BlockRef]) -> int:
    return len(world.store.match([ref.key for ref in refs], parts=PARTS).tiers)


def fetched(world: World, refs: Sequence[BlockRef]) -> int:
    """Whole blocks that arrive, each part with its own bytes."""
    lease = world.store.acquire([ref.key for ref in refs], "reader", parts=PARTS).result(30)
    try:
        good = world.store.fetch(lease, 0, len(lease)).result(30)
        for ref, (_, handle) in zip(refs, lease.part(0, good), strict=False):
            assert world.bytes_of(handle) == content(ref, world.block)
        return good
    finally:
        world.store.release(lease)


@pytest.mark.parametrize(("block", "part"), list(product((0, 2, 5), range(PARTS))))
@pytest.mark.parametrize("place", ["host", "nvme", "both"])
def test_a_block_without_one_of_its_parts_is_a_miss(world: World, place: str, block: int, part: int) -> None:
    refs = parts_of(BLOCKS)
    put(world, refs)
    world.store.flush()
    gone = [refs[block * PARTS + part].key]
    if place in ("host", "both"):
        world.inner.remove(gone).wait(30)
    else:
        world.store.clear("host")
    if place in ("nvme", "both"):
        world.nvme.remove(gone).wait(30)
    # What host alone lacks comes from below, part by part; what nobody has ends the run for every part.
    expected = BLOCKS if place == "host" else block
    assert found(world, refs) in (expected, BLOCKS)
    assert fetched(world, refs) == expected
    put(world, refs)
    assert fetched(world, refs) == BLOCKS


@pytest.mark.parametrize("first", range(0, BLOCKS * PARTS, 4))
@pytest.mark.parametrize("kind", [Kind.VANISH, Kind.CORRUPT, Kind.EIO, Kind.SHORT])
def test_a_part_that_fails_on_the_way_up_takes_its_block_with_it(world: World, kind: Kind, first: int) -> None:
    refs = parts_of(BLOCKS)
    put(world, refs)
    world.store.flush()
    world.store.clear("host")
    world.below.inject(Fault("read", kind, first_item=first))
    assert fetched(world, refs) <= BLOCKS
    world.heal()
    put(world, refs)
    world.store.flush()
    world.store.clear("host")
    assert fetched(world, refs) == BLOCKS


def test_a_put_that_host_cannot_take_leaves_whole_blocks_only(tmp_path: Path) -> None:
    with contextlib.closing(World(tmp_path, host_blocks=8)) as world:
        refs = parts_of(BLOCKS)
        put(world, refs)
        # Eight parts of room are two whole blocks.
        assert found(world, refs) == fetched(world, refs)
        assert fetched(world, refs) <= 2
        world.check()
