"""The steps between a decoder's matrix products as compiled kernels, for tensors that they take.

Each has a twin in torch, from which float32 results differ in the last bits only, and which rounds bfloat16 at the
same places. They check nothing: ask `takes` first, with every tensor.
"""

import torch
from torch import Tensor

from kvtier.native.attention import DTYPE_CODES, LANES, compiled, kernels

__all__ = ["add_rms_norm", "rms_norm", "rotate", "silu_times", "takes"]

_CODES = {getattr(torch, name): code for name, code in DTYPE_CODES.items()}


def takes(*tensors: Tensor) -> bool:
    """Whether there are kernels for tensors like these: [T, D] or [T, heads, D], strided over T at most.

    In memory of a CPU that has kernels, of one dtype, float32 or bfloat16, and rows of a multiple of 32 elements.
    """
    if kernels() is None:
        return False
    for x in tensors:
        width = x.shape[-1]
        packed = x.stride()[1:] in ((1,), (width, 1))
        if (
            x.dtype not in _CODES
            or x.dtype is not tensors[0].dtype
            or width % (2 * LANES)
            or not packed
            or not x.is_cpu
        ):
            return False
    return True


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis, contiguous.

    Args:
        x: [T, D] or [T, heads, D].
        weight: [D], contiguous, in the dtype of `x`.
        eps: added to the mean square.
    """
    out = x.new_empty(x.shape)
    inner = x.shape[1] if x.dim() == 3 else 1
    compiled().rms_norm(
        x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), x.shape[0], inner, x.stride(0) * x.itemsize, x.shape[-1],
        _CODES[x.dtype], torch.get_num_threads(), eps,
    )  # fmt: skip
    return out


def add_rms_norm(hidden: Tensor, change: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `change` to `hidden` in place, both [T, D], and `change` contiguous; returns the RMS norm of the sum."""
    out = torch.empty_like(hidden)
    count, width = hidden.shape
    compiled().rms_norm(
        hidden.data_ptr(), change.data_ptr(), weight.data_ptr(), out.data_ptr(), count, 1,
        hidden.stride(0) * hidden.itemsize, width, _CODES[hidden.dtype], torch.get_num_threads(), eps,
    )  # fmt: skip
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Half-split RoPE, in place.

    Args:
        x: [T, heads, head_dim].
        cos: [T, 1, head_dim], contiguous.
        sin: like `cos`; negative in its first half.
    """
    count, heads, width = x.shape
    compiled().rotate(
        x.data_ptr(), x.stride(0) * x.itemsize, cos.data_ptr(), sin.data_ptr(), count, heads, width,
        _CODES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip


def silu_times(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of gate and up side by side: [T, 2 * D], contiguous -> [T, D]."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((count, width))
    compiled().silu_times(
        gate_up.data_ptr(), out.data_ptr(), count, width, _CODES[gate_up.dtype], torch.get_num_threads()
    )
    return out
