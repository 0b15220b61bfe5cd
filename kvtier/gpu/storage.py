"""DevicePool: the tensor that holds a device's KV blocks.

gqa    [num_blocks, layers, 2 (K, V), kv_heads, block_size, head_dim]
mla    [num_blocks, layers, block_size, head_dim (latent) + rope_dim]

Block-major: a block is one contiguous run of bytes, so that it moves in one copy. Where all layers have a sliding
window there is one block more than the books know of, the last: all zeros, it stands for whatever is behind the window.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Self

import numpy as np
import torch
from torch import Tensor

from kvtier.errors import CapacityError, FormatMismatch
from kvtier.gpu.pool import BlockPool
from kvtier.gpu.table import BlockCopy
from kvtier.hooks import NO_BLOCK, StepSpan
from kvtier.layout import LayerGroup, Layout

__all__ = ["DevicePool"]

_ORDER = "lphtd"


class DevicePool:
    """KV memory of one device, zeroed, and the books of its blocks.

    Attributes:
        tensor: the blocks, in the layout's dtype; shapes above.
        blocks: who holds which of them.

    Args:
        layout: one layer group, in the order `lphtd`.
        num_blocks: at least 1.
        device: where the memory lies.

    Raises:
        CapacityError: no room for one block, or the device has less memory than that.
        FormatMismatch: a layout that is not uniform or not addressable by token.
    """

    def __init__(self, layout: Layout, num_blocks: int, device: torch.device | str) -> None:
        self.group = _uniform_group(layout)
        self.layout = layout
        self.blocks = BlockPool(num_blocks, layout.block_size, self.group.window)
        shape = (num_blocks + _null_blocks(layout), *self.group.block_shape(layout.block_size))
        self.tensor = _zeros(shape, getattr(torch, self.group.dtype), torch.device(device))

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
        blocks = memory_bytes // block_bytes - _null_blocks(layout)
        if blocks < 1:
            raise CapacityError(
                f"{memory_bytes} bytes of device memory: one block of {layout.block_size} tokens takes {block_bytes}; "
                f"give the pool at least {block_bytes * (1 + _null_blocks(layout))}"
            )
        return blocks

    @property
    def device(self) -> torch.device:
        """Where the memory lies."""
        return self.tensor.device

    def with_rows(self, spans: Sequence[StepSpan]) -> Sequence[StepSpan]:
        """The spans with block tables that attention can read: without `NO_BLOCK`."""
        if self.blocks.window is None:
            return spans
        null = len(self.tensor) - 1
        gone = [span.block_ids.count(NO_BLOCK) for span in spans]
        tables = [(null,) * count + span.block_ids[count:] for span, count in zip(spans, gone, strict=True)]
        return [span._replace(block_ids=table) for span, table in zip(spans, tables, strict=True)]

    def as_bytes(self) -> Tensor:
        """The same memory as uint8 [num_blocks, block_bytes]."""
        return self.tensor.flatten(1).view(torch.uint8)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, one after the other: a copy may read what an earlier one wrote.

        Raises:
            CapacityError: an id is not of this pool. Nothing was copied.
        """
        last = self.blocks.num_blocks - 1
        for copy in copies:
            if not (0 <= copy.src <= last and 0 <= copy.dst <= last):
                raise CapacityError(f"{copy}: expected block ids 0..{last}; ids come from this pool only")
        for src, dst in copies:
            self.tensor[dst].copy_(self.tensor[src])


def _null_blocks(layout: Layout) -> int:
    return int(layout.groups[0].window is not None)


def _uniform_group(layout: Layout) -> LayerGroup:
    if len(layout.groups) != 1:
        raise FormatMismatch(
            f"layout with {len(layout.groups)} layer groups: a device pool takes one; use a model with uniform layers"
        )
    group = layout.groups[0]
    if group.order != _ORDER:
        raise FormatMismatch(f"axis order {group.order!r}: a device pool is {_ORDER!r}; convert the blocks")
    return group


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    nbytes = prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(np.frombuffer(_anonymous(nbytes), np.uint8)).view(dtype).view(shape)
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:
        raise CapacityError(
            f"{nbytes} bytes for {shape[0]} blocks on {device}: {error}; make the device pool smaller"
        ) from error


def _anonymous(nbytes: int) -> mmap.mmap:
    # The kernel zeroes pages as they are first touched, so a large pool costs nothing at start. Zeros, because
    # whatever is left in memory, read as floats, may be NaN, which no attention mask takes away.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
