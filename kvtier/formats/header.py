"""The 64 bytes in front of every encoded block, so that bytes of another format or shape are refused.

offset  0  magic "KVTF"       4  version            6  format id, 16 ASCII characters
       22  dtype             23  kind              24  layers          28  KV heads
       32  block size        36  head_dim          40  rope_dim        44  CRC-32 of the axis order
       48  group             50  rotation          52  rotation seed
       56  payload bytes     60  CRC-32 of bytes 0..59
"""

import struct
import zlib
from typing import NamedTuple

from kvtier.errors import FormatMismatch
from kvtier.layout import GroupKind, Layout
from kvtier.native.rows import DTYPE_CODES

__all__ = ["HEADER_BYTES", "BlockHeader", "describe", "payload_bytes"]

HEADER_BYTES = 64

_MAGIC = b"KVTF"
_VERSION = 1
_FIELDS = struct.Struct("<4sH16sBBIIIIIIHHII")
_CHECK = struct.Struct("<I")
_KINDS = {GroupKind.GQA: 1, GroupKind.MLA: 2}


class BlockHeader(NamedTuple):
    """What an encoded block says of itself; everything but `payload` follows from format and layout."""

    magic: bytes
    version: int
    format: bytes
    dtype: int
    kind: int
    layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    rope_dim: int
    order: int
    group: int
    rotation: int
    seed: int
    payload: int

    def pack(self) -> bytes:
        """The 64 bytes."""
        body = _FIELDS.pack(*self)
        return body + _CHECK.pack(zlib.crc32(body))


def describe(
    fmt: str, layout: Layout, group: int, payload: int, *, scale_group: int = 0, rotation: int = 0, seed: int = 0
) -> BlockHeader:
    """The header of a block of `layout.groups[group]`.

    Args:
        fmt: format id.
        layout: the raw block's.
        group: index of the layer group.
        payload: bytes after the header.
        scale_group: elements of K (or of the latent) that share a scale.
        rotation: elements of K, or where K is not rotated of V, that are rotated together.
        seed: of the rotation's signs.
    """
    chosen = layout.groups[group]
    return BlockHeader(
        magic=_MAGIC,
        version=_VERSION,
        format=fmt.encode("ascii").ljust(16, b"\0"),
        dtype=DTYPE_CODES[chosen.dtype],
        kind=_KINDS[chosen.kind],
        layers=len(chosen.layers),
        kv_heads=chosen.kv_heads,
        block_size=layout.block_size,
        head_dim=chosen.head_dim,
        rope_dim=chosen.rope_dim,
        order=zlib.crc32(chosen.order.encode()),
        group=scale_group,
        rotation=rotation,
        seed=seed,
        payload=payload,
    )


def payload_bytes(fmt: str, src: memoryview, expected: BlockHeader) -> int:
    """Check that `src` is one whole block with this header; returns the bytes after it.

    The expected `payload` is not compared: a format of fixed size does that itself.

    Raises:
        FormatMismatch: names the first field that differs.
    """
    if src.nbytes < HEADER_BYTES:
        raise FormatMismatch(f"{fmt}: {src.nbytes} bytes are no block, its header alone has {HEADER_BYTES}; drop it")
    head = bytes(src[:HEADER_BYTES])
    found = BlockHeader(*_FIELDS.unpack_from(head))
    if _CHECK.unpack_from(head, _FIELDS.size)[0] != zlib.crc32(head[: _FIELDS.size]):
        raise FormatMismatch(f"{fmt}: header {head[:22]!r} fails its checksum or is none at all; drop the block")
    for name, have, want in zip(BlockHeader._fields, found, expected, strict=True):
        if name != "payload" and have != want:
            raise FormatMismatch(f"{fmt}: the block's header says {name} {have!r}, expected {want!r}; drop the block")
    if HEADER_BYTES + found.payload != src.nbytes:
        raise FormatMismatch(
            f"{fmt}: block of {src.nbytes} bytes, its header says {HEADER_BYTES + found.payload}; drop the block"
        )
    return found.payload
