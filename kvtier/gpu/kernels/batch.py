"""A step's ragged batch as int32 tensors on the device: planned once on the host, read in every layer.

rows      where a sequence's queries lie in the flat batch
tables    [B, N], block ids in token order; what lies beyond a sequence's tokens is never followed
lengths   tokens of a sequence, the new ones included
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.errors import CapacityError
from kvtier.gpu.batches import AttentionSpan

__all__ = ["MOST_ROWS", "DecodeBatch", "PrefillBatch", "tile_shape"]

MOST_ROWS = 128
"""Query rows of a tile."""

_TABLE_STEP = 16


class DecodeBatch(NamedTuple):
    """Sequences with one new token each.

    Args:
        rows: int32 or int64 [B], each sequence's row in the flat batch.
        tables: int32 [B, N].
        lengths: int32 [B].
        longest: the largest of `lengths`.
    """

    rows: Tensor
    tables: Tensor
    lengths: Tensor
    longest: int

    @classmethod
    def make(cls, spans: Sequence[AttentionSpan], rows: Sequence[int], device: torch.device) -> Self:
        """Plan spans of one new token each; `rows` says where they lie."""
        lengths = np.array([span.stop for span in spans], np.int32)
        tables = _tables([span.block_ids for span in spans])
        return cls(
            _tensor(np.array(rows, np.int32), device),
            _tensor(tables, device),
            _tensor(lengths, device),
            int(lengths.max(initial=0)),
        )


class PrefillBatch(NamedTuple):
    """Sequences with several new tokens each, cut into tiles of queries.

    Args:
        tiles: int32 [tiles, 2], a sequence and the first of its new tokens that the tile holds; longest work first.
        rows: int32 [B], the row of each sequence's first new token in the flat batch.
        all_rows: int64, the rows of all new tokens.
        counts: int32 [B], new tokens.
        tables: int32 [B, N].
        lengths: int32 [B].
        tile_rows: query rows of a tile: new tokens times query heads of a KV head, the rest padding.
    """

    tiles: Tensor
    rows: Tensor
    all_rows: Tensor
    counts: Tensor
    tables: Tensor
    lengths: Tensor
    tile_rows: int

    @classmethod
    def make(
        cls,
        spans: Sequence[AttentionSpan],
        rows: Sequence[int],
        queries_per_head: int,
        device: torch.device,
        most_rows: int = MOST_ROWS,
    ) -> Self:
        """Plan spans for a model with so many query heads per KV head, in tiles of at most so many rows.

        Raises:
            CapacityError: more query heads per KV head than a tile may ever have rows.
        """
        longest = max((span.stop - span.start for span in spans), default=1)
        tile_rows, tile_tokens = tile_shape(longest, queries_per_head, most_rows)
        tiles = [
            (at, first, span.start + min(first + tile_tokens, span.stop - span.start))
            for at, span in enumerate(spans)
            for first in range(0, span.stop - span.start, tile_tokens)
        ]
        tiles.sort(key=lambda tile: -tile[2])
        counts = np.array([span.stop - span.start for span in spans], np.int32)
        all_rows = [np.arange(row, row + count) for row, count in zip(rows, counts, strict=True)]
        return cls(
            _tensor(np.array(tiles, np.int32).reshape(-1, 3)[:, :2], device),
            _tensor(np.array(rows, np.int32), device),
            _tensor(np.concatenate(all_rows) if all_rows else np.empty(0, np.int64), device),
            _tensor(counts, device),
            _tensor(_tables([span.block_ids for span in spans]), device),
            _tensor(np.array([span.stop for span in spans], np.int32), device),
            tile_rows,
        )


def tile_shape(longest: int, queries_per_head: int, most_rows: int = MOST_ROWS) -> tuple[int, int]:
    """Rows of a tile, and how many new tokens they hold, if the longest sequence has so many.

    Never more rows than `most_rows`, a power of two, but where one token has more.

    Raises:
        CapacityError: more query heads per KV head than a tile may ever have rows.
    """
    if queries_per_head > MOST_ROWS:
        raise CapacityError(f"{queries_per_head} query heads per KV head: expected at most {MOST_ROWS}")
    one, all_of_them = (1 << (tokens * queries_per_head - 1).bit_length() for tokens in (1, longest))
    rows = max(one, min(max(all_of_them, 16), most_rows))
    return rows, rows // queries_per_head


def _tables(tables: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    lengths = np.fromiter((len(table) for table in tables), np.int64, len(tables))
    # One width for many steps: kernels are compiled anew for strides that are not multiples of 16.
    width = -(-lengths.max(initial=1) // _TABLE_STEP) * _TABLE_STEP
    held = np.arange(width) < lengths[:, None]
    padded = np.zeros(held.shape, np.int32)
    padded[held] = np.fromiter(chain.from_iterable(tables), np.int32, lengths.sum())
    return padded


def _tensor(values: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
