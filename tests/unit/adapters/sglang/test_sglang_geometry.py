"""What a page is: its bytes in every layout, and a namespace that differs in all that makes pages incompatible."""

import ctypes
from dataclasses import replace

import pytest
import torch
from kvtier_sglang.geometry import geometry_of

from kvtier.errors import ConfigError, FormatMismatch
from kvtier.keys import Chain
from tests.sglang_world import DIM, HEADS, LATENT, LAYERS, MHA_LAYOUTS, MLA_LAYOUTS, PAGE, FakePool, FakeRank, slots

POOLS = [(layout, False) for layout in MHA_LAYOUTS] + [(layout, True) for layout in MLA_LAYOUTS]


def gathered(parts):
    return [b"".join(ctypes.string_at(place, nbytes) for place, nbytes in part) for part in parts]


@pytest.mark.parametrize(("layout", "mla"), POOLS)
def test_the_bytes_of_a_page_are_those_of_its_flat_page(layout, mla):
    pool = FakePool(layout, mla=mla)
    geometry = geometry_of(pool, FakeRank(is_mla_model=mla))
    assert geometry.page_bytes == 2 * LAYERS * PAGE * (LATENT if mla else 2 * HEADS * DIM)
    for page in (0, 3, 7):
        pool.fill(page, page)
    parts = geometry.in_pool(slots([7, 0, 3]))
    assert gathered(parts) == [pool.bits(7), pool.bits(0), pool.bits(3)]
    flat = pool.get_data_page(3 * PAGE).contiguous()
    assert gathered(geometry.in_flat(flat.data_ptr())) == [pool.bits(3)]


def test_slices_of_heads_are_those_of_a_rank_that_has_only_them():
    few, many = FakePool("page_head", heads=2), FakePool("page_head", heads=4)
    narrow = [geometry_of(few, FakeRank(tp_rank=rank, tp_size=4, tp_lcm_size=4)) for rank in range(4)]
    wide = geometry_of(many, FakeRank(tp_rank=1, tp_size=2, tp_lcm_size=4, should_split_heads=True))
    assert {one.namespace.digest for one in [*narrow, wide]} == {wide.namespace.digest}
    hashes = Chain(PAGE)
    hashes.extend(range(2 * PAGE))
    assert wide.keys(hashes.keys)[0::2] == narrow[2].keys(hashes.keys)
    assert wide.keys(hashes.keys)[1::2] == narrow[3].keys(hashes.keys)
    many.fill(1, "heads")
    page = many.get_data_page(PAGE).contiguous()
    slices = zip(gathered(wide.in_pool(slots([1]))), gathered(wide.in_flat(page.data_ptr())), strict=True)
    for half, (heads, flat) in enumerate(slices):
        few.page(0).copy_(many.page(1)[:, 2 * half : 2 * half + 2])
        assert heads == flat == few.bits(0)


def test_everything_that_makes_pages_incompatible_is_in_their_keys():
    rank = FakeRank(tp_rank=1, tp_size=2, pp_rank=0, pp_size=2, attn_cp_size=2)
    pools = {layout: FakePool(layout) for layout in MHA_LAYOUTS}
    pool = pools["page_first"]
    narrow, later, longer = FakePool("page_first", heads=2), FakePool("page_first"), FakePool("page_first")
    later.start_layer = LAYERS
    longer.layer_num = LAYERS  # the same
    made = {
        "the same": geometry_of(pool, rank),
        **{f"layout {layout}": geometry_of(one, rank) for layout, one in pools.items() if layout != "page_first"},
        "dtype": geometry_of(FakePool("page_first", dtype=torch.float16), rank),
        "fp8": geometry_of(FakePool("page_first", dtype=torch.float8_e4m3fn), rank),
        "other fp8": geometry_of(FakePool("page_first", dtype=torch.float8_e5m2), rank),
        "bytes": geometry_of(FakePool("page_first", dtype=torch.uint8), rank),
        "heads": geometry_of(narrow, rank),
        "layers": geometry_of(later, rank),
        "model": geometry_of(pool, replace(rank, model_name="other")),
        "salt": geometry_of(pool, rank, "revision 2"),
        "tp rank": geometry_of(pool, replace(rank, tp_rank=0)),
        "tp size": geometry_of(pool, replace(rank, tp_size=4)),
        "pp rank": geometry_of(pool, replace(rank, pp_rank=1)),
        "pp size": geometry_of(pool, replace(rank, pp_size=4)),
        "cp rank": geometry_of(pool, replace(rank, attn_cp_rank=1)),
        "cp size": geometry_of(pool, replace(rank, attn_cp_size=1)),
        "split": geometry_of(pools["page_head"], replace(rank, tp_lcm_size=4, should_split_heads=True)),
        "mla": geometry_of(FakePool("page_first", mla=True), replace(rank, is_mla_model=True)),
    }
    page = bytes(range(32))
    keys = {name: key for name, one in made.items() for key in [one.keys([page])[0]]}
    assert len(set(keys.values())) == len(keys)
    assert geometry_of(longer, rank).keys([page]) == made["the same"].keys([page])


def test_a_page_size_is_another_namespace():
    pool = FakePool("page_first")
    before = geometry_of(pool, FakeRank()).namespace.digest
    pool.page_size = 2 * PAGE
    pool.get_page_buffer_meta = lambda indices: ([pool.buffer.data_ptr()] * 2, [4 * LAYERS * PAGE * HEADS * DIM] * 2)
    assert geometry_of(pool, FakeRank()).namespace.digest != before


def test_latents_are_the_same_for_all_ranks_of_any_tp_size():
    pool = FakePool("page_first", mla=True)
    ranks = [FakeRank(tp_rank=rank, tp_size=size, is_mla_model=True) for size in (1, 2, 8) for rank in range(size)]
    assert len({tuple(geometry_of(pool, rank).keys([bytes(32)])) for rank in ranks}) == 1


def test_k_and_v_of_different_widths_are_a_page_of_their_own():
    pool = FakePool("page_first")
    pool.v_head_dim = DIM // 2
    key, value = LAYERS * PAGE * HEADS * DIM * 2, LAYERS * PAGE * HEADS * DIM
    pool.get_page_buffer_meta = lambda indices: ([pool.buffer.data_ptr()] * 2, [key, value])
    geometry = geometry_of(pool, FakeRank())
    assert geometry.page_bytes == key + value
    assert geometry.namespace.digest != geometry_of(FakePool("page_first"), FakeRank()).namespace.digest


def test_pools_that_cannot_be_stored_are_refused():
    odd, more = FakePool("page_first"), FakePool("page_first")
    odd.layout = "page_first_kv_split"
    more.layer_num += 1
    with pytest.raises(ConfigError, match="host layout 'page_first_kv_split': expected one of layer_first"):
        geometry_of(odd, FakeRank())
    with pytest.raises(ConfigError, match="has no attribute 'kv_cache_dim'"):
        geometry_of(FakePool("page_first"), FakeRank(is_mla_model=True))
    with pytest.raises(ConfigError, match="by its shape; it holds what kvtier does not know of"):
        geometry_of(more, FakeRank())
    with pytest.raises(ConfigError, match="dcp_size = 2"):
        geometry_of(FakePool("page_first", mla=True), FakeRank(is_mla_model=True, dcp_size=2))
    with pytest.raises(ConfigError, match="names no model"):
        geometry_of(FakePool("page_first"), FakeRank(model_name=None))
    with pytest.raises(ConfigError, match="3 KV heads per rank: tp_lcm_size = 2"):
        geometry_of(FakePool("page_head", heads=3), FakeRank(tp_lcm_size=2, should_split_heads=True))


def test_half_a_page_is_refused():
    geometry = geometry_of(FakePool("page_first"), FakeRank())
    with pytest.raises(FormatMismatch, match="3 token slots: expected whole pages of 4"):
        geometry.in_pool(torch.arange(3))
