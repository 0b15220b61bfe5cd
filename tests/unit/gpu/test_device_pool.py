"""DevicePool: shapes, sizes, bytes."""

import pytest
import torch

from kvtier.errors import CapacityError, FormatMismatch
from kvtier.gpu import BlockCopy, DevicePool
from kvtier.layout import DTYPE_BYTES, GroupKind, LayerGroup, Layout


def _gqa(dtype="float32", **changes):
    return LayerGroup(GroupKind.GQA, (0, 1, 2), 2, 4, 8, dtype=dtype, **changes)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_block_is_one_contiguous_row_of_bytes(dtype):
    layout = Layout(16, (_gqa(dtype),))
    pool = DevicePool(layout, 5, "cpu")
    assert pool.tensor.shape == (5, 3, 2, 4, 16, 8)
    assert pool.tensor.dtype == getattr(torch, dtype)
    rows = pool.as_bytes()
    assert rows.shape == (5, layout.block_bytes())
    assert not rows.any()
    rows[3] = 7
    assert pool.tensor.view(torch.uint8)[3].eq(7).all()
    assert pool.as_bytes().sum() == 7 * layout.block_bytes()


def test_mla_has_one_plane_of_latent_and_rope():
    pool = DevicePool(Layout(4, (LayerGroup(GroupKind.MLA, (0, 1), 1, 1, 24, rope_dim=8),)), 2, "cpu")
    assert pool.tensor.shape == (2, 2, 4, 32)


def test_fit_takes_as_many_blocks_as_fit():
    layout = Layout(16, (_gqa(),))
    size = layout.block_bytes()
    assert DevicePool.fit(layout, 3 * size + size - 1, "cpu").blocks.num_blocks == 3
    assert DevicePool.fit(layout, size, "cpu").blocks.free_blocks == 1
    with pytest.raises(CapacityError, match=f"{size - 1} bytes of device memory.*{size}"):
        DevicePool.fit(layout, size - 1, "cpu")
    with pytest.raises(CapacityError, match="0 blocks"):
        DevicePool(layout, 0, "cpu")


def test_more_memory_than_can_be_mapped_is_a_capacity_error():
    huge = LayerGroup(GroupKind.GQA, tuple(range(1000)), 2, 64, 4096)  # 33 GB a block
    with pytest.raises(CapacityError, match="make the device pool smaller"):
        DevicePool(Layout(16, (huge,)), 1 << 15, "cpu")


def test_layouts_that_are_not_uniform_or_not_addressable_are_refused():
    with pytest.raises(FormatMismatch, match="2 layer groups"):
        DevicePool(Layout(16, (_gqa(), _gqa())), 1, "cpu")
    with pytest.raises(FormatMismatch, match="opaque:x/1"):
        DevicePool(Layout(16, (_gqa(order="opaque:x/1"),)), 1, "cpu")


def test_copies_run_in_order_and_touch_nothing_else():
    pool = DevicePool(Layout(2, (_gqa("bfloat16"),)), 5, "cpu")
    for block in range(5):
        pool.tensor[block] = block
    # 1 -> 2 -> 3: the second copy reads what the first wrote.
    pool.copy_blocks([BlockCopy(1, 2), BlockCopy(2, 3)])
    assert [int(block.float().unique().item()) for block in pool.tensor] == [0, 1, 1, 1, 4]
    with pytest.raises(CapacityError, match="dst=5"):
        pool.copy_blocks([BlockCopy(4, 0), BlockCopy(0, 5)])
    assert pool.tensor[0].eq(0).all()
