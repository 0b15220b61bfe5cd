"""Rotary position embedding (Su et al., arXiv:2104.09864), half-split as HF checkpoints have it."""

import math

import torch
from torch import Tensor

from kvtier.engine.models.config import Llama3Scaling, ModelConfig, RopeFactors
from kvtier.engine.models.yarn import YarnScaling

__all__ = ["Rotation", "inverse_frequencies", "rotation"]

Rotation = tuple[Tensor, Tensor]
"""(cos, signed sin), each [T, 1, head_dim]: `x * cos + x.roll(head_dim / 2) * sin` turns x."""


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32 [rope_dim / 2] radians per position, scaled as the config asks."""
    exponent = torch.arange(0, config.rope_dim, 2, dtype=torch.float32) / config.rope_dim
    plain = 1.0 / (config.rope_theta**exponent)
    match config.rope_scaling:
        case None:
            return plain
        case RopeFactors(factors):
            return plain / torch.tensor(factors, dtype=torch.float32)
        case YarnScaling() as scaling:
            return plain / torch.tensor(scaling.divisors(config.rope_dim, config.rope_theta), dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend between."""
    wavelength = 2 * math.pi / plain
    context = scaling.original_max_positions
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / scaling.factor + blend * plain


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Rotation:
    """Cosines and signed sines of every token's angles.

    Args:
        positions: int64 [T].
        frequencies: float32 [head_dim / 2], on the same device.
        dtype: of the result; angles are computed in float32.
        scale: of both (YaRN).
    """
    angles = positions[:, None, None].float() * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
