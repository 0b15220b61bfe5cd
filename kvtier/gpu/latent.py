"""LatentAttention: causal attention over a pool of latents, through torch's scaled_dot_product_attention.

    plan(spans)               once per step: index tensors and masks
    attention(layer, q, row)  once per layer: write the rows, gather, attend

Multi-head latent attention (DeepSeek-AI, arXiv:2405.04434) in its absorbed form: the model multiplies its queries by
the key half of the up-projection, and the result by the value half. What is left is attention of all query heads to
one head whose keys are the rows [latent, rope key] and whose values are their latents. A chunk's tokens and heads are
folded into one query length, so that a row that was gathered serves them all. Values are whole rows of which the
latent is kept: fused attention wants keys and values of one width, and was measured 1.1 (float32, many rows) to 5
times (bfloat16) faster on CPU than the unfused one that does not.

Prefills are absorbed, too. Expanding keys and values makes a pair of tokens cheaper, but has to be done for all that
is seen: of chunks of 32 to 512 tokens (16 and 128 heads of DeepSeek's widths, on CPU) only one of 512 with nothing
before it got faster, 1.4 to 1.9 times; all others took 1.1 to 4 times as long.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from kvtier.errors import FormatMismatch
from kvtier.gpu.batches import AttentionPlan, AttentionSpan, DecodeBatch, Geometry, Prefill, Tuning, make_plan
from kvtier.gpu.masks import causal_mask
from kvtier.gpu.storage import GroupMemory
from kvtier.layout import GroupKind

__all__ = ["LatentAttention"]

_DTYPES = ("float32", "bfloat16", "float16")
# As in `kvtier.gpu.attention`; a chunk of a prefill is counted in query rows, of which each token has one per head.
_CPU_GATHER_BYTES, _CUDA_GATHER_BYTES = 8 << 20, 256 << 20
_CPU_PADDING_TOKENS, _CUDA_PADDING_TOKENS = 128, 1 << 16
_QUERY_ROWS = 1024


class LatentAttention:
    """Attention of one MLA model over one pool. Implements `kvtier.engine.models.base.Attention`.

    Args:
        pool: its blocks are written in place.
        num_heads: query heads.
        scale: what the scores are multiplied by before their softmax.

    Raises:
        FormatMismatch: a pool that holds no latents, or a dtype without arithmetic.
    """

    def __init__(self, pool: GroupMemory, num_heads: int, scale: float) -> None:
        group = pool.group
        if group.kind is not GroupKind.MLA or group.dtype not in _DTYPES:
            raise FormatMismatch(
                f"pool of {group.kind} {group.dtype}: attention to latents needs mla in a float of 16 or 32 bits"
            )
        if num_heads < 1:
            raise FormatMismatch(f"{num_heads} query heads: expected at least 1")
        self._pool = pool
        self._num_heads = num_heads
        self._scale = scale
        self._latent, self._width = group.head_dim, group.head_dim + group.rope_dim
        self._geometry = Geometry(len(pool.tensor), len(group.layers), 1, pool.layout.block_size, pool.device, planes=1)
        self._tuning = _tuning(pool, num_heads)
        # Cutting off the rows before a layer's first one makes layer 0's indices its own.
        self._block_rows = pool.tensor.view(-1, pool.layout.block_size * self._width)
        self._token_rows = pool.tensor.view(-1, self._width)
        self._plan = make_plan((), self._geometry, self._tuning, pool.tensor.dtype)
        self._causal = pool.tensor.new_empty((0, 0))

    def plan(self, spans: Sequence[AttentionSpan]) -> None:
        """Prepare a step. The flat batch has the spans' new tokens, one span after the other.

        Raises:
            CapacityError: a span without new tokens, or whose blocks do not hold them, or are not of the pool.
        """
        self._use(make_plan(spans, self._geometry, self._tuning, self._pool.tensor.dtype))

    def _use(self, plan: AttentionPlan) -> None:
        self._plan = plan
        if plan.context > self._causal.shape[1]:
            self._causal = causal_mask(self._tuning.query_rows, plan.context, self._num_heads, self._pool.tensor)

    def __call__(self, layer: int, q: Tensor, row: Tensor) -> Tensor:
        """Write the new rows of one layer into the pool, and attend over all tokens up to each new one.

        Args:
            layer: position of the layer in the pool.
            q: [T, heads, latent + rope], absorbed, in the pool's dtype and on its device.
            row: [T, latent + rope], the latents after their norm and the rope keys after RoPE.

        Returns:
            [T, heads, latent], contiguous: the weighted sums of latents.

        Raises:
            FormatMismatch: tensors that are not those of the planned step. Nothing was written.
        """
        self._check(layer, q, row)
        token_rows = self._token_rows[layer * self._geometry.block_size :]
        token_rows.index_copy_(0, self._plan.slots, row)
        block_rows = self._block_rows[layer:]
        out = q.new_empty((len(q), self._num_heads, self._latent))
        for batch in self._plan.decodes:
            self._decode(batch, block_rows, q, out)
        for prefill in self._plan.prefills:
            self._prefill(prefill, block_rows, q, out)
        return out

    def _decode(self, batch: DecodeBatch, block_rows: Tensor, q: Tensor, out: Tensor) -> None:
        count = len(batch.tokens)
        gathered = block_rows.index_select(0, batch.rows)
        if batch.padding is not None:
            # Stale memory may hold NaN, which the mask's -inf would not silence.
            gathered.view(-1, self._width).index_fill_(0, batch.padding, 0.0)
        rows = gathered.view(count, 1, -1, self._width)[:, :, : batch.length]
        query = q.index_select(0, batch.tokens).unsqueeze(1)
        attended = self._attend(query, rows, batch.mask)
        out.index_copy_(0, batch.tokens, attended.squeeze(1))

    def _prefill(self, prefill: Prefill, block_rows: Tensor, q: Tensor, out: Tensor) -> None:
        heads = self._num_heads
        gathered = block_rows.index_select(0, prefill.rows).view(1, 1, -1, self._width)
        for first in range(prefill.first, prefill.last, self._tuning.query_rows):
            last = min(first + self._tuning.query_rows, prefill.last)
            count, seen = last - first, prefill.start + last - prefill.first
            query = q[first:last].reshape(1, 1, count * heads, self._width)
            mask = self._causal[-count * heads :, self._causal.shape[1] - seen :]
            attended = self._attend(query, gathered[:, :, :seen], mask)
            out[first:last] = attended.view(count, heads, -1)

    def _attend(self, query: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
        attended = functional.scaled_dot_product_attention(query, rows, rows, attn_mask=mask, scale=self._scale)
        return attended[..., : self._latent]

    def _check(self, layer: int, q: Tensor, row: Tensor) -> None:
        tokens, dtype = self._plan.num_tokens, self._pool.tensor.dtype
        if (q.shape, row.shape) != ((tokens, self._num_heads, self._width), (tokens, self._width)):
            raise FormatMismatch(
                f"q and row of {list(q.shape)} and {list(row.shape)}: the planned step has {tokens} tokens, "
                f"{self._num_heads} heads and rows of {self._width}; plan this step's spans"
            )
        if q.dtype != dtype or row.dtype != dtype:
            raise FormatMismatch(f"q and row of {q.dtype} and {row.dtype}: the pool holds {dtype}")
        if not 0 <= layer < self._geometry.layers:
            raise FormatMismatch(f"layer {layer}: the pool has 0..{self._geometry.layers - 1}")


def _tuning(pool: GroupMemory, num_heads: int) -> Tuning:
    token_bytes = pool.tensor.shape[-1] * pool.tensor.itemsize
    query_tokens = max(_QUERY_ROWS // num_heads, 1)
    if pool.device.type == "cpu":
        return Tuning(query_tokens, _CPU_GATHER_BYTES // token_bytes, _CPU_PADDING_TOKENS)
    return Tuning(query_tokens, _CUDA_GATHER_BYTES // token_bytes, _CUDA_PADDING_TOKENS)
