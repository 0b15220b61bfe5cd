"""What the compiled attention needs to know of a step: single tokens, their contexts, and the pieces that those are cut
into.

A row is one new token of a sequence that has few of them in this step, with all tokens up to itself as its context.
Contexts are cut every `piece_tokens` tokens, whatever else is in the batch: pieces go to threads as these are free,
and a sequence gets the same result in any company.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import CapacityError
from kvtier.gpu.batches import AttentionSpan, Geometry

__all__ = ["AttentionRows", "attention_rows"]

_Longs = NDArray[np.int64]
_Ints = NDArray[np.int32]


class AttentionRows(NamedTuple):
    """A step for `kvtier.native.attention.Kernels`: R rows in N pieces, T new tokens.

    Args:
        slots: int64 [T], of every new token: block * block_size + position inside it.
        rows: int64 [R], each row's place in the flat batch.
        lengths: int64 [R], tokens of its context, itself included.
        tables: int64 [R], where its sequence's blocks begin in `blocks`.
        blocks: int32, block tables one after the other.
        piece_rows: int32 [N], the row that a piece belongs to.
        piece_starts: int32 [N], first token of a piece.
        first_pieces: int64 [R + 1], number of the row's first piece; ends with N.
    """

    slots: _Longs
    rows: _Longs
    lengths: _Longs
    tables: _Longs
    blocks: _Ints
    piece_rows: _Ints
    piece_starts: _Ints
    first_pieces: _Longs


def attention_rows(
    spans: Sequence[AttentionSpan], geometry: Geometry, few_tokens: int, piece_tokens: int
) -> AttentionRows:
    """Lay out a step whose flat batch has the spans' new tokens, one span after the other.

    Args:
        spans: of all sequences; those with more than `few_tokens` new tokens are only written.
        geometry: of the pool.
        few_tokens: most new tokens of a sequence that become rows.
        piece_tokens: where contexts are cut.

    Raises:
        CapacityError: a span without new tokens, or whose blocks do not hold them, or are not of the pool.
    """
    count, size = len(spans), geometry.block_size
    starts = np.fromiter((span.start for span in spans), np.int64, count)
    stops = np.fromiter((span.stop for span in spans), np.int64, count)
    held = np.fromiter((len(span.block_ids) for span in spans), np.int64, count)
    blocks = np.fromiter(chain.from_iterable(span.block_ids for span in spans), np.int32, held.sum())
    _check(starts, stops, held, blocks, geometry)
    tables, new = np.cumsum(held) - held, stops - starts
    # Every new token: its span, its position in the sequence.
    of_span = np.repeat(np.arange(count), new)
    positions = np.arange(len(of_span)) + (stops - np.cumsum(new))[of_span]
    slots = blocks[tables[of_span] + positions // size].astype(np.int64) * size + positions % size
    rows = np.flatnonzero((new <= few_tokens)[of_span])
    lengths = positions[rows] + 1
    pieces = -(-lengths // piece_tokens)
    first_pieces = np.concatenate((np.zeros(1, np.int64), np.cumsum(pieces)))
    piece_rows = np.repeat(np.arange(len(rows), dtype=np.int32), pieces)
    piece_starts = (np.arange(len(piece_rows)) - first_pieces[piece_rows]) * piece_tokens
    return AttentionRows(
        slots, rows, lengths, tables[of_span[rows]], blocks, piece_rows, piece_starts.astype(np.int32), first_pieces
    )


def _check(starts: _Longs, stops: _Longs, held: _Longs, blocks: _Ints, geometry: Geometry) -> None:
    room = held * geometry.block_size
    wrong = np.flatnonzero((starts < 0) | (starts >= stops) | (stops > room))
    if len(wrong):
        at = wrong[0]
        raise CapacityError(
            f"span of tokens [{starts[at]}, {stops[at]}) with room for {room[at]}: expected 0 <= start < stop <= room; "
            f"extend its block table first"
        )
    if len(blocks) and (blocks.min() < 0 or blocks.max() >= geometry.num_blocks):
        raise CapacityError(f"block ids {blocks.min()}..{blocks.max()}: the pool has 0..{geometry.num_blocks - 1}")
