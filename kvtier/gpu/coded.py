"""CodedAttention: attention over a pool of coded blocks in plain torch, on every device.

Blocks are decoded as they are gathered, in every layer and step: right, and slow. Where there is Triton and a CUDA
device, `kvtier.gpu.triton_attention` attends to the codes themselves. Both write the same bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtier.errors import FormatMismatch
from kvtier.gpu.kernels.rows import Code, Rows
from kvtier.gpu.paged import PagedAttention
from kvtier.gpu.storage import GroupMemory

__all__ = ["CodedAttention", "decode_rows", "encode_rows"]


class CodedAttention(PagedAttention):
    """Attention of one model over one coded pool: what `PagedAttention` is over a raw one.

    Keys and values are decoded into the queries' dtype; rotated ones are not turned back, but the queries are turned
    likewise, and the sums of values back.

    Args:
        pool: its blocks are written in place; K and V in one code.
        num_heads: query heads, a multiple of the pool's KV heads.
        windows: as `PagedAttention` has them.

    Raises:
        FormatMismatch: as `PagedAttention`, a raw pool, or one that codes K and V differently.
    """

    def __init__(self, pool: GroupMemory, num_heads: int, windows: Sequence[int | None] = ()) -> None:
        super().__init__(pool, num_heads, windows)
        if pool.coded is None:
            raise FormatMismatch("a raw pool: expected a coded one")
        self._sections = pool.coded.sections(pool.tensor)
        self._key, self._value = pool.layer(0)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new K and V of one layer into the pool, and attend: see `PagedAttention`."""
        self._check(layer, q, k, v)
        if self._key.from_rotated is not None:
            q = torch.matmul(q.float(), self._key.from_rotated.T).to(q.dtype)
        out = super().__call__(layer, q, k, v)
        if self._value.from_rotated is not None:
            out = torch.matmul(out.float(), self._value.from_rotated).to(q.dtype)
        return out

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        new = torch.cat((_turned(k, self._key), _turned(v, self._value)))
        codes, meta = encode_rows(new.view(-1, k.shape[-1]), self._sections.code)
        size = self._geometry.block_size
        section, inside = self._plan.slots // size + self._first_row(layer), self._plan.slots % size
        self._sections.values[section, 0, inside] = codes
        _scales(self._sections)[section, 0, :, inside] = meta

    def _gather(self, layer: int, rows: Tensor) -> Tensor:
        at = rows + self._first_row(layer)
        return decode_rows(self._sections, at).to(self._dtype).view(len(rows), -1)

    def _first_row(self, layer: int) -> int:
        return layer * self._geometry.layer_rows


def encode_rows(rows: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Code rows as `kvtier.gpu.kernels.write_kv` does, bit by bit but for values that are not finite.

    Args:
        rows: [n, width] in a float, rotated where they are to be.
        code: INT8, FP8 or INT4.

    Returns:
        Codes uint8 [n, `code.row_bytes(width)`], and float16 [n, `code.metas`]. Of a row with a value that is not
        finite some of the latter is not finite, and so nothing that it decodes to.
    """
    x = rows.float()
    if code is Code.INT4:
        # Adding zero turns -0 into 0.
        low = (x.amin(1) + 0.0).half()
        scale, inverse = _half_scale((x.amax(1) - low.float()).clamp_min(0.0), 15.0, 15.49)
        steps = ((x - low.float()[:, None]) * inverse[:, None]).clamp(0.0, 15.0).round().to(torch.uint8)
        first, second = steps.chunk(2, 1)
        return first | (second << 4), torch.stack((scale, low), 1)
    top, room = (127.0, 127.49) if code is Code.INT8 else (448.0, 460.0)
    scale, inverse = _half_scale(x.abs().amax(1), top, room)
    scaled = x * inverse[:, None]
    codes = scaled.round().to(torch.int8) if code is Code.INT8 else scaled.to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale[:, None]


def _half_scale(span: Tensor, top: float, room: float) -> tuple[Tensor, Tensor]:
    """Steps float16 for codes up to `top`, none of which is to exceed `room`, and their inverses in float32."""
    half = (span / top).half()
    short = half.float() * room < span
    half = (half.view(torch.int16) + short.to(torch.int16)).view(torch.float16)
    wide = half.float()
    return half, torch.where(wide > 0, 1.0 / wide, 0.0)


def decode_rows(stored: Rows, at: Tensor) -> Tensor:
    """Decode blocks `at` of coded rows; rotated ones stay rotated: float32 [n, kv_heads, block_size, width]."""
    values, meta = stored.values[at], _scales(stored)[at].float().unsqueeze(-1)
    if stored.code is Code.INT4:
        return torch.cat((values & 15, values >> 4), -1) * meta[:, :, 0] + meta[:, :, 1]
    codes = values.view(torch.int8 if stored.code is Code.INT8 else torch.float8_e4m3fn)
    return codes.float() * meta[:, :, 0]


def _scales(stored: Rows) -> Tensor:
    if stored.meta is None:
        raise FormatMismatch(f"{stored.code.name} rows without scales: expected coded ones")
    return stored.meta


def _turned(x: Tensor, rows: Rows) -> Tensor:
    return x.float() if rows.to_rotated is None else torch.matmul(x.float(), rows.to_rotated)
