"""The header before every message.

offset  bytes  little-endian
     0      4  magic "KVTD"
     4      1  version of the protocol
     5      1  opcode
     6      2  flags
     8      4  request id, chosen by the client, repeated in the answer
    12      4  length of the head (msgpack), at most 1 MiB
    16      8  length of the body (block bytes), which follows the head
"""

import enum
import struct
from typing import NamedTuple

from kvtier.errors import KVTierError

__all__ = ["HEADER_BYTES", "MAX_HEAD", "VERSION", "Flag", "Header", "Opcode", "WireError", "frame", "read_header"]

MAGIC = b"KVTD"
VERSION = 1
MAX_HEAD = 1 << 20

_HEADER = struct.Struct("<4sBBHIIQ")
HEADER_BYTES = _HEADER.size


class WireError(KVTierError):
    """These bytes are no message of this protocol: whoever sent them cannot be understood from here on."""


class Opcode(enum.IntEnum):
    """What a message asks for, or answers."""

    HELLO = 1
    MATCH = 2
    MATCH_TOKENS = 3
    GET = 4
    PUT = 5
    DELETE = 6
    PIN = 7
    UNPIN = 8
    PREFETCH = 9
    PREFETCHED = 10
    CANCEL = 11
    HINT = 12
    END_SESSION = 13
    NAMESPACES = 14
    CREATE = 15
    STATS = 16
    SHARE = 17
    LEASE = 18
    RELEASE = 19
    STAGE = 20
    LIST = 21


class Flag(enum.IntEnum):
    """Bits. ANSWER: from the service. ERROR: the head is an `Error`. MORE: another answer to the same request follows.
    QUIET: of a request: no answer is wanted, not even an error. They combine to plain numbers, ten times faster than
    an `IntFlag`'s.
    """

    NONE = 0
    ANSWER = 1
    ERROR = 2
    MORE = 4
    QUIET = 8


_FLAGS = Flag.ANSWER | Flag.ERROR | Flag.MORE | Flag.QUIET


class Header(NamedTuple):
    """A message's header. `head` and `body` are lengths in bytes; `opcode` may be one that nobody knows."""

    opcode: int
    flags: int
    request: int
    head: int
    body: int


def frame(opcode: int, flags: int, request: int, head: bytes, body: int = 0) -> bytes:
    """Header and head of a message whose body of `body` bytes is sent after them.

    Raises:
        WireError: the head is longer than `MAX_HEAD`.
    """
    if len(head) > MAX_HEAD:
        raise WireError(f"a head of {len(head)} bytes: at most {MAX_HEAD}; send fewer keys at once")
    return _HEADER.pack(MAGIC, VERSION, opcode, flags, request, len(head), body) + head


def read_header(data: bytes | bytearray | memoryview) -> Header:
    """The header in these `HEADER_BYTES` bytes.

    Raises:
        WireError: another magic, version or flag, or a head that is too long.
    """
    magic, version, opcode, flags, request, head, body = _HEADER.unpack(data)
    if magic != MAGIC:
        raise WireError(f"a message begins with {magic!r}: expected {MAGIC!r}; this is another protocol")
    if version != VERSION:
        raise WireError(f"protocol version {version}: expected {VERSION}")
    if flags & ~_FLAGS:
        raise WireError(f"flags {flags:#06x}: version {VERSION} has none but {_FLAGS:#06x}")
    if head > MAX_HEAD:
        raise WireError(f"a head of {head} bytes: at most {MAX_HEAD}")
    return Header(opcode, flags, request, head, body)
