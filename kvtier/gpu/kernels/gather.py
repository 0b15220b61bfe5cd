# ruff: noqa: N803
# (kernels: constants are in capitals)
"""Blocks scattered over a pool to and from contiguous memory: one launch for any number of blocks, byte for byte.

A pool is seen as bytes [num_blocks, parts, part_bytes]: this project's blocks are one part, a host engine's may be one
per layer and plane. The contiguous side is device memory or pinned host memory, which a kernel reaches through the bus.
"""

from typing import no_type_check

import torch
from torch import Tensor

from kvtier.errors import CapacityError, FormatMismatch
from kvtier.gpu.kernels.launch import Launch, ceil_div, kernel, tl

__all__ = ["copy_launch", "gather_blocks", "scatter_blocks"]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_CHUNK_BYTES = 16 << 10


@kernel
@no_type_check
def _copy(pool, ids, packed, words, block, part, CHUNK: tl.constexpr, GATHER: tl.constexpr):
    at, place = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    inside = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    mask = inside < words
    scattered = pool + tl.load(ids + at).to(tl.int64) * block + place * part + inside
    dense = packed + (at * tl.num_programs(1) + place) * words + inside
    if GATHER:
        tl.store(dense, tl.load(scattered, mask=mask), mask=mask)
    else:
        tl.store(scattered, tl.load(dense, mask=mask), mask=mask)


def gather_blocks(pool: Tensor, ids: Tensor, packed: Tensor) -> None:
    """Copy blocks `ids` of a pool into `packed`, in that order, on the current stream.

    Args:
        pool: uint8 [num_blocks, parts, part_bytes], any strides but over bytes.
        ids: int32 [n] on the pool's device. They are not checked: that would wait for the device.
        packed: uint8 [n, parts, part_bytes], contiguous; on the pool's device, or pinned host memory.

    Raises:
        CapacityError: `packed` is not of n blocks.
        FormatMismatch: tensors that do not belong together. Nothing was copied.
    """
    copy_launch(pool, ids, packed, gather=True).run()


def scatter_blocks(packed: Tensor, ids: Tensor, pool: Tensor) -> None:
    """Copy `packed` into blocks `ids` of a pool; arguments and errors as those of `gather_blocks`. `ids` differ."""
    copy_launch(pool, ids, packed, gather=False).run()


def copy_launch(pool: Tensor, ids: Tensor, packed: Tensor, *, gather: bool) -> Launch:
    """The kernel that `gather_blocks` and `scatter_blocks` start."""
    _check(pool, ids, packed)
    count, (_, parts, nbytes) = len(ids), pool.shape
    width = _word_bytes(pool, packed)
    words = nbytes // width
    chunk = min(_CHUNK_BYTES // width, 1 << (max(words, 1) - 1).bit_length())
    return Launch(
        _copy,
        (count, parts, ceil_div(words, chunk)),
        {
            "pool": pool.view(_WORDS[width]),
            "ids": ids,
            "packed": packed.view(_WORDS[width]),
            "words": words,
            "block": pool.stride(0) // width,
            "part": pool.stride(1) // width,
        },
        {"CHUNK": chunk, "GATHER": gather},
    )


def _word_bytes(pool: Tensor, packed: Tensor) -> int:
    """The widest word that divides every length and offset."""
    offsets = (pool.shape[2], *pool.stride()[:2], pool.storage_offset(), packed.storage_offset())
    return next(width for width in _WORDS if all(offset % width == 0 for offset in offsets))


def _check(pool: Tensor, ids: Tensor, packed: Tensor) -> None:
    if pool.dtype != torch.uint8 or pool.dim() != 3 or pool.stride(2) != 1 or ids.dtype != torch.int32:
        raise FormatMismatch(
            f"pool {list(pool.shape)} of {pool.dtype}, ids of {ids.dtype}: expected uint8 [num_blocks, parts, "
            f"part_bytes] with adjacent bytes, and int32"
        )
    if packed.dtype != torch.uint8 or not packed.is_contiguous() or packed.shape[1:] != pool.shape[1:]:
        raise FormatMismatch(
            f"packed blocks {list(packed.shape)} of {packed.dtype}: expected contiguous uint8 [n, "
            f"{pool.shape[1]}, {pool.shape[2]}]"
        )
    if packed.shape[0] != len(ids):
        raise CapacityError(f"{packed.shape[0]} packed blocks for {len(ids)} ids: expected one each")
    if ids.device != pool.device or not (packed.device == pool.device or packed.is_pinned()):
        raise FormatMismatch(
            f"pool on {pool.device}, ids on {ids.device}, packed blocks on {packed.device}: expected all on the pool's "
            f"device, or packed blocks in pinned memory"
        )
