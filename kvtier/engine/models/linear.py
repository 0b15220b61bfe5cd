"""Matrix products with constant weights: on CPU own AMX kernels or oneDNN's packed form, functional.linear elsewhere.

Packed weights were measured no slower than functional.linear at every number of rows from 2 to 512, and 1.5 to 4 times
faster below 32, so a packed matrix needs no plain twin. The operators are private to torch: they are tried out
once per dtype, and anything unexpected means functional.linear.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.engine.models.int8_linear import Int8Linear
from kvtier.engine.models.tile_linear import TileLinear

__all__ = ["Linear", "WeightFormat", "linear", "packing_works"]

Linear = Callable[[Tensor], Tensor]
"""x [T, in] -> x @ weight.T [T, out]."""

WeightFormat: TypeAlias = Literal["auto", "int8"]
"""How a product keeps its weights: in the model's dtype, or as `int8_linear` does."""

# oneDNN chooses its memory format by an expected number of rows; 32 was the best over all (1 to 512).
_EXPECTED_ROWS = 32


def linear(weight: Tensor, bias: Tensor | None = None, quantize: WeightFormat = "auto") -> Linear:
    """The fastest product that this machine and this torch offer.

    Args:
        weight: [out, in], in the dtype of the activations.
        bias: [out], likewise; added to every row.
        quantize: `int8` for half the memory or a quarter of it, and rounded weights.
    """
    if quantize == "int8":
        return Int8Linear(weight, bias)
    if bias is None and TileLinear.runs(weight):
        return TileLinear(weight)
    if weight.device.type == "cpu" and packing_works(weight.dtype):
        return _packed(weight, bias)
    return partial(functional.linear, weight=weight, bias=bias)


def _packed(weight: Tensor, bias: Tensor | None) -> Linear:
    operators = torch.ops.mkldnn
    packed = operators._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)  # noqa: SLF001
    product = operators._linear_pointwise  # noqa: SLF001

    def run(x: Tensor) -> Tensor:
        result: Tensor = product(x, packed, bias, "none", [], "")
        return result

    return run


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed product exists here for `dtype` and agrees with functional.linear."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
            return False
        weight = torch.arange(32 * 48, dtype=torch.float32).reshape(32, 48).sin().to(dtype)
        rows = torch.arange(3 * 48, dtype=torch.float32).reshape(3, 48).cos().to(dtype)
        bias = torch.arange(32, dtype=torch.float32).to(dtype)
        with torch.inference_mode():
            ours, expected = _packed(weight, bias)(rows), functional.linear(rows, weight, bias)
            return torch.allclose(ours, expected, rtol=1e-2, atol=1e-2)
    except (AttributeError, RuntimeError, TypeError):
        return False
