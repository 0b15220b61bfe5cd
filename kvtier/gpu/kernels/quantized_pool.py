"""A pool of coded blocks: the device's counterpart of the row formats (`kvtier.formats`, docs/formats.md).

A block is one contiguous run of bytes,

    [layers, 2 (K, V), kv_heads] sections of    codes      block_size rows, `Code.row_bytes(head_dim)` each
                                                scales     float16 [metas, block_size]: scale, and for INT4 low

each part padded to 16 bytes. A row, its scale, its codes and its rotation are those of the format of the same name
(`int8`, `int8r`, `fp8`, `k8v4`, `int4r`), so a block moves between pool and format without being coded again; only the
scales stand apart from the codes here, because loads of 16 bytes want rows that begin at multiples of 16.

To whoever moves or stores such a block it is opaque bytes, under a layout of its own (`coded_layout`).
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvtier.errors import CapacityError, FormatMismatch
from kvtier.formats.rotation import rotation, span
from kvtier.gpu.kernels.rows import Code, LayerKV, Rows
from kvtier.layout import GroupKind, LayerGroup, Layout

__all__ = ["CODINGS", "CodedBlocks", "Coding", "QuantizedPool", "coded_layout"]

_ALIGN = 16
_VERSION = 1  # changes with whatever changes a coded block's bytes


class Coding(NamedTuple):
    """How a pool codes K and V."""

    key: Code
    value: Code
    rotate_key: bool = False
    rotate_value: bool = False


CODINGS = {
    "int8": Coding(Code.INT8, Code.INT8),
    "int8r": Coding(Code.INT8, Code.INT8, rotate_key=True),
    "fp8": Coding(Code.FP8, Code.FP8),
    "k8v4": Coding(Code.INT8, Code.INT4, rotate_value=True),
    "int4r": Coding(Code.INT4, Code.INT4, rotate_key=True, rotate_value=True),
}
"""The codings by the names of their formats."""


class CodedBlocks:
    """Where the rows of coded blocks lie in memory uint8 [num_blocks, block_bytes] that begins with its storage.

    Attributes:
        block_bytes: of one block.

    Args:
        layout: one GQA layer group with an even head_dim; its dtype and order do not matter.
        coding: a key of `CODINGS`.

    Raises:
        FormatMismatch: another layout, or no such coding.
    """

    def __init__(self, layout: Layout, coding: str) -> None:
        if coding not in CODINGS:
            raise FormatMismatch(f"coding {coding!r}: expected one of {', '.join(CODINGS)}")
        self.group = _coded_group(layout)
        self.block_size = layout.block_size
        self.coding = CODINGS[coding]
        self._codes = (self.coding.key, self.coding.value)
        self._sections = [_section(code, self.group.head_dim, self.block_size) for code in self._codes]
        self._layer_bytes = self.group.kv_heads * sum(whole for _, whole in self._sections)
        self.block_bytes = len(self.group.layers) * self._layer_bytes

    def layer(self, memory: Tensor, layer: int) -> LayerKV:
        """K and V of one layer, by its position in the blocks, for the kernels."""
        if not 0 <= layer < len(self.group.layers):
            raise FormatMismatch(f"layer {layer}: the pool has 0..{len(self.group.layers) - 1}")
        first = layer * self._layer_bytes
        key = self._rows(memory, first, 0, turned=self.coding.rotate_key)
        first += self.group.kv_heads * self._sections[0][1]
        return LayerKV(key, self._rows(memory, first, 1, turned=self.coding.rotate_value))

    def sections(self, memory: Tensor) -> Rows:
        """All rows as those of one head: [num_blocks * layers * 2 * kv_heads, 1, block_size], in that order.

        Raises:
            FormatMismatch: K and V are coded differently.
        """
        if self.coding.key is not self.coding.value:
            raise FormatMismatch(f"K coded as {self.coding.key.name}, V as {self.coding.value.name}: expected one code")
        whole = self._sections[0][1]
        return self._view(memory, 0, 0, (memory.numel() // whole, 1), whole)

    def _rows(self, memory: Tensor, first: int, plane: int, *, turned: bool) -> Rows:
        rows = self._view(memory, first, plane, (len(memory), self.group.kv_heads), self.block_bytes)
        if not turned:
            return rows
        to_rotated, from_rotated = _rotations(rows.width, memory.device)
        return rows._replace(to_rotated=to_rotated, from_rotated=from_rotated)

    def _view(self, memory: Tensor, first: int, plane: int, shape: tuple[int, int], stride: int) -> Rows:
        """Sections [blocks, heads], of which the first begins at byte `first` and blocks are `stride` bytes apart."""
        code, (codes, whole), width = self._codes[plane], self._sections[plane], self.group.head_dim
        row = code.row_bytes(width)
        values = memory.as_strided((*shape, self.block_size, row), (stride, whole, row, 1), first)
        meta = memory.view(torch.float16).as_strided(
            (*shape, code.metas, self.block_size),
            (stride // 2, whole // 2, self.block_size, 1),
            (first + codes) // 2,
        )
        return Rows(values, width, code, meta)


class QuantizedPool:
    """Coded KV memory of one device, zeroed.

    Attributes:
        memory: uint8 [num_blocks, block_bytes].

    Args:
        layout: see `CodedBlocks`.
        num_blocks: at least 1.
        coding: a key of `CODINGS`.
        device: where the memory lies.

    Raises:
        CapacityError: no room for one block.
        FormatMismatch: another layout, or no such coding.
    """

    def __init__(self, layout: Layout, num_blocks: int, coding: str, device: torch.device | str) -> None:
        self._blocks = CodedBlocks(layout, coding)
        if num_blocks < 1:
            raise CapacityError(f"{num_blocks} blocks: expected at least 1")
        self.block_bytes = self._blocks.block_bytes
        self.memory = torch.zeros(num_blocks, self.block_bytes, dtype=torch.uint8, device=device)

    def layer(self, layer: int) -> LayerKV:
        """K and V of one layer, by its position in the pool, for the kernels."""
        return self._blocks.layer(self.memory, layer)


def coded_layout(layout: Layout, coding: str) -> Layout:
    """The layout of blocks that are coded already: opaque bytes, in a namespace that raw blocks are not in.

    Args:
        layout: of the raw blocks; GQA layer groups with an even head_dim.
        coding: a key of `CODINGS`.

    Raises:
        FormatMismatch: another layout, no such coding, or a block size that does not divide a block's bytes.
    """
    groups = [_opaque(CodedBlocks(Layout(layout.block_size, (group,)), coding), coding) for group in layout.groups]
    return Layout(layout.block_size, tuple(groups), layout.shards)


def _opaque(blocks: CodedBlocks, coding: str) -> LayerGroup:
    rows = 2 * len(blocks.group.layers) * blocks.group.kv_heads * blocks.block_size
    if blocks.block_bytes % rows:
        raise FormatMismatch(f"blocks of {blocks.block_size} tokens: coded ones have a power of two")
    width, order = blocks.block_bytes // rows, f"opaque:kvtier-{coding}/{_VERSION}"
    return replace(blocks.group, head_dim=width, dtype="int8", order=order)


def _coded_group(layout: Layout) -> LayerGroup:
    if len(layout.groups) != 1 or layout.groups[0].kind is not GroupKind.GQA or layout.groups[0].head_dim % 2:
        raise FormatMismatch(f"{layout}: a coded pool takes one GQA layer group with an even head_dim")
    return layout.groups[0]


def _section(code: Code, width: int, block_size: int) -> tuple[int, int]:
    """Bytes of the codes, and of the codes and scales, of one head of one block, layer and plane."""
    codes = _aligned(code.row_bytes(width) * block_size)
    return codes, codes + _aligned(2 * code.metas * block_size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


@functools.cache
def _rotations(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rotation of a row format and its inverse, as float32 [width, width] to be multiplied from the right."""
    signs = rotation(width, span(width))
    block = torch.ones(1, 1)
    while len(block) < span(width):
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    hadamard = torch.kron(torch.eye(width // span(width)), block)
    forward, backward = (torch.tensor(one) for one in signs)
    return (forward[:, None] * hadamard).to(device), (hadamard * backward).to(device)
