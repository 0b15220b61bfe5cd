"""Blocks of different models, layouts, shards, adapters and tenants never meet, in no tier and by no verb."""

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from fault_world import NVME_OPTIONS, World

from kvtier.cpu import HostTier
from kvtier.keys import Chain, Namespace, namespace_index, store_keys
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.nvme import NvmeTier
from kvtier.testing.blocks import content, load, put, run_length
from kvtier.tiers import BlockRef, Handle, Status

GROUP = LayerGroup(GroupKind.GQA, (0, 1), 2, 2, 8, dtype="float16")
LAYOUT = Layout(16, (GROUP,))
TOKENS = range(16 * 6)


def refs_of(space: Namespace, shard: int = 0, group: int = 0) -> list[BlockRef]:
    """The same text in a namespace."""
    chain = Chain(16)
    chain.extend(TOKENS)
    keys = store_keys(chain.keys, space.mask(group, shard))
    ns = namespace_index(space.digest)
    return [BlockRef(key, ns, at, keys[at - 1] if at else None, exact=True) for at, key in enumerate(keys)]


OURS = Namespace("a/b", LAYOUT.fingerprint, salt="ours")
OTHERS = {
    "tenant": replace(OURS, salt="theirs"),
    "no salt": replace(OURS, salt=""),
    "weights": replace(OURS, model="a/b@2"),
    "similar name": replace(OURS, model="a-b"),
    "long name": replace(OURS, model="organisation/" + 200 * "x"),
    "adapter": replace(OURS, lora="x"),
    "numerics": replace(OURS, numerics="rope_theta=1e6"),
    "axis order": replace(OURS, layout=replace(LAYOUT, groups=(replace(GROUP, order="lhptd"),)).fingerprint),
    "engine pages": replace(OURS, layout=replace(LAYOUT, groups=(replace(GROUP, order="opaque:e/1"),)).fingerprint),
    "dtype": replace(OURS, layout=replace(LAYOUT, groups=(replace(GROUP, dtype="bfloat16"),)).fingerprint),
    "two shards": replace(OURS, layout=replace(LAYOUT, shards=2).fingerprint),
    "four shards": replace(OURS, layout=replace(LAYOUT, shards=4).fingerprint),
    "block size": replace(OURS, layout=replace(LAYOUT, block_size=32).fingerprint),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_same_text_of_somebody_else_is_found_by_no_verb(tmp_path: Path, other: str) -> None:
    ours, theirs = refs_of(OURS), refs_of(OTHERS[other])
    keys = [ref.key for ref in theirs]
    assert not {ref.key for ref in ours} & set(keys)
    world = World(tmp_path)
    world.put(ours)
    world.store.flush()
    for tier in (world.host, world.below):
        assert set(tier.contains(keys).wait(30).statuses) == {Status.MISS}
        assert tier.acquire(keys, "other").wait(30).handles == ()
        assert set(tier.remove(keys).wait(30).statuses) == {Status.MISS}
    assert world.found(theirs) == ()
    assert world.fetched(theirs) == 0
    # Theirs beside ours: both are kept, and what is cleared or removed is one's own.
    world.put(theirs)
    world.store.flush()
    world.store.clear(ns=theirs[0].ns)
    assert world.fetched(theirs) == 0
    world.store.clear("host")
    assert world.fetched(ours) == 6
    world.check()
    world.close()
    # After a restart it is the same.
    with contextlib.closing(NvmeTier(tmp_path / "nvme", 512 * 8192, NVME_OPTIONS)) as tier:
        assert run_length(tier, theirs) == 0
        assert run_length(tier, ours) == 6


def test_shards_and_groups_of_one_layout_have_keys_of_their_own() -> None:
    parts = [refs_of(OURS, shard, group) for shard in range(4) for group in range(3)]
    keys = [ref.key for refs in parts for ref in refs]
    assert len(set(keys)) == len(keys) == 4 * 3 * 6


def test_layer_groups_of_every_shape_go_through_every_tier(tmp_path: Path) -> None:
    groups = (
        LayerGroup(GroupKind.GQA, (0, 2), 2, 8, 128, dtype="float16"),
        LayerGroup(GroupKind.GQA, (1,), 2, 1, 80, dtype="float8_e4m3fn", window=4096),
        LayerGroup(GroupKind.MLA, (3, 4, 5), 1, 1, 512, rope_dim=64, dtype="bfloat16"),
        LayerGroup(GroupKind.MLA, (6,), 1, 1, 96, rope_dim=1, dtype="int8"),
    )
    layout = Layout(16, groups)
    space = Namespace("mixed", layout.fingerprint)
    sizes = [layout.block_bytes(group) for group in range(4)]
    assert sizes == [2 * 2 * 8 * 16 * 128 * 2, 2 * 16 * 80, 3 * 16 * 576 * 2, 16 * 97]
    tiers = (HostTier(4 << 20), NvmeTier(tmp_path / "n", 4 << 20, NVME_OPTIONS))
    for tier in tiers:
        with contextlib.closing(tier):
            for group, nbytes in enumerate(sizes):
                assert all(isinstance(one, Handle) for one in put(tier, refs_of(space, group=group), nbytes))
            for group, nbytes in enumerate(sizes):
                refs = refs_of(space, group=group)
                sound = [(Status.OK, bytes(content(ref, nbytes))) for ref in refs]
                assert load(tier, [ref.key for ref in refs]) == sound


def test_counters_are_kept_by_the_name_that_a_tier_was_given(tmp_path: Path) -> None:
    class Renamed(HostTier):
        """Another class name, another tier name: nobody may guess one from the other."""

    with contextlib.closing(Renamed(1 << 20, name="fast")) as tier:
        put(tier, refs_of(OURS), 4096)
        assert tier._metrics.value("occupied_bytes", tier="fast") == 6 * 4096
    world = World(tmp_path)
    with contextlib.closing(world):
        world.put(refs_of(OURS))
        assert {"host", "nvme"} <= set(world.store.stats())


def test_a_name_says_nothing_that_could_be_guessed_from_its_text() -> None:
    chain = Chain(16)
    chain.extend(TOKENS)
    heads = [key[:16] for key in chain.keys]
    for space in (OURS, *OTHERS.values()):
        assert not set(heads) & set(store_keys(chain.keys, space.mask()))
    assert OURS.mask() != hashlib.sha256(OURS.digest).digest()[:16]
