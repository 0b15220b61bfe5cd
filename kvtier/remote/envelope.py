r"""The envelope: what a record says of itself, ahead of the block's bytes.

offset  bytes  little-endian
0       4      magic and version, b"kvt\x01"
4       2      flags: 1 exact, 2 has a parent
6       2      zero
8       4      depth, signed
12      4      bytes of the block
16      16     format id, ASCII, zero-padded
32      16     parent's store key, or zeros
48      16     `tiers.block_checksum` of the bytes
64      32     namespace digest
96      8      xxh3_64 of the record's store key and the 96 bytes before: the seal

The checksum guards the bytes, the seal the rest, and both are bound to the key: an intact record of another block
that lies under this one's name fails them too.
"""

import struct
from typing import NamedTuple

import xxhash

from kvtier.keys import STORE_KEY_BYTES, namespace_digest, namespace_index
from kvtier.tiers import BlockRef

__all__ = ["ENVELOPE_BYTES", "NAME_BYTES", "Envelope", "pack", "record_name", "unpack"]

ENVELOPE_BYTES = 104
NAME_BYTES = STORE_KEY_BYTES + 1

_FIELDS = struct.Struct("<4sHHiI16s16s16s32s")
_SEAL = struct.Struct("<Q")
_MAGIC = b"kvt\x01"
_EXACT, _PARENT = 1, 2
_NO_PARENT = bytes(16)
_CLASS = {True: b"e", False: b"l"}


class Envelope(NamedTuple):
    """A record as it says of itself. checksum: of `nbytes` bytes in format `fmt`."""

    ref: BlockRef
    fmt: str
    nbytes: int
    checksum: bytes


def record_name(key: bytes, *, exact: bool) -> bytes:
    """What the record of a block is called: its store key, and whether it is exact.

    So an exact record never has to wait for a lossy one to go, and who wants exact blocks asks for nothing else.
    """
    return key + _CLASS[exact]


def pack(ref: BlockRef, fmt: str, nbytes: int, checksum: bytes) -> bytes:
    """The envelope's bytes."""
    flags = (_EXACT if ref.exact else 0) | (_PARENT if ref.parent is not None else 0)
    parent = _NO_PARENT if ref.parent is None else ref.parent
    fields = _FIELDS.pack(_MAGIC, flags, 0, ref.depth, nbytes, fmt.encode(), parent, checksum, namespace_digest(ref.ns))
    return fields + _SEAL.pack(xxhash.xxh3_64_intdigest(ref.key + fields))


def unpack(name: bytes, head: bytes | memoryview) -> Envelope | None:
    """What the envelope of the record called `name` says; None: it is none, damaged, or another record's."""
    if len(head) != ENVELOPE_BYTES:
        return None
    key, fields = name[:-1], bytes(head[: _FIELDS.size])
    if _SEAL.unpack_from(head, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(key + fields):
        return None
    magic, flags, _, depth, nbytes, fmt, parent, checksum, digest = _FIELDS.unpack(fields)
    exact = bool(flags & _EXACT)
    if magic != _MAGIC or record_name(key, exact=exact) != name:
        return None
    ref = BlockRef(key, namespace_index(digest), depth, parent if flags & _PARENT else None, exact)
    return Envelope(ref, fmt.rstrip(b"\0").decode("ascii", "replace"), nbytes, checksum)
