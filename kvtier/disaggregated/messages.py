"""What a decode engine and a prefill engine say to each other: small msgpack messages, framed by their length.

decode                                  prefill
Hello(identity) --------------------->
                <---------------------  Welcome, or Refused and the end
Submit(id, tokens, priority, salt) -->
                <---------------------  Progress(id, blocks)       any number of times, while prefill still runs
                <---------------------  Computed(id)               the last token's KV is there
                <---------------------  Finished(id, blocks), or Failed(id, reason): nothing more of this id
Cancel(id) -------------------------->                             nothing more of this id, either
                <---------------------  Beat(jobs, moves)          once in BEAT_SECONDS

No message carries KV, and none can run code: an unknown tag, a wrong type or a frame too long ends the connection.
"""

import asyncio
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier.errors import TierUnavailable

__all__ = [
    "BEAT_SECONDS",
    "MAX_FRAME",
    "PROTOCOL",
    "Beat",
    "Cancel",
    "Computed",
    "Failed",
    "Finished",
    "FromDecode",
    "FromPrefill",
    "Hello",
    "Identity",
    "Progress",
    "Refused",
    "Submit",
    "Welcome",
    "differences",
    "from_decode",
    "from_prefill",
    "packed_tokens",
    "read_frame",
    "to_frame",
    "unpacked_tokens",
]

PROTOCOL = 1
BEAT_SECONDS = 0.5
MAX_FRAME = 8 << 20
_LENGTH_BYTES = 4
_TOKEN = np.dtype("<u4")


class Identity(msgspec.Struct, frozen=True):
    """What two engines must have in common for the KV of one to be the other's.

    model, layout, numerics, scheme: of the namespace. directory: UUID of the shared one. exact: whether blocks that are
    not exact count for nothing.
    """

    model: str
    layout: str
    numerics: str
    scheme: str
    directory: str
    exact: bool


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message of a connection."""

    protocol: int
    identity: Identity


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Compute the KV of these tokens, packed uint32le, and let it be found by those who know the salt."""

    id: int
    tokens: bytes
    priority: int = 0
    cache_salt: str | None = None


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Nobody wants it any more."""

    id: int


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The identities match; `pid` is the prefill engine's process."""

    pid: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """They do not; the connection ends."""

    reason: str


class Progress(msgspec.Struct, tag=True, frozen=True):
    """The first `blocks` blocks are in the shared directory."""

    id: int
    blocks: int


class Computed(msgspec.Struct, tag=True, frozen=True):
    """The last chunk was computed; its blocks may still be on their way."""

    id: int


class Finished(msgspec.Struct, tag=True, frozen=True):
    """The first `blocks` blocks are in the shared directory, and no more will come."""

    id: int
    blocks: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The prompt was not computed to its end."""

    id: int
    reason: str


class Beat(msgspec.Struct, tag=True, frozen=True):
    """The process lives; `jobs` of this connection are unfinished; `moves` grows as anybody's prompts advance."""

    jobs: int
    moves: int


FromDecode: TypeAlias = Hello | Submit | Cancel
FromPrefill: TypeAlias = Welcome | Refused | Progress | Computed | Finished | Failed | Beat

_encoder = msgspec.msgpack.Encoder()
_from_decode: msgspec.msgpack.Decoder[FromDecode] = msgspec.msgpack.Decoder(FromDecode)
_from_prefill: msgspec.msgpack.Decoder[FromPrefill] = msgspec.msgpack.Decoder(FromPrefill)


def from_decode(payload: bytes) -> FromDecode:
    """A message of the decode side.

    Raises:
        TierUnavailable: it is none.
    """
    try:
        return _from_decode.decode(payload)
    except msgspec.MsgspecError as error:
        raise TierUnavailable(f"a message of {len(payload)} bytes is none of a decode engine's: {error}") from error


def from_prefill(payload: bytes) -> FromPrefill:
    """A message of the prefill side.

    Raises:
        TierUnavailable: it is none.
    """
    try:
        return _from_prefill.decode(payload)
    except msgspec.MsgspecError as error:
        raise TierUnavailable(f"a message of {len(payload)} bytes is none of a prefill engine's: {error}") from error


def to_frame(message: FromDecode | FromPrefill) -> bytes:
    """A message as it is sent: uint32le length, then msgpack."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next message's payload; None where the other side has closed the connection, within a message or not.

    Raises:
        TierUnavailable: it is announced as longer than `MAX_FRAME`.
    """
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
        if length > MAX_FRAME:
            raise TierUnavailable(
                f"a message of {length} bytes: expected at most {MAX_FRAME}; this is another protocol"
            )
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def packed_tokens(tokens: NDArray[np.uint32]) -> bytes:
    """Token ids as `Submit` carries them."""
    return tokens.astype(_TOKEN).tobytes()


def unpacked_tokens(packed: bytes) -> NDArray[np.uint32]:
    """The reverse, uint32 [tokens].

    Raises:
        TierUnavailable: these bytes are no token ids.
    """
    if not packed or len(packed) % _TOKEN.itemsize:
        raise TierUnavailable(f"a prompt of {len(packed)} bytes: expected one token id or more of 4 bytes each")
    return np.frombuffer(packed, _TOKEN)


def differences(prefill: Identity, decode: Identity) -> str:
    """What differs, in words; empty where nothing does."""
    theirs = msgspec.structs.asdict(decode)
    return ", ".join(
        f"{name} is {value!r} in prefill and {theirs[name]!r} in decode"
        for name, value in msgspec.structs.asdict(prefill).items()
        if value != theirs[name]
    )
