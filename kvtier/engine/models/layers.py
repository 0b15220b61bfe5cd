"""The steps between a decoder's matrix products, each in one place: norms, rotation, activation, gated MLP."""

from torch import Tensor
from torch.nn import functional

from kvtier.engine.models.linear import Linear
from kvtier.engine.models.rope import Rotation
from kvtier.gpu import cpu_kernels

__all__ = ["GatedMlp", "add_rms_norm", "rms_norm", "rotate", "silu_times"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm (Zhang & Sennrich, arXiv:1910.07467) over the last axis.

    Args:
        x: [..., D].
        weight: [D], in the dtype of `x`.
        eps: added to the mean square.

    Returns:
        Like `x`; normalised in float32, rounded to its dtype before the weight is applied, as checkpoints were trained.
    """
    if cpu_kernels.takes(x):
        return cpu_kernels.rms_norm(x, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def add_rms_norm(hidden: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`hidden + change` and its RMS norm, both [T, D]. `hidden` may be overwritten with the sum."""
    if cpu_kernels.takes(hidden, change) and change.is_contiguous():
        return hidden, cpu_kernels.add_rms_norm(hidden, change, weight, eps)
    hidden = hidden + change
    return hidden, rms_norm(hidden, weight, eps)


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Turn every head of `x` [T, heads, head_dim] by its token's angles (half-split RoPE). `x` may be overwritten."""
    cos, sin = turn
    if cpu_kernels.takes(x, cos):
        cpu_kernels.rotate(x, cos, sin)
        return x
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def silu_times(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of gate and up side by side: [T, 2 * D] -> [T, D]."""
    if cpu_kernels.takes(gate_up) and gate_up.is_contiguous():
        return cpu_kernels.silu_times(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


class GatedMlp:
    """down(silu(gate(x)) * up(x)) (SwiGLU: Shazeer, arXiv:2002.05202).

    Args:
        gate_up: [T, hidden] -> [T, 2 * intermediate], gate first.
        down: [T, intermediate] -> [T, hidden].
    """

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self._down(silu_times(self._gate_up(x)))
