"""Seals: four bytes behind every value of the index, of the value and its key.

LMDB does not notice when a byte in its file changes, and nor would who reads a record: the checksum in it covers the
block's bytes, key, namespace and format, not where the bytes lie, whether they are exact, and what they build upon.
"""

import xxhash

from kvtier.errors import CorruptObject

__all__ = ["SEAL_BYTES", "seal", "unseal", "unsealed"]

SEAL_BYTES = 4


def seal(key: bytes, value: bytes) -> bytes:
    """What is stored under a key for a value: the value and the head of the xxh3_64 of both."""
    return value + xxhash.xxh3_64_digest(key + value)[:SEAL_BYTES]


def unseal(key: bytes, data: bytes) -> bytes | None:
    """The value that was stored under the key; None if either is not what it was."""
    value = data[:-SEAL_BYTES]
    return value if xxhash.xxh3_64_digest(key + value)[:SEAL_BYTES] == data[-SEAL_BYTES:] else None


def unsealed(key: bytes, data: bytes) -> bytes:
    """The same for what the index cannot do without.

    Raises:
        CorruptObject: either is not what it was.
    """
    value = unseal(key, data)
    if value is None:
        raise CorruptObject(f"its entry {key.hex()} was altered")
    return value
