"""Where a layer's K and V lie and how they are coded: what every attention kernel is given.

A kernel addresses K and V as rows [num_blocks, kv_heads, block_size], each row the elements of one token and head, by
a base and three strides. A pool of any layout is a view away, as long as the elements of a row are adjacent:

    this pool     [num_blocks, layers, 2, kv_heads, block_size, head_dim]     pool[:, layer, plane]
    token-major   [num_blocks, block_size, kv_heads, head_dim]                cache.transpose(1, 2)
"""

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from kvtier.errors import FormatMismatch

__all__ = ["Code", "LayerKV", "Rows", "raw_layer", "raw_rows"]

_RAW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Code(enum.IntEnum):
    """How rows are coded; arithmetic and byte order of codes are those of `kvtier.native.rows.Codec`.

    RAW      the elements
    INT8     int8, x = scale * code
    FP8      float8_e4m3fn, x = scale * code
    INT4     nibbles, x = low + scale * code; element i in the low half of byte i, i + width / 2 in its high half
    """

    RAW = 0
    INT8 = 1
    FP8 = 2
    INT4 = 3

    @property
    def metas(self) -> int:
        """float16 values per row: a scale, and for INT4 a low."""
        return (0, 1, 1, 2)[self]

    def row_bytes(self, width: int) -> int:
        """Bytes of a coded row's codes, without its scale."""
        return width // 2 if self is Code.INT4 else width


class Rows(NamedTuple):
    """The K or the V of one layer.

    Args:
        values: [num_blocks, kv_heads, block_size, width] in a float, or, coded, uint8 [..., code bytes]; any strides,
            the last one 1.
        width: elements of a row.
        code: how they are coded.
        meta: float16 [num_blocks, kv_heads, metas, block_size], the last two axes contiguous; None for raw rows.
        to_rotated: float32 [width, width]; what is stored is x @ to_rotated. None: rows are not rotated.
        from_rotated: its inverse.
    """

    values: Tensor
    width: int
    code: Code = Code.RAW
    meta: Tensor | None = None
    to_rotated: Tensor | None = None
    from_rotated: Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.values.shape[0]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.values.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.values.shape[2]

    @property
    def pad(self) -> int:
        """Tile width that holds a row of codes."""
        return max(16, 1 << (self.values.shape[3] - 1).bit_length())

    def strides(self, name: str) -> dict[str, int]:
        """Arguments that say where rows and their scales lie, each called `name` and an axis."""
        block, head, token, _ = self.values.stride()
        meta_block, meta_head = (0, 0) if self.meta is None else self.meta.stride()[:2]
        return {
            f"{name}_block": block,
            f"{name}_head": head,
            f"{name}_token": token,
            f"{name}_meta_block": meta_block,
            f"{name}_meta_head": meta_head,
        }


class LayerKV(NamedTuple):
    """K and V of one layer; same blocks, heads and block size, codes may differ."""

    key: Rows
    value: Rows

    @property
    def key_dot_dtype(self) -> torch.dtype | None:
        """The dtype that queries must have, None if any float will do."""
        return self.key.values.dtype if self.key.code is Code.RAW else None


def raw_rows(values: Tensor) -> Rows:
    """Rows that are not coded.

    Args:
        values: [num_blocks, kv_heads, block_size, width], a float of 16 or 32 bits.

    Raises:
        FormatMismatch: other axes or dtype, or rows that are not contiguous.
    """
    if values.dim() != 4 or values.dtype not in _RAW_DTYPES or values.stride(3) != 1:
        raise FormatMismatch(
            f"K or V of shape {list(values.shape)}, strides {list(values.stride())}, {values.dtype}: expected "
            f"[num_blocks, kv_heads, block_size, width] of a float of 16 or 32 bits with stride 1 over width"
        )
    return Rows(values, values.shape[3])


def raw_layer(key: Tensor, value: Tensor) -> LayerKV:
    """One layer of a raw pool.

    Args:
        key: [num_blocks, kv_heads, block_size, width], a float of 16 or 32 bits, any strides but over width.
        value: like key.

    Raises:
        FormatMismatch: not that, or K and V of different shapes or dtypes.
    """
    if key.shape != value.shape or key.dtype != value.dtype or key.device != value.device:
        raise FormatMismatch(
            f"K {list(key.shape)} {key.dtype} on {key.device} and V {list(value.shape)} {value.dtype} on "
            f"{value.device}: expected the same of both"
        )
    return LayerKV(raw_rows(key), raw_rows(value))
