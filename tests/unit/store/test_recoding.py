"""Formats per tier and namespace: what is encoded where, and what comes back."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_world import ExtentTier, key, keys, memory_tier

from kvtier import formats
from kvtier.cpu import HostTier
from kvtier.errors import ConfigError, FormatMismatch
from kvtier.keys import namespace_index
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import StoreOptions, TieredStore
from kvtier.tiers import BlockRef, Tier

LAYOUT = Layout(16, (LayerGroup(GroupKind.GQA, (0, 1), 2, 2, 64, dtype="bfloat16"),))
RAW = LAYOUT.block_bytes()
MIB = 1 << 20


def ns(name: str) -> int:
    return namespace_index(hashlib.sha256(name.encode()).digest())


def values(chain: str, depth: int, nbytes: int = RAW) -> memoryview:
    """A raw block of bfloat16 numbers that look like KV."""
    generator = np.random.default_rng([*chain.encode(), depth])
    wide = generator.standard_normal(nbytes // 2).astype(np.float32)
    return memoryview((wide.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def as_numbers(data: memoryview) -> np.ndarray:
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def blocks(chain: str, stop: int, space: int, *, exact: bool = True) -> list[tuple[BlockRef, memoryview]]:
    return [
        (BlockRef(key(chain, at), space, at, key(chain, at - 1) if at else None, exact), values(chain, at))
        for at in range(stop)
    ]


@contextlib.contextmanager
def opened(
    path: Path | None = None, *, host: str = "raw", nvme: str = "raw", lossy: bool = False, **more: int
) -> Iterator[TieredStore]:
    """With a real NVMe tier below where a path is given, otherwise with its like in memory."""
    if path is None:
        below: Tier = ExtentTier(16 * MIB, name="nvme")
    else:
        below = NvmeTier(path, 16 * MIB, NvmeOptions(min_free_bytes=0, segment_bytes=MIB))
    options = StoreOptions(accept_lossy=lossy, formats={"host": host, "nvme": nvme}, **more)
    with contextlib.closing(TieredStore(HostTier(2 * MIB), [below], options=options)) as store:
        store.register(ns("recoding"), LAYOUT)
        yield store


def loaded(store: TieredStore, chain: str, stop: int, layout: Layout = LAYOUT) -> list[tuple[str, memoryview]]:
    """Format in host, and the raw block as a worker would decode it."""
    lease = store.acquire(keys(chain, stop), "test").result(30)
    good = store.fetch(lease, 0, len(lease)).result(30)
    found = []
    for (_, handle), place in zip(lease.part(0, good), store.located(lease, 0, good), strict=True):
        assert place.fmt == handle.fmt
        assert place.span.nbytes == handle.nbytes
        raw = memoryview(bytearray(layout.block_bytes()))
        formats.get(place.fmt).decode(store.host.buffer(handle)[: handle.nbytes], layout, raw)
        found.append((place.fmt, raw))
    store.release(lease)
    return found


@pytest.mark.parametrize("staging", [1, 1 << 20])
def test_a_lossless_format_below_comes_back_raw_bit_by_bit(tmp_path: Path, staging: int) -> None:
    with opened(tmp_path, nvme="bitsplit", staging_bytes=staging) as store:
        store.put(blocks("a", 12, ns("recoding"))).result()
        store.flush()
        store.clear("host")
        assert store.match(keys("a", 12)).tiers == ("nvme",) * 12
        lease = store.acquire(keys("a", 12), "test").result()
        assert lease.nbytes(0, 12) < 0.9 * 12 * RAW
        assert lease.is_exact(0, 12)
        store.release(lease)
        found = loaded(store, "a", 12)
        assert [fmt for fmt, _ in found] == ["raw"] * 12
        assert all(raw == values("a", at) for at, (_, raw) in enumerate(found))


def test_a_lossy_format_below_is_not_exact_and_comes_back_as_it_is() -> None:
    with opened(nvme="int8", lossy=True) as store:
        store.put(blocks("a", 6, ns("recoding"))).result()
        store.flush()
        assert store.wanted(keys("a", 6), exact=True) == 6
        store.clear("host")
        assert len(store.match(keys("a", 6)).tiers) == 6
        assert store.match(keys("a", 6), lossy=False).tiers == ()
        assert store.wanted(keys("a", 6), exact=True) == 0
        found = loaded(store, "a", 6)
        assert [fmt for fmt, _ in found] == ["int8"] * 6
        for at, (_, raw) in enumerate(found):
            truth = as_numbers(values("a", at))
            error = np.abs(as_numbers(raw) - truth).max()
            assert 0 < error < np.abs(truth).max() / 60
        # The exact block, put again, replaces the lossy one that came up into host.
        assert store.put(blocks("a", 6, ns("recoding"))).result().stored == 6
        assert len(store.match(keys("a", 6), lossy=False).tiers) == 6


def test_the_first_block_of_a_chain_is_kept_better() -> None:
    with opened(nvme="k8v4", lossy=True) as store:
        store.put(blocks("a", 4, ns("recoding"))).result()
        store.flush()
        store.clear("host")
        expected = [formats.choose("k8v4", depth).id for depth in range(4)]
        assert expected[0] != expected[1]
        assert [fmt for fmt, _ in loaded(store, "a", 4)] == expected


def test_what_is_lossy_in_host_goes_down_as_it_is() -> None:
    with opened(host="int8", nvme="k8v4", lossy=True) as store:
        assert store.put(blocks("a", 4, ns("recoding"))).result().stored == 4
        assert store.put(blocks("a", 4, ns("recoding"))).result().joined == 4
        # Nothing can be exact here: there is nothing to save again.
        assert store.wanted(keys("a", 4), exact=True) == 4
        store.flush()
        first = loaded(store, "a", 4)
        store.clear("host")
        second = loaded(store, "a", 4)
        assert [fmt for fmt, _ in first] == [fmt for fmt, _ in second] == ["int8"] * 4
        assert all(one[1] == other[1] for one, other in zip(first, second, strict=True))


def test_namespaces_have_formats_of_their_own() -> None:
    with opened(nvme="raw") as store:
        store.register(ns("other"), LAYOUT, {"nvme": "bitsplit"})
        store.put(blocks("a", 4, ns("recoding"))).result()
        store.put(blocks("b", 4, ns("other"))).result()
        store.put([(ref._replace(ns=ns("unknown")), data) for ref, data in blocks("c", 4, 0)]).result()
        store.flush()
        store.clear("host")
        for chain, fmt in (("a", "raw"), ("b", "bitsplit"), ("c", "raw")):
            lease = store.acquire(keys(chain, 4), "test").result()
            assert {handle.fmt for _, handle in lease.blocks} == {fmt}
            assert store.fetch(lease, 0, 4).result() == 4
            store.release(lease)


def test_parts_of_several_groups_are_encoded_each_in_its_shape() -> None:
    layout = Layout(16, (*LAYOUT.groups, LayerGroup(GroupKind.GQA, (2,), 2, 2, 64, dtype="bfloat16")), shards=2)
    sizes = [layout.block_bytes(0)] * 2 + [layout.block_bytes(1)] * 2
    with opened(nvme="bitsplit") as store:
        store.register(ns("groups"), layout)
        batch = [
            (
                BlockRef(key("g", at, part), ns("groups"), at, key("g", at - 1, part) if at else None, exact=True),
                values(f"g{part}", at, sizes[part]),
            )
            for at in range(4)
            for part in range(4)
        ]
        with pytest.raises(FormatMismatch, match="as its layout says"):
            store.put([batch[2], *batch[1:]], parts=4)
        assert store.put(batch, parts=4).result() == (4, 0, 0)
        store.flush()
        store.clear("host")
        lease = store.acquire([ref.key for ref, _ in batch], "test", parts=4).result()
        assert store.fetch(lease, 0, 4).result() == 4
        for (_, handle), (ref, data) in zip(lease.blocks, batch, strict=True):
            assert handle.ref == ref
            assert store.host.buffer(handle)[: handle.nbytes] == data
        store.release(lease)


def test_groups_of_one_size_and_different_shapes_are_not_guessed() -> None:
    twisted = LayerGroup(GroupKind.GQA, (2, 3), 2, 4, 32, dtype="bfloat16")
    layout = Layout(16, (*LAYOUT.groups, twisted))
    assert layout.block_bytes(0) == layout.block_bytes(1)
    with opened(nvme="int8", lossy=True) as store:
        store.register(ns("ambiguous"), layout)
        batch = [
            (BlockRef(key("t", 0, part), ns("ambiguous"), 0, None, exact=True), values("t", part)) for part in (0, 1)
        ]
        store.put(batch, parts=2).result()
        store.flush()
        # Kept as they are, which is right for both, rather than encoded in the shape of one.
        assert store.metrics.value("fallbacks_total", tier="nvme", what="ambiguous_group") == 2
        store.clear("host")
        lease = store.acquire([ref.key for ref, _ in batch], "test", parts=2, lossy=False).result()
        assert store.fetch(lease, 0, 1).result() == 1
        for (_, handle), (_, data) in zip(lease.blocks, batch, strict=True):
            assert store.host.buffer(handle)[: handle.nbytes] == data
        store.release(lease)


def test_a_block_that_its_format_cannot_express_is_dropped_and_counted() -> None:
    with opened(nvme="int8", lossy=True) as store:
        batch = blocks("a", 4, ns("recoding"))
        broken = np.frombuffer(batch[2][1], np.uint16).copy()
        broken[5] = 0x7FC0  # not a number
        batch[2] = (batch[2][0], memoryview(broken.tobytes()))
        assert store.put(batch).result().stored == 4
        store.flush()
        assert store.stats()["nvme"]["reservations"] == 0
        store.clear("host")
        refused = store.metrics.value("dropped_blocks_total", tier="nvme", reason="unencodable")
        assert len(loaded(store, "a", 4)) == 4 - refused


def test_what_makes_no_sense_is_refused() -> None:
    with opened() as store:
        for chosen, says in (
            ({"nvme": "int8"}, "lossy, and lossy blocks are not accepted"),
            ({"host": "bitsplit"}, "fixed sizes only"),
            ({"disk": "raw"}, "for tier 'disk': expected one of host, nvme"),
            ({"nvme": "int9"}, "int9"),
        ):
            with pytest.raises(ConfigError, match=says):
                store.register(ns("refused"), LAYOUT, chosen)
        other = Layout(32, LAYOUT.groups)
        with pytest.raises(ConfigError, match="another layout"):
            store.register(ns("recoding"), other)
        with pytest.raises(FormatMismatch, match="as its layout says"):
            store.put([(blocks("a", 1, ns("recoding"))[0][0], memoryview(b"short"))])
    with pytest.raises(ConfigError, match="lossy"):
        TieredStore(HostTier(MIB), [memory_tier(4)], options=StoreOptions(formats={"below": "int8"}))
