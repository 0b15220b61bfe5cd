"""The data port's messages as bytes: no sockets, no torch. `docs/data-port.md` is the reference.

frames       the fixed header before every message
messages     the head of each message: small msgpack maps
packing      keys, token ids and names in columns
blockstream  many blocks as one body of HTTP, for REST: `docs/rest.md`
"""

from kvtier.wire.frames import HEADER_BYTES, MAX_HEAD, VERSION, Flag, Header, Opcode, WireError, frame, read_header
from kvtier.wire.packing import PackedKeys, pack_keys, pack_runs, pack_tokens, unpack_keys, unpack_runs, unpack_tokens

__all__ = [
    "HEADER_BYTES",
    "MAX_HEAD",
    "VERSION",
    "Flag",
    "Header",
    "Opcode",
    "PackedKeys",
    "WireError",
    "frame",
    "pack_keys",
    "pack_runs",
    "pack_tokens",
    "read_header",
    "unpack_keys",
    "unpack_runs",
    "unpack_tokens",
]
