"""PagedAttention: causal attention over a device pool, through torch's scaled_dot_product_attention.

    plan(spans)                    once per step: index tensors and masks
    attention(layer, q, k, v)      once per layer: write K and V, gather, attend

After PagedAttention (Kwon et al., arXiv:2309.06180), with flashinfer's plan/run split. KV is gathered into
contiguous memory and the query heads of a KV head are folded into the query length, where the gathered K and V
serve them all: on CPU far faster than `enable_gqa` for single tokens in bfloat16.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.errors import FormatMismatch
from kvtier.gpu.batches import (
    AttentionPlan,
    AttentionSpan,
    DecodeBatch,
    Geometry,
    Prefill,
    Tuning,
    make_plan,
)
from kvtier.gpu.masks import causal_mask
from kvtier.gpu.storage import GroupMemory
from kvtier.layout import DTYPE_BYTES, GroupKind

__all__ = ["PagedAttention"]

# Measured: on CPU a batch of decodes whose KV stays in cache between gather and attention; on CUDA launches cost
# more than padding does.
_CPU_GATHER_BYTES, _CUDA_GATHER_BYTES = 8 << 20, 256 << 20
_CPU_QUERY_ROWS, _CUDA_QUERY_ROWS = 64, 512
_CPU_PADDING_TOKENS, _CUDA_PADDING_TOKENS = 128, 1 << 16


class PagedAttention:
    """Attention of one model over one pool. Implements `kvtier.engine.models.base.Attention`.

    Args:
        pool: its blocks are written in place.
        num_heads: query heads, a multiple of the pool's KV heads.
        windows: per layer of the pool, how many tokens up to its own one a token attends to, None for all; empty:
            None in every layer.

    Raises:
        FormatMismatch: an MLA pool, a dtype without arithmetic, heads that do not divide, or windows of other layers.
    """

    def __init__(self, pool: GroupMemory, num_heads: int, windows: Sequence[int | None] = ()) -> None:
        group = pool.group
        if group.kind is not GroupKind.GQA or group.dtype not in ("float32", "bfloat16", "float16"):
            raise FormatMismatch(f"pool of {group.kind} {group.dtype}: attention needs gqa in a float of 16 or 32 bits")
        if num_heads < 1 or num_heads % group.kv_heads:
            raise FormatMismatch(f"{num_heads} query heads: expected a multiple of the {group.kv_heads} KV heads")
        if windows and len(windows) != len(group.layers):
            raise FormatMismatch(
                f"{len(windows)} windows: expected one for each of the pool's {len(group.layers)} layers"
            )
        self._pool = pool
        self._num_heads = num_heads
        self._windows = tuple(windows) or (None,) * len(group.layers)
        self._queries_per_head = num_heads // group.kv_heads
        self._geometry = Geometry(
            len(pool.tensor), len(group.layers), group.kv_heads, pool.layout.block_size, pool.device
        )
        self._tuning = _tuning(pool)
        self._dtype: torch.dtype = getattr(torch, group.dtype)
        # Cutting off the rows before a layer's first one makes layer 0's indices its own.
        self._block_rows = pool.tensor.view(len(pool.tensor) * self._geometry.block_rows, -1)
        self._plan = make_plan((), self._geometry, self._tuning, self._dtype)
        self._none = torch.empty((0, 0), dtype=self._dtype, device=pool.device)
        self._causal = dict.fromkeys(self._windows, self._none)
        self._decode_masks: dict[int | None, list[Tensor | None]] = {window: [] for window in self._windows}

    def plan(self, spans: Sequence[AttentionSpan]) -> None:
        """Prepare a step. The flat batch has the spans' new tokens, one span after the other.

        Raises:
            CapacityError: a span without new tokens, or whose blocks do not hold them, or are not of the pool.
        """
        self._use(make_plan(spans, self._geometry, self._tuning, self._dtype), spans)

    def _use(self, plan: AttentionPlan, spans: Sequence[AttentionSpan]) -> None:
        self._plan = plan
        if plan.context > self._causal[self._windows[0]].shape[1]:
            self._causal = {window: self._causal_mask(plan.context, window) for window in self._causal}
        self._decode_masks = {window: self._masks_of_decodes(spans, window) for window in self._causal}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new K and V of one layer into the pool, and attend over all tokens up to each new one.

        Args:
            layer: position of the layer in the pool.
            q: [T, heads, head_dim], in the pool's dtype and on its device; may be strided over T.
            k: [T, kv_heads, head_dim], likewise.
            v: like k.

        Returns:
            [T, heads, head_dim], contiguous.

        Raises:
            FormatMismatch: tensors that are not those of the planned step. Nothing was written.
        """
        self._check(layer, q, k, v)
        out = q.new_empty(q.shape)
        self._write(layer, k, v)
        self._decode(layer, q, out)
        for prefill in self._plan.prefills:
            self._prefill(prefill, layer, q, out)
        return out

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        token_rows = self._rows_of(layer).view(-1, k.shape[-1])
        token_rows.index_copy_(0, self._plan.slots, torch.cat((k, v)).view(-1, k.shape[-1]))

    def _decode(self, layer: int, q: Tensor, out: Tensor) -> None:
        masks = self._decode_masks[self._windows[layer]]
        for batch, mask in zip(self._plan.decodes, masks, strict=True):
            self._decode_batch(batch, mask, layer, q, out)

    def _rows_of(self, layer: int) -> Tensor:
        return self._block_rows[layer * self._geometry.layer_rows :]

    def _gather(self, layer: int, rows: Tensor) -> Tensor:
        """The tokens of pool rows of a layer, [rows, block_size * head_dim] in the queries' dtype."""
        return self._rows_of(layer).index_select(0, rows)

    def _decode_batch(self, batch: DecodeBatch, mask: Tensor | None, layer: int, q: Tensor, out: Tensor) -> None:
        count, head_dim = len(batch.tokens), q.shape[-1]
        gathered = self._gather(layer, batch.rows)
        if batch.padding is not None:
            # Stale memory may hold NaN, which the mask's -inf would not silence.
            gathered.view(-1, head_dim).index_fill_(0, batch.padding, 0.0)
        key, value = gathered.view(2, count, self._geometry.kv_heads, -1, head_dim)[..., : batch.length, :]
        query = q.index_select(0, batch.tokens).view(count, self._geometry.kv_heads, -1, head_dim)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out.index_copy_(0, batch.tokens, attended.reshape(count, -1, head_dim))

    def _prefill(self, prefill: Prefill, layer: int, q: Tensor, out: Tensor) -> None:
        kv_heads, queries, head_dim = self._geometry.kv_heads, self._queries_per_head, q.shape[-1]
        window = self._windows[layer]
        causal = self._causal[window]
        gathered = self._gather(layer, prefill.rows).view(2, 1, kv_heads, -1, head_dim)
        for first in range(prefill.first, prefill.last, self._tuning.query_rows):
            last = min(first + self._tuning.query_rows, prefill.last)
            rows, seen = last - first, prefill.start + last - prefill.first
            # What is behind the window of the chunk's first token is behind that of all.
            low = 0 if window is None else max(seen - rows - window + 1, 0)
            key, value = gathered[..., low:seen, :]
            query = q[first:last].view(rows, kv_heads, queries, head_dim).transpose(0, 1)
            mask = causal[-rows * queries :, causal.shape[1] - seen + low :]
            attended = functional.scaled_dot_product_attention(
                query.reshape(1, kv_heads, rows * queries, head_dim), key, value, attn_mask=mask
            )
            folded = attended.view(kv_heads, rows, queries, head_dim).transpose(0, 1)
            out[first:last].view(rows, kv_heads, queries, head_dim).copy_(folded)

    def _masks_of_decodes(self, spans: Sequence[AttentionSpan], window: int | None) -> list[Tensor | None]:
        """The mask of each batch of decodes in layers of this window: [B, 1, 1, length], 0 or -inf; None: no mask."""
        if window is None or not self._plan.decodes:
            return [batch.mask for batch in self._plan.decodes]
        # Of every row of the flat batch; those of decodes are a span each.
        stops = torch.tensor([span.stop for span in spans for _ in range(span.start, span.stop)])
        masks: list[Tensor | None] = []
        for batch in self._plan.decodes:
            ends, columns = stops[batch.tokens.cpu(), None], torch.arange(batch.length)
            hidden = (columns < ends - window) | (columns >= ends)
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
            masks.append(mask.view(-1, 1, 1, batch.length).to(self._pool.device))
        return masks

    def _causal_mask(self, context: int, window: int | None) -> Tensor:
        return causal_mask(self._tuning.query_rows, context, self._queries_per_head, self._none, window)

    def _check(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        pool, tokens = self._pool, self._plan.num_tokens
        kv_shape = (tokens, pool.group.kv_heads, pool.group.head_dim)
        shapes = (q.shape, k.shape, v.shape)
        if shapes != ((tokens, self._num_heads, pool.group.head_dim), kv_shape, kv_shape):
            raise FormatMismatch(
                f"q, k, v of {[list(shape) for shape in shapes]}: the planned step has {tokens} tokens, "
                f"{self._num_heads} and {pool.group.kv_heads} heads of {pool.group.head_dim}; plan this step's spans"
            )
        if not q.dtype == k.dtype == v.dtype == self._dtype:
            raise FormatMismatch(f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: the pool holds {self._dtype}")
        if not 0 <= layer < self._geometry.layers:
            raise FormatMismatch(f"layer {layer}: the pool has 0..{self._geometry.layers - 1}")


def _tuning(pool: GroupMemory) -> Tuning:
    group = pool.group
    token_bytes = 2 * group.kv_heads * group.head_dim * DTYPE_BYTES[group.dtype]
    if pool.device.type == "cpu":
        return Tuning(_CPU_QUERY_ROWS, _CPU_GATHER_BYTES // token_bytes, _CPU_PADDING_TOKENS)
    return Tuning(_CUDA_QUERY_ROWS, _CUDA_GATHER_BYTES // token_bytes, _CUDA_PADDING_TOKENS)
