"""Plans for paged attention: a step's ragged batch becomes index tensors, once for all layers.

The pool [num_blocks, layers, 2, kv_heads, block_size, head_dim] is read as rows of one block's tokens of one head,

    row(block, layer, plane, head) = ((block * layers + layer) * 2 + plane) * kv_heads + head

so that one gather of rows brings K and V of many sequences, contiguous. Indices are those of layer 0; another
layer's are the same ones counted from `layer * 2 * kv_heads` on. A pool of latents [num_blocks, layers, block_size,
latent + rope] is the same with one plane and one head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.errors import CapacityError

__all__ = ["AttentionPlan", "AttentionSpan", "DecodeBatch", "Geometry", "Prefill", "Tuning", "make_plan"]

_Ints = NDArray[np.int64]


class AttentionSpan(Protocol):
    """One sequence's share of a batch: tokens [0, start) are in its blocks, [start, stop) are new."""

    @property
    def block_ids(self) -> Sequence[int]:
        """The sequence's blocks, in order; room for at least `stop` tokens."""
        ...

    @property
    def start(self) -> int:
        """First new token."""
        ...

    @property
    def stop(self) -> int:
        """One past the last new token."""
        ...


class Geometry(NamedTuple):
    """What the index arithmetic needs to know of a pool."""

    num_blocks: int
    layers: int
    kv_heads: int
    block_size: int
    device: torch.device
    planes: int = 2

    @property
    def layer_rows(self) -> int:
        """Rows of one block and layer."""
        return self.planes * self.kv_heads

    @property
    def block_rows(self) -> int:
        """Rows of one block."""
        return self.layers * self.layer_rows


class Tuning(NamedTuple):
    """Where batches are cut.

    Args:
        query_rows: query tokens of a prefill that attend together. Fewer waste less above the causal diagonal.
        gather_tokens: KV tokens that a batch of decodes gathers at most (a single sequence may have more).
        padding_tokens: of them, those that are padding at most. A further batch costs as much as these.
    """

    query_rows: int
    gather_tokens: int
    padding_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences with one new token each, of similar lengths.

    Args:
        tokens: int64 [B], their rows in the flat batch.
        rows: int64 [planes * B * kv_heads * N], the pool rows to gather: plane, sequence, head, block.
        length: tokens of the longest, the new one included; at most N * block_size.
        padding: int64, which of the planes * B * kv_heads * N * block_size gathered token rows before `length` hold
            no token of their sequence; None if all are of one length.
        mask: [B, 1, 1, length], 0 or -inf, to be added to the scores; None if all are of one length.
    """

    tokens: Tensor
    rows: Tensor
    length: int
    padding: Tensor | None
    mask: Tensor | None


class Prefill(NamedTuple):
    """One sequence with several new tokens: rows [first, last) of the flat batch.

    rows: int64 [planes * kv_heads * N], the pool rows to gather. start: tokens before the new ones.
    """

    first: int
    last: int
    rows: Tensor
    start: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step, ready to run in every layer.

    Args:
        num_tokens: T, rows of the flat batch.
        slots: int64 [planes * T * kv_heads], where the new K and V go, as rows of single tokens: plane, token, head.
        decodes: together with `prefills`, every row of the flat batch once, but those attended to elsewhere.
    """

    num_tokens: int
    slots: Tensor
    decodes: tuple[DecodeBatch, ...]
    prefills: tuple[Prefill, ...]

    @property
    def context(self) -> int:
        """Tokens of the longest prefilled sequence."""
        return max((prefill.start + prefill.last - prefill.first for prefill in self.prefills), default=0)


class _Sequence(NamedTuple):
    blocks: _Ints  # exactly those that hold tokens [0, stop)
    start: int
    stop: int
    first: int  # row of token `start` in the flat batch


def make_plan(
    spans: Sequence[AttentionSpan],
    geometry: Geometry,
    tuning: Tuning,
    mask_dtype: torch.dtype,
    *,
    elsewhere: int = 0,
) -> AttentionPlan:
    """Lay out a ragged batch whose rows are the spans' new tokens, one span after the other.

    Args:
        spans: of all sequences.
        geometry: of the pool.
        tuning: where batches are cut.
        mask_dtype: of masks.
        elsewhere: spans of at most so many new tokens are attended to by somebody else, who also writes all tokens;
            0: none are.

    Raises:
        CapacityError: a span without new tokens, or whose blocks do not hold them, or are not of the pool.
    """
    sequences = list(_sequences(spans, geometry, elsewhere))
    lone = [sequence for sequence in sequences if sequence.stop - sequence.start == 1]
    several = [sequence for sequence in sequences if sequence.stop - sequence.start > 1]
    slots = [] if elsewhere else [_slots(sequence, geometry) for sequence in sequences]
    return AttentionPlan(
        num_tokens=sum(span.stop - span.start for span in spans),
        slots=_tensor(np.concatenate(slots, axis=1) if slots else np.empty(0, np.int64), geometry.device),
        decodes=tuple(_decode_batch(group, geometry, mask_dtype) for group in _groups(lone, geometry, tuning)),
        prefills=tuple(_prefill(sequence, geometry) for sequence in several),
    )


def _sequences(spans: Sequence[AttentionSpan], geometry: Geometry, elsewhere: int) -> Iterator[_Sequence]:
    first = 0
    for span in spans:
        if 0 < span.stop - span.start <= elsewhere:
            first += span.stop - span.start
            continue
        start, stop, room = span.start, span.stop, len(span.block_ids) * geometry.block_size
        if not 0 <= start < stop <= room:
            raise CapacityError(
                f"span of tokens [{start}, {stop}) with room for {room}: expected 0 <= start < stop <= room; "
                f"extend its block table first"
            )
        blocks = np.array(span.block_ids[: -(-stop // geometry.block_size)], np.int64)
        if blocks.min() < 0 or blocks.max() >= geometry.num_blocks:
            raise CapacityError(f"block ids {blocks.min()}..{blocks.max()}: the pool has 0..{geometry.num_blocks - 1}")
        yield _Sequence(blocks, start, stop, first)
        first += stop - start


def _slots(sequence: _Sequence, geometry: Geometry) -> _Ints:
    """Token rows [planes, tokens, kv_heads] of the new tokens."""
    positions = np.arange(sequence.start, sequence.stop)
    blocks, inside = sequence.blocks[positions // geometry.block_size], positions % geometry.block_size
    planes_and_heads = np.arange(geometry.layer_rows).reshape(geometry.planes, 1, geometry.kv_heads)
    rows = (blocks * geometry.block_rows)[:, None] + planes_and_heads
    return rows * geometry.block_size + inside[:, None]


def _groups(sequences: Sequence[_Sequence], geometry: Geometry, tuning: Tuning) -> Iterator[list[_Sequence]]:
    """Longest first, cut where a batch would gather or pad too much."""
    group: list[_Sequence] = []
    longest = padding = 0
    for sequence in sorted(sequences, key=lambda each: -each.stop):
        blocks = len(sequence.blocks)
        padding += (longest - blocks) * geometry.block_size
        gathered = (len(group) + 1) * longest * geometry.block_size
        if group and (padding > tuning.padding_tokens or gathered > tuning.gather_tokens):
            yield group
            group = []
        if not group:
            longest, padding = blocks, 0
        group.append(sequence)
    if group:
        yield group


def _rows(tables: _Ints, geometry: Geometry) -> _Ints:
    """Pool rows [planes, B, kv_heads, N] of block tables [B, N]."""
    planes_and_heads = np.arange(geometry.layer_rows).reshape(geometry.planes, 1, geometry.kv_heads, 1)
    return (tables * geometry.block_rows)[None, :, None, :] + planes_and_heads


def _decode_batch(group: Sequence[_Sequence], geometry: Geometry, mask_dtype: torch.dtype) -> DecodeBatch:
    length, count = group[0].stop, len(group)
    # Sequences are padded with blocks of their own: any valid row will do.
    tables = np.empty((count, len(group[0].blocks)), np.int64)
    for table, sequence in zip(tables, group, strict=True):
        table[: len(sequence.blocks)] = sequence.blocks
        table[len(sequence.blocks) :] = sequence.blocks[-1]
    ends = np.array([sequence.stop for sequence in group])
    padding = mask = None
    if ends[-1] < length:
        beyond = np.arange(length) >= ends[:, None]
        at, column = beyond.nonzero()
        width = tables.shape[1] * geometry.block_size
        planes = (np.arange(geometry.planes) * count)[:, None, None] + at[:, None]
        padded = (planes * geometry.kv_heads + np.arange(geometry.kv_heads)) * width + column[:, None]
        padding = _tensor(padded, geometry.device)
        mask = torch.zeros(beyond.shape, dtype=mask_dtype).masked_fill_(torch.from_numpy(beyond), float("-inf"))
        mask = mask.view(count, 1, 1, length).to(geometry.device)
    tokens = np.array([sequence.first for sequence in group])
    rows = _tensor(_rows(tables, geometry), geometry.device)
    return DecodeBatch(_tensor(tokens, geometry.device), rows, length, padding, mask)


def _prefill(sequence: _Sequence, geometry: Geometry) -> Prefill:
    rows = _tensor(_rows(sequence.blocks[None], geometry), geometry.device)
    return Prefill(sequence.first, sequence.first + sequence.stop - sequence.start, rows, sequence.start)


def _tensor(values: _Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(values.reshape(-1)).to(device)
