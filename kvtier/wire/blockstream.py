"""The block stream: many blocks as one body of HTTP, read and written as it travels. Pure bytes.

    stream = "KVTB", u16 version = 1, u16 = 0, record*, u32 = 0, u32 = 0        integers are little-endian
    record = u32 head length (1..4096), u32 body length (1..), head, body
    head   = a JSON object, UTF-8: see `BlockHead`
    body   = the block's bytes

The end is written out, so that a stream that was cut off is told from one that is whole.
"""

import struct
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import xxhash
from msgspec import Meta

from kvtier.errors import KVTierError

__all__ = [
    "HEAD_LIMIT",
    "MEDIA_TYPE",
    "STREAM_BEGIN",
    "STREAM_END",
    "BlockHead",
    "StreamDamaged",
    "StreamDecoder",
    "StreamError",
    "StreamHint",
    "record_head",
]

MEDIA_TYPE = "application/vnd.kvtier.blocks"
HEAD_LIMIT = 4096
STREAM_BEGIN = b"KVTB" + struct.pack("<HH", 1, 0)
STREAM_END = bytes(8)

_PREFIX = struct.Struct("<II")

Key = Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{2}){16,32}\Z")]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class StreamError(KVTierError):
    """What came is no block stream, or is cut off."""


class StreamDamaged(StreamError):
    """A block's bytes are not what its digest says."""


class StreamHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is known of a block's future; fields and defaults of `kvtier.hints.Hint`."""

    priority: float = 1.0
    priority_ttl: float = 600.0
    ttl: float | None = None
    reuse: Literal["unknown", "none", "likely"] = "unknown"
    session: Annotated[str, Meta(max_length=128)] | None = None


class BlockHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a record says of its block; keys are hex, lower case.

    key: chain key, 16 to 32 bytes. part: `group * shards + shard`. parent: chain key of the block before. depth:
    position in its chain, -1 where it is unknown. exact: not derived from a lossy format. digest: xxh3_128 of the body.
    tier: where it was found, in answers only. hint: in puts only.
    """

    key: Key
    part: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    parent: Key | None = None
    depth: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    exact: bool = True
    digest: Digest | None = None
    tier: str | None = None
    hint: StreamHint | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(BlockHead).decode


def record_head(head: BlockHead, nbytes: int) -> bytes:
    """What goes before the `nbytes` bytes of a block.

    Raises:
        StreamError: no bytes, or 4 GiB and more.
    """
    if not 0 < nbytes < 1 << 32:
        raise StreamError(f"block {head.key}: {nbytes} bytes; expected 1..{(1 << 32) - 1}")
    packed = _encode(head)
    return _PREFIX.pack(len(packed), nbytes) + packed


class StreamDecoder:
    """Takes a stream in pieces of any size; each body goes straight to where it is to lie.

    Args:
        place: told a block's head and length, gives the memory for its body: writable, of that length. What it raises
            ends the stream.

    Attributes:
        blocks: heads and bodies that are complete, in order; digests were compared.
        ended: the stream is whole.
    """

    def __init__(self, place: Callable[[BlockHead, int], memoryview]) -> None:
        self.blocks: list[tuple[BlockHead, memoryview]] = []
        self.ended = False
        self._place = place
        self._small = bytearray()
        self._next: Callable[[bytes], None] = self._begin
        self._wanted = len(STREAM_BEGIN)
        self._lengths = (0, 0)
        self._head = BlockHead("")
        self._body: memoryview | None = None
        self._at = 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next piece.

        Raises:
            StreamError: it is no stream of this version.
            StreamDamaged: a digest differs.
        """
        view = memoryview(data)
        while view:
            if self.ended:
                raise StreamError(f"{len(view)} bytes after the end of the stream: expected none")
            taken = self._take_small(view) if self._body is None else self._take_body(self._body, view)
            view = view[taken:]

    def finish(self) -> list[tuple[BlockHead, memoryview]]:
        """The blocks, after the last piece.

        Raises:
            StreamError: the stream is cut off.
        """
        if not self.ended:
            raise StreamError(f"the stream ends after {len(self.blocks)} whole blocks, without its end: send all of it")
        return self.blocks

    def _take_small(self, view: memoryview) -> int:
        taken = min(self._wanted - len(self._small), len(view))
        self._small += view[:taken]
        if len(self._small) == self._wanted:
            data = bytes(self._small)
            self._small.clear()
            self._next(data)
        return taken

    def _take_body(self, body: memoryview, view: memoryview) -> int:
        taken = min(len(body) - self._at, len(view))
        body[self._at : self._at + taken] = view[:taken]
        self._at += taken
        if self._at == len(body):
            self._check(body)
            self.blocks.append((self._head, body))
            self._body = None
            self._want(self._prefix, _PREFIX.size)
        return taken

    def _check(self, body: memoryview) -> None:
        told = self._head.digest
        if told is None:
            return
        digest = xxhash.xxh3_128_hexdigest(body)
        if digest != told:
            raise StreamDamaged(f"block {self._head.key}: digest xxh3-128={digest}, and {told} was told: send it again")

    def _want(self, what: Callable[[bytes], None], size: int) -> None:
        self._next, self._wanted = what, size

    def _begin(self, data: bytes) -> None:
        if data != STREAM_BEGIN:
            raise StreamError(
                f"the stream begins with {data.hex()}: expected {STREAM_BEGIN.hex()} ({MEDIA_TYPE}, version 1)"
            )
        self._want(self._prefix, _PREFIX.size)

    def _prefix(self, data: bytes) -> None:
        if data == STREAM_END:
            self.ended = True
            return
        head, body = _PREFIX.unpack(data)
        if not 0 < head <= HEAD_LIMIT or not body:
            told = f"record {len(self.blocks)}: head of {head} bytes, body of {body}"
            raise StreamError(f"{told}: expected 1..{HEAD_LIMIT}, and at least 1")
        self._lengths = (head, body)
        self._want(self._record, head)

    def _record(self, data: bytes) -> None:
        try:
            self._head = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StreamError(f"head of record {len(self.blocks)}: {error}") from error
        nbytes = self._lengths[1]
        self._body, self._at = self._place(self._head, nbytes), 0
        if len(self._body) != nbytes:
            raise ValueError(f"{len(self._body)} bytes of memory for a body of {nbytes}")
