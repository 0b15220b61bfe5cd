"""Pages: where the bytes of a device pool's blocks lie, whoever allocated it.

    block b = [page 0 of b | page 1 of b | ...]        page i of b: base[i] + b * stride[i], nbytes[i] long

A pool of our own is block-major: one page. A host engine often keeps a tensor per layer: a page per layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.errors import FormatMismatch
from kvtier.gpu.streams.runs import Runs

__all__ = ["Pages"]


@dataclass(frozen=True, slots=True)
class Pages:
    """The memory of `num_blocks` blocks, each of one or more pages. Whoever made the tensors keeps them.

    base, stride, nbytes: int64 [pages]. inside: int64 [pages], where a page begins in the block. tensors: as given.
    sizes: bytes of each page before neighbours were joined.
    """

    tensors: tuple[Tensor, ...]
    num_blocks: int
    base: NDArray[np.int64]
    stride: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    inside: NDArray[np.int64]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        """Pages in the order of their tensors. What is there twice counts once; neighbours in memory are one page.

        Args:
            tensors: int8 or uint8 [num_blocks, bytes of a page] of one device, contiguous within a row.

        Raises:
            FormatMismatch: a tensor of another kind, or they do not agree.
        """
        if not tensors:
            raise FormatMismatch("a device pool of no tensors: expected at least one")
        for tensor in tensors:
            bad = tensor.dtype not in (torch.uint8, torch.int8) or tensor.ndim != 2 or tensor.stride(1) != 1
            if bad or tensor.shape[0] != tensors[0].shape[0] or tensor.device != tensors[0].device:
                raise FormatMismatch(
                    f"pool {list(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}: "
                    "expected contiguous uint8 [num_blocks, block_bytes] of one device and number of blocks; "
                    "give DevicePool.as_bytes()"
                )
        found = dict.fromkeys((one.data_ptr(), one.stride(0), one.shape[1]) for one in tensors)
        pages: list[tuple[int, int, int]] = []
        for base, stride, nbytes in found:
            last = pages[-1] if pages else (0, 0, 0)
            if last[1] == stride and last[0] + last[2] == base and last[2] + nbytes <= stride:
                pages[-1] = (last[0], stride, last[2] + nbytes)
            else:
                pages.append((base, stride, nbytes))
        bases, strides, lengths = (np.array(column, np.int64) for column in zip(*pages, strict=True))
        inside, sizes = np.cumsum(lengths) - lengths, tuple(nbytes for _, _, nbytes in found)
        return cls(tuple(tensors), tensors[0].shape[0], bases, strides, lengths, inside, sizes)

    def __len__(self) -> int:
        """Pages of a block."""
        return len(self.base)

    @property
    def block_bytes(self) -> int:
        """Of all pages of a block."""
        return int(self.nbytes.sum())

    @property
    def device(self) -> torch.device:
        """Where the memory lies."""
        return self.tensors[0].device

    def runs(self, block_ids: Sequence[int], hosts: Sequence[int]) -> Runs:
        """Copies between these blocks, page by page, and as many host addresses, where they are in one piece."""
        blocks, memory = np.asarray(block_ids, np.int64)[:, None], np.asarray(hosts, np.int64)[:, None]
        device = (self.base + blocks * self.stride).ravel()
        return Runs(device, (memory + self.inside).ravel(), np.tile(self.nbytes, len(hosts)))
