"""Between the layers' tensors and the bytes of blocks.

K and V   layer tensors [rows, heads, slots, width] <-> block [layers, 2, heads, tokens, width]
latents   layer tensors [rows, 1, slots, width]     <-> block [layers, tokens, latent width + rope width]
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.layout import Layout
from kvtier_transformers.shapes import CachedShape

__all__ = ["PrefixTensors", "raw_blocks"]


class PrefixTensors:
    """Memory for a prefix of all layers, in which block bytes are put in place with one copy.

    Args:
        shape: of the layers.
        layout: of the blocks.
        padding: slots of padding at the beginning of each row.
        slots: of the prefix.
    """

    def __init__(self, shape: CachedShape, layout: Layout, padding: Sequence[int], slots: int) -> None:
        layers, rows = len(shape.devices), len(padding)
        self._shape = shape
        self._block = layout.groups[0].block_shape(layout.block_size)
        self._keys, self._values = (
            torch.empty(layers, rows, shape.heads, slots, width, dtype=shape.dtype, device="cpu")
            for width in (shape.key_width, shape.value_width)
        )
        # Padding is masked, and what is masked must be finite.
        for row, count in enumerate(padding):
            self._keys[:, row, :, :count].zero_()
            self._values[:, row, :, :count].zero_()

    def write(self, row: int, slot: int, raw: memoryview, tokens: int) -> None:
        """Put the first `tokens` tokens of a raw block into a row, from a slot on."""
        *outer, width = self._block
        block = np.frombuffer(raw, np.uint8).reshape(*outer, -1)
        if self._shape.is_latent:
            split = block.shape[-1] // width * self._shape.key_width
            keys, values = block[:, None, :tokens, :split], block[:, None, :tokens, split:]
        else:
            keys, values = block[:, 0, :, :tokens], block[:, 1, :, :tokens]
        for whole, part in ((self._keys, keys), (self._values, values)):
            # Bytes, since numpy knows no bfloat16; its copies release the GIL.
            np.copyto(_bytes(whole)[:, row, :, slot : slot + tokens], part)

    def layers(self, slots: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer on its device, [rows, heads, slots, width], cut to so many slots."""
        return [
            (keys[:, :, :slots].to(device), values[:, :, :slots].to(device))
            for keys, values, device in zip(self._keys, self._values, self._shape.devices, strict=True)
        ]


def raw_blocks(
    shape: CachedShape, layout: Layout, layers: Sequence[tuple[Tensor, Tensor]], first: int, blocks: int
) -> list[memoryview]:
    """Copy blocks out of one row.

    Args:
        shape: of the layers.
        layout: of the blocks.
        layers: keys and values of each layer, [heads, tokens, width] each.
        first: of the blocks, counted from the first token.
        blocks: how many, one after the other.

    Returns:
        Raw bytes of each.
    """
    tokens = layout.block_size
    raw = torch.empty(blocks, *layout.groups[0].block_shape(tokens), dtype=shape.dtype, device="cpu")
    cut = slice(first * tokens, (first + blocks) * tokens)
    for at, (keys, values) in enumerate(layers):
        own, other = (_by_block(states[:, cut].detach(), tokens) for states in (keys, values))
        if shape.is_latent:
            raw[:, at, :, : shape.key_width].copy_(own[:, 0])
            raw[:, at, :, shape.key_width :].copy_(other[:, 0])
        else:
            raw[:, at, 0].copy_(own)
            raw[:, at, 1].copy_(other)
    return [block.data for block in _bytes(raw).reshape(blocks, -1)]


def _by_block(states: Tensor, tokens: int) -> Tensor:
    """[heads, blocks * tokens, width] -> [blocks, heads, tokens, width]."""
    heads, _, width = states.shape
    return states.reshape(heads, -1, tokens, width).transpose(0, 1)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return found
