"""YaRN: longer contexts by slowing down long wavelengths only (Peng et al., arXiv:2309.00071). Knows no torch."""

import math
from dataclasses import dataclass

from kvtier.errors import ModelError

__all__ = ["YarnScaling"]


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN's parameters, as in `config.json`.

    Wavelengths that turn `beta_fast` times or more within the original context stay as they are, those that turn
    `beta_slow` times or less are stretched by `factor`, and between the two there is a ramp.

    Args:
        factor: how many times longer the context becomes.
        original_max_positions: the context that the model was trained with.
        beta_fast: turns from which a wavelength is kept.
        beta_slow: turns up to which it is stretched whole.
        mscale: temperature of rotated queries and keys, 0 where the file names none.
        mscale_all_dim: temperature of all scores (DeepSeek-V2), 0 where the file names none.
        attention_factor: what rotated queries and keys are multiplied by, None to follow from the temperatures.
        truncate: the ramp's ends are whole dimensions.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_positions", "beta_fast", "beta_slow"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelError(f"YaRN: {name} = {getattr(self, name)}, expected a positive number")

    def divisors(self, dim: int, theta: float) -> tuple[float, ...]:
        """What each of the dim / 2 plain frequencies theta ** (-2 i / dim) is divided by."""
        low = self._dimension(self.beta_fast, dim, theta)
        high = self._dimension(self.beta_slow, dim, theta)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low or 0.001
        stretched = (min(max((at - low) / width, 0.0), 1.0) for at in range(dim // 2))
        return tuple(1.0 / (share / self.factor + 1.0 - share) for share in stretched)

    def _dimension(self, turns: float, dim: int, theta: float) -> float:
        """The place among the frequencies, not rounded, of the wavelength that turns so often in the old context."""
        return dim * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    @property
    def rotation_scale(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _temperature(self.factor, self.mscale) / _temperature(self.factor, self.mscale_all_dim)
        return _temperature(self.factor, 1.0)

    @property
    def score_scale(self) -> float:
        """What all attention scores are multiplied by, beside one over the root of the head's width."""
        return _temperature(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
