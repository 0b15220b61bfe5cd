"""DevicePool: the tensor that holds a device's KV blocks.

gqa    [num_blocks, layers, 2 (K, V), kv_heads, block_size, head_dim]
mla    [num_blocks, layers, block_size, head_dim (latent) + rope_dim]

Block-major: a block is one contiguous run of bytes, so that it moves in one copy. Where layers have a sliding window
there is one block more than the books know of, the last: all zeros, it stands for whatever is behind the window. Layers
with a window and layers without one, in one model, have a tensor each.

Of a coded pool (`kv_format`) the tensor is uint8 [num_blocks, block_bytes], as `kernels.quantized_pool` describes it.
"""

import mmap
from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from kvtier.errors import CapacityError, FormatMismatch
from kvtier.gpu.anonymous import anonymous, touch
from kvtier.gpu.kernels.quantized_pool import CodedBlocks, coded_layout
from kvtier.gpu.kernels.rows import LayerKV, raw_layer
from kvtier.gpu.mixed import MixedBlockPool
from kvtier.gpu.pool import BlockPool
from kvtier.gpu.table import BlockCopy
from kvtier.gpu.windows import most_blocks
from kvtier.hooks import NO_BLOCK, StepSpan
from kvtier.layout import LayerGroup, Layout

__all__ = [
    "RAW",
    "DevicePool",
    "GroupMemory",
    "MixedDevicePool",
    "PoolSize",
    "make_pool",
    "size_pool",
    "stored_layout",
    "windowed_blocks",
]

RAW = "raw"
"""The `kv_format` of a pool whose blocks are not coded."""

_ORDER = "lphtd"
# What is touched ahead: a fraction of a second's work. A large pool that is never full takes no more memory than that.
_TOUCHED_BYTES = 512 << 20


class GroupMemory:
    """KV memory of one layer group, zeroed.

    Attributes:
        group: whose it is.
        layout: of that group alone, before it is coded.
        coded: where coded rows lie; None: blocks are raw.
        tensor: the blocks, in the group's dtype; shapes above.

    Args:
        group: addressable by token.
        block_size: tokens per block.
        num_blocks: at least 1.
        device: where the memory lies.
        kv_format: how blocks are coded: `raw`, or a key of `CODINGS`.

    Raises:
        CapacityError: the device has less memory than that.
        FormatMismatch: a group that is not addressable by token, or cannot be coded so.
    """

    def __init__(
        self,
        group: LayerGroup,
        block_size: int,
        num_blocks: int,
        device: torch.device | str,
        kv_format: str = RAW,
    ) -> None:
        if group.order != _ORDER:
            raise FormatMismatch(f"axis order {group.order!r}: a device pool is {_ORDER!r}; convert the blocks")
        self.group = group
        self.layout = Layout(block_size, (group,))
        self.coded = None if kv_format == RAW else CodedBlocks(self.layout, kv_format)
        block = group.block_shape(block_size) if self.coded is None else (self.coded.block_bytes,)
        dtype = getattr(torch, group.dtype) if self.coded is None else torch.uint8
        self._mapping: mmap.mmap | None = None
        self.tensor = self._zeros((num_blocks + _null_blocks(group), *block), dtype, torch.device(device))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        try:
            if device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            self._mapping = anonymous(nbytes)
        except (OSError, OverflowError, torch.OutOfMemoryError) as error:
            raise CapacityError(
                f"{nbytes} bytes for {shape[0]} blocks on {device}: {error}; make the device pool smaller"
            ) from error
        return torch.from_numpy(np.frombuffer(self._mapping, np.uint8)).view(dtype).view(shape)

    def touch(self) -> None:
        """Blocks are about to be loaded: of host memory the first pages are made in the background, not in the load."""
        if self._mapping is not None:
            touch(self._mapping, _TOUCHED_BYTES)

    @property
    def device(self) -> torch.device:
        """Where the memory lies."""
        return self.tensor.device

    def row(self, block_ids: tuple[int, ...]) -> tuple[int, ...]:
        """A block table that attention can read: without `NO_BLOCK`."""
        gone = block_ids.count(NO_BLOCK)
        return (len(self.tensor) - 1,) * gone + block_ids[gone:]

    def layer(self, layer: int) -> LayerKV:
        """K and V of one layer of a GQA group, by its position in the pool, for the kernels."""
        if self.coded is not None:
            return self.coded.layer(self.tensor, layer)
        plane = self.tensor[:, layer]
        return raw_layer(plane[:, 0], plane[:, 1])

    def as_bytes(self) -> Tensor:
        """The same memory as uint8 [num_blocks, block_bytes]."""
        return self.tensor.flatten(1).view(torch.uint8)


class DevicePool(GroupMemory):
    """KV memory of one device, zeroed, and the books of its blocks.

    Attributes:
        blocks: who holds which of them.
        windowed: memory of the windowed layers, where only some layers have a window.

    Args:
        layout: one layer group, in the order `lphtd`.
        num_blocks: at least 1.
        device: where the memory lies.
        kv_format: see `GroupMemory`.

    Raises:
        CapacityError: no room for one block, or the device has less memory than that.
        FormatMismatch: a layout that is not uniform or not addressable by token, or cannot be coded so.
    """

    def __init__(self, layout: Layout, num_blocks: int, device: torch.device | str, kv_format: str = RAW) -> None:
        group = _uniform_group(layout)
        self.blocks = BlockPool(num_blocks, layout.block_size, group.window)
        self.windowed: GroupMemory | None = None
        super().__init__(group, layout.block_size, num_blocks, device, kv_format)

    @classmethod
    def fit(cls, layout: Layout, memory_bytes: int, device: torch.device | str) -> Self:
        """The largest pool in `memory_bytes`. Raises what the constructor does."""
        return cls(layout, cls.blocks_in(layout, memory_bytes), device)

    @staticmethod
    def blocks_in(layout: Layout, memory_bytes: int) -> int:
        """How many blocks `fit` would make, without making them.

        Raises:
            CapacityError: not one.
        """
        block_bytes = layout.block_bytes()
        null = _null_blocks(_uniform_group(layout))
        blocks = memory_bytes // block_bytes - null
        if blocks < 1:
            raise CapacityError(
                f"{memory_bytes} bytes of device memory: one block of {layout.block_size} tokens takes {block_bytes}; "
                f"give the pool at least {block_bytes * (1 + null)}"
            )
        return blocks

    @property
    def memories(self) -> tuple[GroupMemory, ...]:
        """Of all layer groups, in the layout's order."""
        return (self,)

    def with_rows(self, spans: Sequence[StepSpan]) -> Sequence[StepSpan]:
        """The spans with block tables that attention can read: without `NO_BLOCK`."""
        if self.blocks.window is None:
            return spans
        return [span._replace(block_ids=self.row(span.block_ids)) for span in spans]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, one after the other: a copy may read what an earlier one wrote.

        Raises:
            CapacityError: an id is not of this pool. Nothing was copied.
        """
        last = self.blocks.num_blocks - 1
        for copy in copies:
            if not (0 <= copy.src <= last and 0 <= copy.dst <= last):
                raise CapacityError(f"{copy}: expected block ids 0..{last}; ids come from this pool only")
        for copy in copies:
            self.tensor[copy.dst].copy_(self.tensor[copy.src])


class MixedDevicePool(DevicePool):
    """KV memory of a model that has layers without a window and layers with one, and the books of its blocks.

    What it is as a `DevicePool` is the memory of the layers without a window.

    Args:
        layout: two layer groups, the first without a window, the second with one.
        size: of both.
        device: where the memory lies.
        kv_format: see `GroupMemory`.

    Raises:
        CapacityError: no room for one block, less windowed ones than a sequence takes, or the device has less memory
            than that.
        FormatMismatch: another layout, or one that cannot be coded so.
    """

    def __init__(self, layout: Layout, size: "PoolSize", device: torch.device | str, kv_format: str = RAW) -> None:
        group, windowed = _mixed_groups(layout)
        block_size, window = layout.block_size, windowed.window or 0
        super().__init__(Layout(block_size, (group,)), size.blocks, device, kv_format)
        self.blocks: MixedBlockPool = MixedBlockPool(size.blocks, size.windowed, block_size, window)
        self.windowed: GroupMemory = GroupMemory(windowed, block_size, size.windowed, device, kv_format)

    @property
    def memories(self) -> tuple[GroupMemory, ...]:
        """See `DevicePool.memories`."""
        return (self, self.windowed)

    def with_rows(self, spans: Sequence[StepSpan]) -> Sequence[StepSpan]:
        """See `DevicePool.with_rows`."""
        return [span._replace(windowed_ids=self.windowed.row(span.windowed_ids)) for span in spans]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """See `DevicePool.copy_blocks`."""
        super().copy_blocks(copies)
        tensor = self.windowed.tensor
        for copy in copies:
            tensor[copy.windowed_dst].copy_(tensor[copy.windowed_src])


class PoolSize(NamedTuple):
    """Blocks of a device pool; `windowed`: those of the windowed layers, where only some layers have a window."""

    blocks: int
    windowed: int = 0


def size_pool(layout: Layout, memory_bytes: int, running: int | None = None, new_tokens: int = 1) -> PoolSize:
    """The largest pool in `memory_bytes`.

    Where only some layers have a window, their part of the memory is room for `running` windows, and as much again for
    those of prefixes that may come back, but never for more blocks than the other layers have: so neither group keeps
    the other waiting, and there is no less room than if all layers kept all blocks.

    Args:
        layout: of the model.
        memory_bytes: of all groups.
        running: sequences at a time; None: as many blocks for each group.
        new_tokens: that all of them together write at a time.

    Raises:
        CapacityError: not one block.
    """
    if len(layout.groups) == 1:
        return PoolSize(DevicePool.blocks_in(layout, memory_bytes))
    _mixed_groups(layout)
    own, windowed = layout.block_bytes(0), layout.block_bytes(1)
    both = (memory_bytes - windowed) // (own + windowed)
    if both < 1:
        raise CapacityError(
            f"{memory_bytes} bytes of device memory: one block of {layout.block_size} tokens takes {own + windowed}; "
            f"give the pool at least {own + 2 * windowed}"
        )
    wanted = both if running is None else windowed_blocks(layout, running, new_tokens)
    if wanted >= both:
        return PoolSize(both, both)
    return PoolSize((memory_bytes - (wanted + 1) * windowed) // own, wanted)


def windowed_blocks(layout: Layout, running: int, new_tokens: int) -> int:
    """Blocks that windowed layers have good use for, see `size_pool`."""
    size, window = layout.block_size, layout.groups[1].window or 0
    each = most_blocks(window + 2 * size, 1, size, window)
    return 2 * (running * each - (-new_tokens // size))


def make_pool(layout: Layout, size: PoolSize, device: torch.device | str, kv_format: str = RAW) -> DevicePool:
    """The pool that a layout calls for. Raises what its constructor does."""
    if len(layout.groups) == 1:
        return DevicePool(layout, size.blocks, device, kv_format)
    return MixedDevicePool(layout, size, device, kv_format)


def stored_layout(layout: Layout, kv_format: str) -> Layout:
    """The layout of a pool's blocks as they are moved and stored.

    Args:
        layout: of raw blocks.
        kv_format: see `GroupMemory`.

    Raises:
        FormatMismatch: blocks of this layout cannot be coded so.
    """
    return layout if kv_format == RAW else coded_layout(layout, kv_format)


def _null_blocks(group: LayerGroup) -> int:
    return int(group.window is not None)


def _mixed_groups(layout: Layout) -> tuple[LayerGroup, LayerGroup]:
    windows = [group.window for group in layout.groups]
    if len(windows) != 2 or windows[0] is not None or windows[1] is None:
        raise FormatMismatch(
            f"layer groups with windows of {windows} tokens: expected one without a window (None), then one with one"
        )
    return layout.groups[0], layout.groups[1]


def _uniform_group(layout: Layout) -> LayerGroup:
    if len(layout.groups) != 1:
        raise FormatMismatch(
            f"layout with {len(layout.groups)} layer groups: a device pool takes one; use a model with uniform layers"
        )
    return layout.groups[0]
