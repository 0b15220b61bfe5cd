"""The random-sign Hadamard rotation (QuaRot, Ashkboos et al. 2024): spreads a row's outliers over all its elements.

A row x is stored as H S x / sqrt(n) up to a power of two: S is a diagonal of fixed random signs, H the n x n
Walsh-Hadamard matrix. It is orthogonal and needs no data. H is not normalised: the factor 1/n that undoes it is
split into two powers of two, one carried by the signs of each direction, so that rotating costs no rounding beyond
that of the additions.
"""

import functools
import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROTATION_SEED", "Rotation", "rotation", "span"]

ROTATION_SEED = 1


class Rotation(NamedTuple):
    """Signs of a rotated row, float32 [width] each: multiplied in before encoding and after decoding."""

    forward: NDArray[np.float32]
    backward: NDArray[np.float32]


def span(width: int) -> int:
    """The largest power of two that divides a width: so many elements are rotated together."""
    return width & -width


@functools.cache
def rotation(width: int, elements: int, seed: int = ROTATION_SEED) -> Rotation:
    """The signs for rows of `width`, rotated by `elements` (a power of two) at a time."""
    digest = hashlib.shake_128(f"kvtier.rotation.{seed}.{width}".encode()).digest(-(-width // 8))
    signs = 1 - 2 * np.unpackbits(np.frombuffer(digest, np.uint8), count=width).astype(np.float32)
    bits = elements.bit_length() - 1
    both = Rotation(signs * np.float32(2.0 ** -(bits // 2)), signs * np.float32(2.0 ** -(bits - bits // 2)))
    for array in both:
        array.flags.writeable = False
    return both
