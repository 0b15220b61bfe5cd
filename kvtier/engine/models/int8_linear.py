"""Matrix products with int8 weights and 16- or 32-bit activations (W8A16): half the memory of bfloat16.

One symmetric scale per output channel, as in LLM.int8() (Dettmers et al., arXiv:2208.07339) without its outliers:
w = scale * q, q in [-127, 127]. Scales are rounded to the activations' dtype before the weights are divided by them,
so a product knows the very scales that were used. Ways to multiply, those of a CPU measured on one core with AVX-512
and AMX:

    CUDA        own kernel, where Triton is installed: weights are read as bytes (not measured)
    few rows    torch's int8 kernel, bfloat16 only: at 1 row 1.3 to 1.9 times as fast as packed bfloat16, from 5 rows
                on slower: its time grows with the rows
    else        weights go back to 16 or 32 bits in blocks that stay in cache, times the rows, times the scale: 1.5 to
                3 times slower than packed bfloat16
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.gpu import kernels

__all__ = ["Int8Linear"]

_KERNEL_ROWS = 20
# The kernel takes so many columns at a time and reads beyond a matrix that has some left over.
_KERNEL_COLUMNS = 32
# Of one block of weights in the activations' dtype.
_CPU_BLOCK_BYTES, _CUDA_BLOCK_BYTES = 1 << 20, 64 << 20


class Int8Linear:
    """x [T, in] -> x @ weight.T + bias [T, out], with `weight` rounded to int8.

    Args:
        weight: [out, in], float; not kept.
        bias: [out], in the dtype of `weight`.
    """

    __slots__ = ("_bias", "_kernel_rows", "_product", "_scales", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._scales = _rounded(weight)
        self._bias = bias
        self._product = _product_on(weight.device)
        whole = weight.device.type == "cpu" and weight.shape[1] % _KERNEL_COLUMNS == 0
        self._kernel_rows = _KERNEL_ROWS if whole and _kernel_works(weight.dtype) else 0

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], in the dtype of the weights that were given."""
        if self._product is not None:
            return self._product(x.contiguous(), self._weight, self._scales, self._bias)
        if 0 < len(x) <= self._kernel_rows:
            out = torch._weight_int8pack_mm(x.contiguous(), self._weight, self._scales)  # noqa: SLF001
        else:
            out = self._by_blocks(x) * self._scales
        return out if self._bias is None else out + self._bias

    def _by_blocks(self, x: Tensor) -> Tensor:
        room = _CPU_BLOCK_BYTES if x.device.type == "cpu" else _CUDA_BLOCK_BYTES
        block = x.new_empty((max(room // (x.shape[-1] * x.itemsize), 1), x.shape[-1]))
        parts = torch.split(self._weight, len(block))
        return torch.cat([functional.linear(x, block[: len(part)].copy_(part)) for part in parts], dim=-1)


def _product_on(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None:
    """The kernel that multiplies on a device, if it has one."""
    if device.type != "cuda" or not kernels.available():
        return None
    # Triton is optional and takes seconds to import.
    from kvtier.gpu.kernels.int8_product import int8_product  # noqa: PLC0415

    return int8_product


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and scales [out] in the dtype of `weight`."""
    values = weight.float()
    # A channel of zeros has any scale.
    scales = (values.abs().amax(1) / 127).clamp_min(torch.finfo(weight.dtype).tiny).to(weight.dtype)
    return (values / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scales


@cache
def _kernel_works(dtype: torch.dtype) -> bool:
    """Whether torch's own int8 kernel exists here, pays (its float32 form is scalar) and is right."""
    if dtype is not torch.bfloat16:
        return False
    weight = (torch.arange(33 * 64, dtype=torch.float32).reshape(33, 64).sin() * 127).to(torch.int8)
    rows = torch.arange(3 * 64, dtype=torch.float32).reshape(3, 64).cos().to(dtype)
    scales = torch.linspace(0.5, 1.5, 33).to(dtype)
    try:
        found = torch._weight_int8pack_mm(rows, weight, scales)  # noqa: SLF001
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = rows.float() @ weight.float().T * scales.float()
    return torch.allclose(found.float(), expected, rtol=1e-2, atol=1.0)
