r"""What an object is: a run of records, in chain order, behind a table of where each of them lies.

offset            bytes  little-endian
0                 4      magic and version, b"kvr\x01"
4                 4      records, n
8                 8      bytes of the whole object
16                144 n  per record: 17 name, 7 zero, 8 offset, 8 length, 104 envelope
16 + 144 n        8      xxh3_64 of all before: the seal
24 + 144 n               the records' bytes, one after the other

The seal guards the table; each record's envelope has a seal of its own, bound to its key, and guards its bytes.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvtier.remote.envelope import ENVELOPE_BYTES, NAME_BYTES

__all__ = ["Record", "Table", "pack_table", "table_bytes", "unpack_table"]

_MAGIC = b"kvr\x01"
_START = struct.Struct("<4sIQ")
_ROW = struct.Struct(f"<{NAME_BYTES}s7xQQ{ENVELOPE_BYTES}s")
_SEAL = struct.Struct("<Q")


class Record(NamedTuple):
    """One record of an object: where its bytes lie, and its envelope."""

    name: bytes
    offset: int
    nbytes: int
    head: bytes


class Table(NamedTuple):
    """What an object says of itself. nbytes: of the whole object. records: in chain order."""

    nbytes: int
    records: tuple[Record, ...]


def table_bytes(records: int) -> int:
    """Bytes of the table of so many records: the first record's offset."""
    return _START.size + records * _ROW.size + _SEAL.size


def pack_table(names: Sequence[bytes], heads: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """The table of these records, whose bytes follow it in this order."""
    offset = table_bytes(len(names))
    packed = bytearray(_START.pack(_MAGIC, len(names), offset + sum(sizes)))
    for name, head, nbytes in zip(names, heads, sizes, strict=True):
        packed += _ROW.pack(name, offset, nbytes, head)
        offset += nbytes
    return bytes(packed + _SEAL.pack(xxhash.xxh3_64_intdigest(packed)))


def unpack_table(last: bytes, data: bytes, nbytes: int, run: int) -> Table | None:
    """The table of the object called `last`; None: it is damaged, cut off, or another object's.

    Args:
        last: name of the object's last record.
        data: the object's leading `table_bytes(run)` bytes, or fewer.
        nbytes: of the object, as the store says.
        run: records that it must have.
    """
    if len(data) != table_bytes(run) or nbytes < len(data):
        return None
    sealed = data[: -_SEAL.size]
    magic, count, whole = _START.unpack_from(data)
    if (magic, count, whole) != (_MAGIC, run, nbytes) or _SEAL.unpack(data[-_SEAL.size :])[0] != (
        xxhash.xxh3_64_intdigest(sealed)
    ):
        return None
    records = tuple(Record(*row) for row in _ROW.iter_unpack(sealed[_START.size :]))
    # Sealed by whoever wrote it, and yet read from where it says only if that lies within the object, in order.
    end = len(data)
    for record in records:
        if record.offset != end:
            return None
        end += record.nbytes
    return Table(nbytes, records) if end == nbytes and records[-1].name == last else None
