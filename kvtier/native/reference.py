"""The row kernels in numpy: always there, and what the compiled ones must equal byte for byte.

Every step is one IEEE operation in float32 with a fixed order of operands, so that equality is exact.
"""

from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.native.rows import (
    LLOYD_LEVELS,
    LLOYD_THRESHOLDS,
    MAX_WIDTH,
    Buffer,
    Codec,
    Run,
    limit,
    meta_bytes,
    record_bytes,
)

__all__ = ["decode_rows", "encode_rows", "join_planes", "split_planes"]

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]

_STORAGE = (np.dtype("<f4"), np.dtype("<u2"), np.dtype("<f2"), np.dtype("u1"), np.dtype("u1"))
_FLOAT32, _BFLOAT16, _FLOAT16 = 0, 1, 2
_LANES = 16
_HALF_MAX = np.float32(65504)


def encode_rows(codec: int, dtype: int, raw: Buffer, coded: Buffer, run: Run, signs: Floats | None, /) -> int:
    """See `Kernels.encode_rows`."""
    kind = _check(codec, dtype, run, signs)
    elements = _raw_rows(raw, dtype, run)
    records = _coded_rows(coded, kind, run, elements.itemsize)
    if kind is Codec.COPY:
        records[...] = np.ascontiguousarray(elements).view(np.uint8).reshape(records.shape)
        return -1
    values = _to_float(elements, dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        if signs is not None:
            values = _hadamard(values * signs, run.rotation)
        fits = (np.abs(values) <= np.float32(limit(kind))).all(axis=-1)
    if not fits.all():
        return int(np.argmin(fits.reshape(-1)))
    groups = values.reshape(run.outer, run.inner, run.width // run.group, run.group)
    meta, codes = _ENCODERS[kind](groups)
    split = meta_bytes(kind, run.width, run.group)
    records[..., :split] = np.ascontiguousarray(meta).view(np.uint8).reshape(run.outer, run.inner, split)
    codes = codes.reshape(run.outer, run.inner, run.width)
    records[..., split:] = _pack(codes) if kind in (Codec.INT4, Codec.LLOYD4) else codes
    return -1


def decode_rows(codec: int, dtype: int, coded: Buffer, raw: Buffer, run: Run, signs: Floats | None, /) -> None:
    """See `Kernels.decode_rows`."""
    kind = _check(codec, dtype, run, signs)
    elements = _raw_rows(raw, dtype, run)
    records = _coded_rows(coded, kind, run, elements.itemsize)
    if kind is Codec.COPY:
        elements[...] = np.ascontiguousarray(records).view(elements.dtype).reshape(elements.shape)
        return
    split = meta_bytes(kind, run.width, run.group)
    meta = np.ascontiguousarray(records[..., :split]).view("<f2").astype(np.float32)
    codes = records[..., split:]
    if kind in (Codec.INT4, Codec.LLOYD4):
        codes = _unpack(codes, run.width)
    shape = (run.outer, run.inner, run.width // run.group, -1)
    values = _DECODERS[kind](meta.reshape(shape), codes.reshape(shape)).reshape(elements.shape)
    if signs is not None:
        values = _hadamard(values, run.rotation) * signs
    elements[...] = _from_float(values, dtype)


def split_planes(raw: Buffer, planes: tuple[Buffer, ...], /) -> None:
    """See `Kernels.split_planes`."""
    words: NDArray[Any] = _words(raw, planes)
    width = len(planes)
    if width > 1:
        words = (words << 1) | (words >> (8 * width - 1))
    for place, plane in enumerate(planes):
        np.copyto(np.frombuffer(plane, np.uint8), words >> (8 * (width - 1 - place)), casting="unsafe")


def join_planes(planes: tuple[Buffer, ...], raw: Buffer, /) -> None:
    """See `Kernels.join_planes`."""
    words = _words(raw, planes)
    width = len(planes)
    joined = np.zeros(words.size, words.dtype)
    for plane in planes:
        if width > 1:
            joined <<= 8
        joined |= np.frombuffer(plane, np.uint8)
    words[...] = joined if width == 1 else (joined >> 1) | (joined << (8 * width - 1))


def _words(raw: Buffer, planes: tuple[Buffer, ...]) -> NDArray[np.unsignedinteger]:
    width = len(planes)
    if width not in (1, 2, 4):
        raise ValueError(f"{width} planes: expected 1, 2 or 4")
    nbytes = np.frombuffer(raw, np.uint8).size
    if any(np.frombuffer(plane, np.uint8).size * width != nbytes for plane in planes):
        raise ValueError(f"planes do not add up to {nbytes} bytes")
    return np.frombuffer(raw, f"<u{width}")


def _check(codec: int, dtype: int, run: Run, signs: Floats | None) -> Codec:
    kind = Codec(codec)
    if not 0 <= dtype < len(_STORAGE) or (kind is not Codec.COPY and dtype > _FLOAT16):
        raise ValueError(f"dtype {dtype} for codec {kind.name}")
    if min(run[:5]) < 1 or min(run[5:]) < 0 or run.width > MAX_WIDTH or run.width % run.group:
        raise ValueError(f"{run}: negative, too wide or uneven")
    if run.rotation & (run.rotation - 1) or run.width % run.rotation:
        raise ValueError(f"rotation {run.rotation}: expected a power of two that divides {run.width}")
    if (signs is not None) != (run.rotation > 1) or (signs is not None and signs.size != run.width):
        raise ValueError(f"signs are for rotated rows only, {run.width} of them")
    return kind


def _raw_rows(raw: Buffer, dtype: int, run: Run) -> NDArray[np.generic]:
    storage = _STORAGE[dtype]
    shape, strides = (run.outer, run.inner, run.width), (run.raw_outer, run.raw_row, storage.itemsize)
    return _rows(raw, shape, storage, run.raw_offset, strides)


def _coded_rows(coded: Buffer, kind: Codec, run: Run, itemsize: int) -> Bytes:
    shape = (run.outer, run.inner, record_bytes(kind, run.width, run.group, itemsize))
    rows = _rows(coded, shape, np.dtype(np.uint8), run.coded_offset, (run.coded_outer, run.coded_row, 1))
    return cast("Bytes", rows)


def _rows(
    buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype[np.generic], offset: int, strides: tuple[int, ...]
) -> NDArray[np.generic]:
    # In Python's integers: numpy's own check overflows.
    end = offset + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True)) + dtype.itemsize
    if end > np.frombuffer(buffer, np.uint8).size:
        raise ValueError(f"rows {shape} at {offset} with strides {strides} lie outside the buffer")
    return np.ndarray(shape, dtype, buffer, offset, strides)


def _to_float(elements: NDArray[np.generic], dtype: int) -> Floats:
    if dtype == _BFLOAT16:
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return elements.astype(np.float32)


def _from_float(values: Floats, dtype: int) -> NDArray[np.generic]:
    if dtype == _BFLOAT16:
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    if dtype == _FLOAT16:
        return np.clip(values, -_HALF_MAX, _HALF_MAX).astype("<f2")
    return values


def _hadamard(values: Floats, span: int) -> Floats:
    """The unnormalised Walsh-Hadamard transform of every `span` consecutive elements."""
    shape, half = values.shape, 1
    while half < span:
        pairs = values.reshape(-1, 2, half)
        values = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1)
        half *= 2
    return values.reshape(shape)


def _scale(span: Floats, top: float, room: float) -> NDArray[np.float16]:
    """float16 steps for codes up to `top`: the nearest, or the next where `span` would pass `room` steps."""
    scale = (span / np.float32(top)).astype(np.float16)
    short = scale.astype(np.float32) * np.float32(room) < span
    return np.where(short, np.nextafter(scale, np.float16(np.inf)), scale)


def _inverse(scale: NDArray[np.float16]) -> Floats:
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)


def _encode_int8(x: Floats) -> tuple[NDArray[np.float16], Bytes]:
    scale = _scale(np.abs(x).max(axis=-1, keepdims=True), 127, 127.49)
    return scale, np.rint(x * _inverse(scale)).astype(np.int8).view(np.uint8)


def _decode_int8(meta: Floats, codes: Bytes) -> Floats:
    return codes.view(np.int8).astype(np.float32) * meta


def _encode_fp8(x: Floats) -> tuple[NDArray[np.float16], Bytes]:
    scale = _scale(np.abs(x).max(axis=-1, keepdims=True), 448, 460)
    scaled = x * _inverse(scale)
    bits = scaled.view(np.uint32)
    magnitude = np.abs(scaled)
    kept = magnitude.view(np.uint32)
    normal = ((kept + np.uint32(0x7FFFF) + ((kept >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - np.uint32(960)
    # Below the smallest normal, 2**-6, codes count steps of 2**-9: the last bit of a float32 in [2**14, 2**15).
    shift = np.float32(16384)
    subnormal = (magnitude + shift).view(np.uint32) - shift.view(np.uint32)
    code = np.where(magnitude < np.float32(2**-6), subnormal, normal)
    return scale, (code | ((bits >> np.uint32(24)) & np.uint32(0x80))).astype(np.uint8)


def _fp8_values() -> Floats:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


_FP8_VALUES = _fp8_values()


def _decode_fp8(meta: Floats, codes: Bytes) -> Floats:
    return _FP8_VALUES[codes] * meta


def _encode_int4(x: Floats) -> tuple[NDArray[np.float16], Bytes]:
    # Adding zero turns -0 into 0: which of the two a minimum returns is undefined.
    low = (x.min(axis=-1, keepdims=True) + np.float32(0)).astype(np.float16)
    wide = low.astype(np.float32)
    span = np.maximum(x.max(axis=-1, keepdims=True) - wide, np.float32(0))
    scale = _scale(span, 15, 15.49)
    codes = np.rint(np.clip((x - wide) * _inverse(scale), np.float32(0), np.float32(15)))
    return np.concatenate((scale, low), axis=-1), codes.astype(np.uint8)


def _decode_int4(meta: Floats, codes: Bytes) -> Floats:
    return codes.astype(np.float32) * meta[..., :1] + meta[..., 1:]


def _encode_lloyd4(x: Floats) -> tuple[NDArray[np.float16], Bytes]:
    rms = np.sqrt(_lane_sum(x * x) / np.float32(x.shape[-1]))
    codes = np.zeros(x.shape, np.uint8)
    for threshold in LLOYD_THRESHOLDS:
        codes += x > threshold * rms
    levels = LLOYD_LEVELS[codes]
    # The gain with the least squared error for these codes.
    return (_lane_sum(x * levels) / _lane_sum(levels * levels)).astype(np.float16), codes


def _decode_lloyd4(meta: Floats, codes: Bytes) -> Floats:
    return LLOYD_LEVELS[codes] * meta


def _lane_sum(x: Floats) -> Floats:
    """Sums over the last axis in 16 interleaved lanes: the order in which vector units add."""
    padded = np.zeros((*x.shape[:-1], -(-x.shape[-1] // _LANES) * _LANES), np.float32)
    padded[..., : x.shape[-1]] = x
    rows = padded.reshape(*x.shape[:-1], -1, _LANES)
    total = np.zeros((*x.shape[:-1], _LANES), np.float32)
    for at in range(rows.shape[-2]):
        total += rows[..., at, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return cast("Floats", total)


def _pack(codes: Bytes) -> Bytes:
    half = -(-codes.shape[-1] // 2)
    packed = codes[..., :half].copy()
    packed[..., : codes.shape[-1] - half] |= codes[..., half:] << np.uint8(4)
    return packed


def _unpack(packed: Bytes, width: int) -> Bytes:
    return np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)[..., :width]


_ENCODERS = {
    Codec.INT8: _encode_int8,
    Codec.FP8: _encode_fp8,
    Codec.INT4: _encode_int4,
    Codec.LLOYD4: _encode_lloyd4,
}
_DECODERS = {
    Codec.INT8: _decode_int8,
    Codec.FP8: _decode_fp8,
    Codec.INT4: _decode_int4,
    Codec.LLOYD4: _decode_lloyd4,
}
