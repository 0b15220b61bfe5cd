"""Matrix products with constant weights: oneDNN's packed form on CPU where it works, functional.linear elsewhere.

Packed weights were measured no slower than functional.linear at every number of rows from 2 to 512, and 1.5 to 4 times
faster below 32, so a packed matrix needs no plain twin. The operators are private to torch: they are tried out
once per dtype, and anything unexpected means functional.linear.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Linear", "linear", "packing_works"]

Linear = Callable[[Tensor], Tensor]
"""x [T, in] -> x @ weight.T [T, out]."""

# oneDNN chooses its memory format by an expected number of rows; 32 was the best over all (1 to 512).
_EXPECTED_ROWS = 32


def linear(weight: Tensor) -> Linear:
    """The fastest product with `weight` [out, in] that this machine and this torch offer."""
    if weight.device.type == "cpu" and packing_works(weight.dtype):
        return _packed(weight)
    return partial(functional.linear, weight=weight)


def _packed(weight: Tensor) -> Linear:
    operators = torch.ops.mkldnn
    packed = operators._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)  # noqa: SLF001
    product = operators._linear_pointwise  # noqa: SLF001

    def run(x: Tensor) -> Tensor:
        result: Tensor = product(x, packed, None, "none", [], "")
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
        with torch.inference_mode():
            return torch.allclose(_packed(weight)(rows), functional.linear(rows, weight), rtol=1e-2, atol=1e-2)
    except (AttributeError, RuntimeError, TypeError):
        return False
