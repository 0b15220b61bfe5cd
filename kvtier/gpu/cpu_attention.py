"""CpuAttention: paged attention by the compiled kernels of `kvtier.native`, prefills by torch.

Sequences with few new tokens (decodes, decodes with draft tokens) attend straight from their blocks: nothing is
gathered. Long prefills are matrix products, which torch's libraries do better.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtier.gpu.batches import AttentionSpan, make_plan
from kvtier.gpu.cpu_rows import AttentionRows, attention_rows
from kvtier.gpu.paged import PagedAttention
from kvtier.gpu.storage import GroupMemory
from kvtier.native.attention import DTYPE_CODES, LANES, MAX_HEAD_DIM, compiled, kernels

__all__ = ["CpuAttention"]

# Work for some microseconds, beside which a task costs little; short enough that one sequence feeds several threads.
_PIECE_TOKENS = 128
# Measured, 4 sequences: a walk over the KV for each new token beats gathering it up to 8 (context 512) or 6 (2048).
_FEW_TOKENS = 8


class CpuAttention(PagedAttention):
    """Attention of one model over one pool in CPU memory: what `PagedAttention` is, faster.

    Args:
        pool: its blocks are written in place.
        num_heads: query heads, a multiple of the pool's KV heads.
        windows: as `PagedAttention` has them.

    Raises:
        FormatMismatch: as `PagedAttention`. Ask `runs` first whether there are kernels for the pool.
    """

    def __init__(self, pool: GroupMemory, num_heads: int, windows: Sequence[int | None] = ()) -> None:
        super().__init__(pool, num_heads, windows)
        group, size, item = pool.group, pool.layout.block_size, pool.tensor.itemsize
        plane_bytes = group.kv_heads * size * group.head_dim * item
        self._layer_bytes = 2 * plane_bytes
        self._place = (len(group.layers) * self._layer_bytes, plane_bytes, size, group.kv_heads)
        self._row_bytes = group.head_dim * item
        self._heads = (self._queries_per_head, group.head_dim, DTYPE_CODES[group.dtype])
        self._strides = (group.head_dim, 1)
        self._partials = torch.empty(0)
        self._take(attention_rows((), self._geometry, _FEW_TOKENS, _PIECE_TOKENS))

    @staticmethod
    def runs(pool: GroupMemory) -> bool:
        """Whether this machine has kernels for a pool's device, dtype and head size."""
        group = pool.group
        fits = group.dtype in DTYPE_CODES and group.head_dim <= MAX_HEAD_DIM and not group.head_dim % LANES
        return pool.device.type == "cpu" and pool.coded is None and fits and kernels() is not None

    def plan(self, spans: Sequence[AttentionSpan]) -> None:
        """Prepare a step. The flat batch has the spans' new tokens, one span after the other.

        Raises:
            CapacityError: a span without new tokens, or whose blocks do not hold them, or are not of the pool.
        """
        rows = attention_rows(spans, self._geometry, _FEW_TOKENS, _PIECE_TOKENS)
        self._use(make_plan(spans, self._geometry, self._tuning, self._pool.tensor.dtype, elsewhere=_FEW_TOKENS), spans)
        self._take(rows)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new K and V of one layer into the pool, and attend: see `PagedAttention`."""
        return super().__call__(layer, self._packed(q), self._packed(k), self._packed(v))

    def _packed(self, x: Tensor) -> Tensor:
        """The same values, strided over T at most: kernels step over T only."""
        return x if x.stride()[1:] == self._strides else x.contiguous()

    def _take(self, rows: AttentionRows) -> None:
        self._rows = rows  # the kernels get addresses of its arrays
        floats = len(rows.piece_rows) * self._num_heads * (self._pool.group.head_dim + 2)
        if floats > len(self._partials):
            self._partials = torch.empty(floats)
        self._written = (rows.slots.ctypes.data, len(rows.slots))
        self._attended = (
            len(rows.rows), rows.rows.ctypes.data, rows.lengths.ctypes.data, rows.tables.ctypes.data,
            rows.blocks.ctypes.data, len(rows.piece_rows), rows.piece_rows.ctypes.data, rows.piece_starts.ctypes.data,
            rows.first_pieces.ctypes.data, _PIECE_TOKENS, self._partials.data_ptr(),
        )  # fmt: skip

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        run, item = compiled(), k.itemsize
        run.write_rows(
            self._base(layer), *self._place, self._row_bytes, k.data_ptr(), k.stride(0) * item,
            v.data_ptr(), v.stride(0) * item, *self._written, torch.get_num_threads(),
        )  # fmt: skip

    def _decode(self, layer: int, q: Tensor, out: Tensor) -> None:
        if not self._attended[0]:
            return
        compiled().attend(
            self._base(layer), *self._place, *self._heads, self._windows[layer] or 0,
            q.data_ptr(), q.stride(0) * q.itemsize, out.data_ptr(), *self._attended, torch.get_num_threads(),
        )  # fmt: skip

    def _base(self, layer: int) -> int:
        return self._pool.tensor.data_ptr() + layer * self._layer_bytes
