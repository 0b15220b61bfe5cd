"""Attention over a device pool by the kernels of `kvtier.gpu.kernels`: what PagedAttention and LatentAttention are.

Nothing is gathered: sequences attend straight from their blocks. Needs Triton; meant for CUDA, and runs on CPU pools
under Triton's interpreter, slowly.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvtier.gpu.attention import AttentionConfig
from kvtier.gpu.batches import AttentionPlan, AttentionSpan, Geometry, make_plan
from kvtier.gpu.cpu_rows import attention_rows
from kvtier.gpu.graphs import DecodeBuffers
from kvtier.gpu.kernels.batch import DecodeBatch, PrefillBatch
from kvtier.gpu.kernels.latent_decode import latent_decode
from kvtier.gpu.kernels.paged_decode import paged_decode
from kvtier.gpu.kernels.paged_prefill import most_rows, paged_prefill
from kvtier.gpu.kernels.write_kv import write_kv, write_latent
from kvtier.gpu.latent import LatentAttention
from kvtier.gpu.paged import PagedAttention
from kvtier.gpu.storage import GroupMemory
from kvtier.layout import GroupKind

__all__ = ["TritonAttention", "TritonLatentAttention", "make_triton_attention"]

_WHOLE = 1 << 30


class TritonAttention(PagedAttention):
    """Attention of one model over one pool of K and V, raw or coded. Implements `kvtier.engine.models.base.Attention`.

    Args:
        pool: its blocks are written in place.
        num_heads: query heads, a multiple of the pool's KV heads.
        windows: as `PagedAttention` has them.

    Raises:
        FormatMismatch: as `PagedAttention`.
        CapacityError: more than 128 query heads per KV head.
    """

    def __init__(self, pool: GroupMemory, num_heads: int, windows: Sequence[int | None] = ()) -> None:
        super().__init__(pool, num_heads, windows)
        self._scale = pool.group.head_dim**-0.5
        self._layers = [pool.layer(at) for at in range(len(pool.group.layers))]
        self._tiles = (self._queries_per_head, most_rows(self._layers[0], self._dtype))
        self._step = _plan((), self._geometry, self._tiles)

    def plan(self, spans: Sequence[AttentionSpan]) -> None:
        """Prepare a step. The flat batch has the spans' new tokens, one span after the other.

        Raises:
            CapacityError: a span without new tokens, or whose blocks do not hold them, or are not of the pool.
        """
        step = _plan(spans, self._geometry, self._tiles)
        self._use(make_plan(spans, self._geometry, self._tuning, self._dtype, elsewhere=_WHOLE), spans)
        self._step = step

    def plan_decode(self, buffers: DecodeBuffers, longest: int) -> None:
        """See `kvtier.gpu.graphs.StaticAttention.plan_decode`."""
        self._plan = AttentionPlan(len(buffers.rows), buffers.slots, (), ())
        self._step = _decode_step(buffers, longest)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        write_kv(k, v, self._layers[layer], self._step.slots)

    def _decode(self, layer: int, q: Tensor, out: Tensor) -> None:
        kv, window = self._layers[layer], self._windows[layer]
        if self._step.decodes is not None:
            paged_decode(q, kv, self._step.decodes, out, scale=self._scale, window=window)
        if self._step.prefills is not None:
            paged_prefill(q, kv, self._step.prefills, out, scale=self._scale, window=window)


class TritonLatentAttention(LatentAttention):
    """Attention of one MLA model over one pool of latents: decodes by kernel, longer spans as `LatentAttention` does.

    Args:
        pool: its blocks are written in place.
        num_heads: query heads.
        scale: what the scores are multiplied by before their softmax.

    Raises:
        FormatMismatch: as `LatentAttention`.
    """

    def __init__(self, pool: GroupMemory, num_heads: int, scale: float) -> None:
        super().__init__(pool, num_heads, scale)
        self._layers = pool.tensor.unbind(1)
        self._step = _plan((), self._geometry, None)

    def plan(self, spans: Sequence[AttentionSpan]) -> None:
        """Prepare a step. The flat batch has the spans' new tokens, one span after the other.

        Raises:
            CapacityError: a span without new tokens, or whose blocks do not hold them, or are not of the pool.
        """
        step = _plan(spans, self._geometry, None)
        self._use(make_plan(spans, self._geometry, self._tuning, self._pool.tensor.dtype, elsewhere=1))
        self._step = step

    def plan_decode(self, buffers: DecodeBuffers, longest: int) -> None:
        """See `kvtier.gpu.graphs.StaticAttention.plan_decode`."""
        self._plan = AttentionPlan(len(buffers.rows), buffers.slots, (), ())
        self._step = _decode_step(buffers, longest)

    def __call__(self, layer: int, q: Tensor, row: Tensor) -> Tensor:
        """Write the new rows of one layer into the pool, and attend: see `LatentAttention`."""
        self._check(layer, q, row)
        write_latent(row, self._layers[layer], self._step.slots)
        out = q.new_empty((len(q), self._num_heads, self._latent))
        if self._step.decodes is not None:
            latent_decode(q, self._layers[layer], self._step.decodes, out, scale=self._scale)
        for prefill in self._plan.prefills:
            self._prefill(prefill, self._block_rows[layer:], q, out)
        return out


def make_triton_attention(pool: GroupMemory, config: AttentionConfig) -> TritonAttention | TritonLatentAttention:
    """What attends over a model's pool: to keys and values, or to latents. Raises what their constructors do."""
    if pool.group.kind is GroupKind.MLA:
        return TritonLatentAttention(pool, config.heads, config.softmax_scale)
    return TritonAttention(pool, config.heads, config.windows)


class _Step(NamedTuple):
    """slots: int64 [T], of all new tokens. decodes, prefills: spans of one new token, of several; None if none are."""

    slots: Tensor
    decodes: DecodeBatch | None
    prefills: PrefillBatch | None


def _decode_step(buffers: DecodeBuffers, longest: int) -> _Step:
    rows = buffers.rows.to(torch.int32)
    return _Step(buffers.slots, DecodeBatch(rows, buffers.tables, buffers.lengths, longest), None)


def _plan(spans: Sequence[AttentionSpan], geometry: Geometry, tiles: tuple[int, int] | None) -> _Step:
    """Lay out a step. Raises CapacityError as `attention_rows` does.

    tiles: query heads per KV head and rows of a prefill's tiles; None: decodes only.
    """
    device = geometry.device
    # No context is cut: this is for the checks and the slots.
    slots = torch.from_numpy(attention_rows(spans, geometry, 1, _WHOLE).slots).to(device)
    new = [span.stop - span.start for span in spans]
    rows = list(accumulate(new, initial=0))
    lone = [at for at, count in enumerate(new) if count == 1]
    several = [at for at, count in enumerate(new) if count > 1]
    decodes = prefills = None
    if lone:
        decodes = DecodeBatch.make([spans[at] for at in lone], [rows[at] for at in lone], device)
    if several and tiles is not None:
        chosen, first = [spans[at] for at in several], [rows[at] for at in several]
        prefills = PrefillBatch.make(chosen, first, tiles[0], device, tiles[1])
    return _Step(slots, decodes, prefills)
