"""`bitsplit`: lossless. Exponents are entropy-coded, sign and mantissa bits, which are noise, are stored.

    payload = [stored bytes of each plane, uint32 x planes][stored planes][zstd frames]       or the raw block

A plane whose stored length is its own is stored, any other is a standard zstd frame. Elements are rotated left by
one bit and cut into bytes (`Kernels.split_planes`), so that the first plane is the exponent. A block that does not
get smaller is kept raw: its payload then has exactly the length of the raw block.
"""

import struct
import threading
from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvtier import native
from kvtier.errors import FormatMismatch
from kvtier.formats.base import check_encoded, check_room
from kvtier.formats.header import HEADER_BYTES, describe, payload_bytes
from kvtier.layout import DTYPE_BYTES, Layout

__all__ = ["BitsplitFormat"]

_SAMPLE = 4096
_NOISE_BITS = 7.6


class _Contexts(threading.local):
    """One pair of zstd contexts per thread: contexts shared by threads crash the process."""

    def __init__(self) -> None:
        # Matches are worthless among exponents: with next to no match search zstd is a fast Huffman coder, three
        # times faster than level 1, and smaller.
        parameters = zstandard.ZstdCompressionParameters(
            compression_level=1,
            strategy=zstandard.STRATEGY_FAST,
            min_match=7,
            hash_log=6,
            chain_log=6,
            search_log=1,
            window_log=17,
            target_length=0,
            write_content_size=True,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


class BitsplitFormat:
    """Byte planes and zstd. Implements `kvtier.formats.Format`; variable size, any layout, opaque pages too."""

    id = "bitsplit"
    exact = True
    fidelity = 100
    sink = "bitsplit"

    def size(self, layout: Layout, group: int = 0) -> None:
        """None: it depends on the data."""
        return

    def bound(self, layout: Layout, group: int = 0) -> int:
        """Bytes of a block that does not compress."""
        return HEADER_BYTES + layout.block_bytes(group)

    def exact_for(self, layout: Layout, group: int = 0) -> bool:
        """Always."""
        return True

    def encode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> int:
        """Encode a raw block. Raises `FormatMismatch` on wrong lengths."""
        check_encoded(self.id, src, layout, out, self.bound(layout, group), group)
        room = np.frombuffer(out, np.uint8)[HEADER_BYTES : HEADER_BYTES + src.nbytes]
        payload = _encode_planes(src, room, DTYPE_BYTES[layout.groups[group].dtype])
        if payload >= src.nbytes:
            np.copyto(room, np.frombuffer(src, np.uint8))
            payload = src.nbytes
        header = describe(self.id, layout, group, payload).pack()
        np.frombuffer(out, np.uint8)[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        return HEADER_BYTES + payload

    def decode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> None:
        """Decode into a raw block. Raises `FormatMismatch`, with nothing written, for what is no such block."""
        payload = payload_bytes(self.id, src, describe(self.id, layout, group, 0))
        raw = layout.block_bytes(group)
        check_room(self.id, out, raw)
        body, target = np.frombuffer(src, np.uint8)[HEADER_BYTES:], np.frombuffer(out, np.uint8, raw)
        if payload == raw:
            np.copyto(target, body)
            return
        planes = _decode_planes(body, DTYPE_BYTES[layout.groups[group].dtype], raw)
        native.kernels().join_planes(planes, target)


def _encode_planes(src: memoryview, room: NDArray[np.uint8], width: int) -> int:
    """Write the payload of split planes into `room`; returns its length, that of `room` if it does not fit."""
    raw = np.frombuffer(src, np.uint8)
    length = raw.size // width
    table = struct.Struct(f"<{width}I")
    packable = _packable(raw, width)
    kept = [place for place in range(width) if place not in packable]
    at = table.size + len(kept) * length
    if at >= room.size:
        return room.size
    scratch = np.empty((width, length), np.uint8)
    planes = list(scratch)
    for order, place in enumerate(kept):
        planes[place] = room[table.size + order * length :][:length]
    native.kernels().split_planes(raw, tuple(planes))
    sizes = [length] * width
    for place in packable:
        frame = _compress(planes[place])
        # A frame as long as its plane could not be told from a stored plane.
        if len(frame) >= length or at + len(frame) >= room.size:
            return room.size
        room[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
        sizes[place] = len(frame)
        at += len(frame)
    room[: table.size] = np.frombuffer(table.pack(*sizes), np.uint8)
    return at


def _decode_planes(body: NDArray[np.uint8], width: int, raw: int) -> tuple[memoryview | NDArray[np.uint8], ...]:
    table = struct.Struct(f"<{width}I")
    length = raw // width
    sizes = table.unpack_from(body.data) if body.size >= table.size else ()
    if table.size + sum(sizes) != body.size or not sizes:
        raise FormatMismatch(f"bitsplit: planes of {sizes} bytes in a payload of {body.size}; drop the block")
    planes: dict[int, memoryview | NDArray[np.uint8]] = {}
    at = table.size
    for place in sorted(range(width), key=lambda place: sizes[place] != length):
        piece = body[at : at + sizes[place]]
        planes[place] = piece if sizes[place] == length else _decompress(piece, length)
        at += sizes[place]
    return tuple(planes[place] for place in range(width))


def _packable(raw: NDArray[np.uint8], width: int) -> Sequence[int]:
    """The planes to compress: those that are far from noise in a sample (exponents; all, where zeros abound)."""
    step = max(1, raw.size // width // _SAMPLE)
    sample = np.ascontiguousarray(raw[: raw.size // width * width].reshape(-1, width)[::step])
    planes = np.empty((width, len(sample)), np.uint8)
    native.kernels().split_planes(sample.reshape(-1), tuple(planes))
    return [place for place in range(width) if _entropy(planes[place]) < _NOISE_BITS]


def _entropy(plane: NDArray[np.uint8]) -> float:
    counts = np.bincount(plane, minlength=256)
    shares = counts[counts > 0] / plane.size
    # The plug-in estimate is low by (distinct - 1) / 2n nats (Miller 1955).
    return float(-(shares * np.log2(shares)).sum() + (shares.size - 1) / (2 * plane.size * np.log(2)))


def _compress(plane: NDArray[np.uint8]) -> bytes:
    return _contexts.compressor.compress(plane.data)


def _decompress(frame: NDArray[np.uint8], length: int) -> memoryview:
    try:
        # Before decompressing: a damaged frame must not make us allocate what it says.
        stated = zstandard.get_frame_parameters(frame.data).content_size
        plane = _contexts.decompressor.decompress(frame.data, allow_extra_data=False) if stated == length else b""
    except zstandard.ZstdError as error:
        raise FormatMismatch(f"bitsplit: damaged zstd frame ({error}); drop the block") from error
    if len(plane) != length:
        raise FormatMismatch(f"bitsplit: a plane of {stated} bytes, expected {length}; drop the block")
    return memoryview(plane)
