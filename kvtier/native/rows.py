"""What every implementation of the row kernels speaks in: codecs, element types and where rows lie.

A row is `width` elements of one token and head (or one MLA latent), split into groups that share a scale.
Its record is `[meta of each group][codes]`, without padding:

    COPY    no meta                       the elements as they are
    INT8    float16 scale                 int8, x = scale * code, code in [-127, 127]
    FP8     float16 scale                 float8_e4m3fn, x = scale * code
    INT4    float16 scale, float16 low    nibbles, x = low + scale * code, code in [0, 15]
    LLOYD4  float16 gain                  nibbles, x = gain * LLOYD_LEVELS[code]

A row of nibbles holds element i in the low half of byte i and element i + ceil(width / 2) in its high half.
"""

import enum
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DTYPE_CODES",
    "INTERFACE",
    "LLOYD_LEVELS",
    "LLOYD_THRESHOLDS",
    "MAX_WIDTH",
    "Buffer",
    "Codec",
    "Kernels",
    "Run",
    "limit",
    "meta_bytes",
    "record_bytes",
]

INTERFACE = 1
"""Changes with the signatures below; a compiled extension of another number is not used."""

MAX_WIDTH = 8192

Buffer: TypeAlias = memoryview | bytes | NDArray[np.uint8]

DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "float8_e4m3fn": 3, "int8": 4}


class Codec(enum.IntEnum):
    """How a row is coded."""

    COPY = 0
    INT8 = 1
    FP8 = 2
    INT4 = 3
    LLOYD4 = 4


_UPPER_LEVELS = (0.1283950, 0.3880482, 0.6567591, 0.9423405, 1.2562309, 1.6180664, 2.0690336, 2.7325896)

LLOYD_LEVELS: NDArray[np.float32] = np.array([-x for x in reversed(_UPPER_LEVELS)] + list(_UPPER_LEVELS), np.float32)
"""The 16 levels that code a standard Gaussian with the least squared error (Lloyd 1982, Max 1960)."""

LLOYD_THRESHOLDS: NDArray[np.float32] = (LLOYD_LEVELS[1:] + LLOYD_LEVELS[:-1]) * np.float32(0.5)

_META_BYTES = {Codec.COPY: 0, Codec.INT8: 2, Codec.FP8: 2, Codec.INT4: 4, Codec.LLOYD4: 2}
_HALF_MAX = 65504.0
# The largest magnitude whose scale, low or gain is a finite float16.
_LIMITS = {
    Codec.COPY: float("inf"),
    Codec.INT8: 127 * _HALF_MAX,
    Codec.FP8: 448 * _HALF_MAX,
    Codec.INT4: _HALF_MAX,
    Codec.LLOYD4: 32768.0,
}


class Run(NamedTuple):
    """Rows of a block: `outer` times `inner` of them, evenly spaced in the raw and in the coded block.

    Widths count elements, everything after `rotation` bytes. group: elements that share a scale, divides
    width. rotation: elements that are rotated together, a power of two that divides width; 1 for none.
    """

    outer: int
    inner: int
    width: int
    group: int
    rotation: int
    raw_offset: int
    raw_outer: int
    raw_row: int
    coded_offset: int
    coded_outer: int
    coded_row: int


class Kernels(Protocol):
    """The hot loops. All check every length before they touch a byte, and release the GIL."""

    def encode_rows(
        self, codec: int, dtype: int, raw: Buffer, coded: Buffer, run: Run, signs: NDArray[np.float32] | None, /
    ) -> int:
        """Code rows of `raw` into `coded`.

        Args:
            codec: a `Codec`.
            dtype: element type of `raw`, a value of `DTYPE_CODES`.
            raw: a whole raw block.
            coded: a whole encoded block.
            run: where the rows lie in both.
            signs: float32 [width], multiplied in before the rotation; None if `run.rotation` is 1.

        Returns:
            -1, or the number of the first row with a value that is not finite or beyond `limit(codec)`;
            `coded` is undefined then.

        Raises:
            ValueError: rows lie outside the buffers, or codec, dtype and run do not belong together.
        """
        ...

    def decode_rows(
        self, codec: int, dtype: int, coded: Buffer, raw: Buffer, run: Run, signs: NDArray[np.float32] | None, /
    ) -> None:
        """Undo `encode_rows`; `signs` are multiplied in after the rotation. float16 saturates at its maximum."""
        ...

    def split_planes(self, raw: Buffer, planes: tuple[Buffer, ...], /) -> None:
        """Deal the bytes of elements out to planes, most significant first.

        The element width is the number of planes: 1, 2 or 4. Wider elements are first rotated left by one bit,
        which brings the whole exponent of a float into the first plane and its sign into the last.
        """
        ...

    def join_planes(self, planes: tuple[Buffer, ...], raw: Buffer, /) -> None:
        """Undo `split_planes`."""
        ...


def limit(codec: Codec) -> float:
    """The largest magnitude that a codec can express (after rotation, if the row is rotated)."""
    return _LIMITS[codec]


def record_bytes(codec: Codec, width: int, group: int, itemsize: int) -> int:
    """Bytes of one row's record."""
    if codec is Codec.COPY:
        return width * itemsize
    codes = -(-width // 2) if codec in (Codec.INT4, Codec.LLOYD4) else width
    return meta_bytes(codec, width, group) + codes


def meta_bytes(codec: Codec, width: int, group: int) -> int:
    """Bytes of scales, lows and gains in front of one row's codes."""
    return width // group * _META_BYTES[codec]
