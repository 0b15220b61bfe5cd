"""Blocks as REST carries them: one as a body with headers, many as a block stream. Bytes are compared with digests."""

from collections.abc import Sequence
from dataclasses import asdict

import httpx
import xxhash

from kvtier.client.decoding import check_digest
from kvtier.client.errors import Interrupted, ProtocolError, WrongDigest
from kvtier.client.exchange import Body, Inbox
from kvtier.client.results import Block, Found, Head
from kvtier.wire.blockstream import (
    STREAM_BEGIN,
    STREAM_END,
    BlockHead,
    StreamDamaged,
    StreamDecoder,
    StreamError,
    StreamHint,
    record_head,
)

__all__ = ["DigestReader", "StreamReader", "block_headers", "head_of", "stream_body"]

_DIGEST = "xxh3-128="


def block_headers(block: Block) -> dict[str, str]:
    """What a put says of its block."""
    headers = {
        "KVTier-Digest": _DIGEST + xxhash.xxh3_128_hexdigest(block.data),
        "KVTier-Part": str(block.part),
        "KVTier-Depth": str(block.depth),
        "KVTier-Exact": "true" if block.exact else "false",
    }
    if block.parent is not None:
        headers["KVTier-Parent"] = block.parent.hex()
    return headers


def head_of(key: bytes, headers: httpx.Headers) -> Head:
    """What an answer says of its block.

    Raises:
        ProtocolError: it says too little.
    """
    try:
        parent = headers.get("KVTier-Parent")
        return Head(
            key=key,
            part=int(headers["KVTier-Part"]),
            parent=None if parent is None else bytes.fromhex(parent),
            depth=int(headers["KVTier-Depth"]),
            exact=headers["KVTier-Exact"] == "true",
            nbytes=int(headers["Content-Length"]),
            tier=headers["KVTier-Tier"],
            digest=bytes.fromhex(headers["KVTier-Digest"].removeprefix(_DIGEST)),
        )
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"an answer with headers of no block ({error!r}): is this a kvtier service?") from error


class DigestReader(Inbox):
    """Reads one block's bytes.

    Args:
        key: which one.
        headers: of the answer.
    """

    def __init__(self, key: bytes, headers: httpx.Headers) -> None:
        super().__init__(headers)
        self._head = head_of(key, headers)

    def result(self) -> Found:  # type: ignore[override]
        """The block, whose bytes are what was stored."""
        head, data = self._head, super().result()
        if data.nbytes != head.nbytes:
            raise Interrupted(f"block {head.key.hex()}: {data.nbytes} of {head.nbytes} bytes arrived")
        check_digest(head.key, data, head.digest)
        return Found(head.key, head.part, head.parent, head.depth, head.exact, head.tier, head.digest, data)


class StreamReader:
    """Reads a block stream, each body into memory of its own."""

    def __init__(self) -> None:
        self._decoder = StreamDecoder(lambda _, nbytes: memoryview(bytearray(nbytes)))

    def take(self, piece: bytes) -> None:
        """See `Reader`."""
        try:
            self._decoder.feed(piece)
        except StreamDamaged as error:
            raise WrongDigest(str(error)) from error
        except StreamError as error:
            raise ProtocolError(str(error)) from error

    def result(self) -> list[Found]:
        """The blocks, in their order."""
        try:
            blocks = self._decoder.finish()
        except StreamError as error:
            raise Interrupted(str(error)) from error
        return [_found(head, data) for head, data in blocks]


def _found(head: BlockHead, data: memoryview) -> Found:
    if head.digest is None:
        raise ProtocolError(f"block {head.key} came without its digest: is this a kvtier service?")
    parent = None if head.parent is None else bytes.fromhex(head.parent)
    return Found(
        key=bytes.fromhex(head.key),
        part=head.part,
        parent=parent,
        depth=head.depth,
        exact=head.exact,
        tier=head.tier or "",
        digest=bytes.fromhex(head.digest),
        data=data.toreadonly(),
    )


def stream_body(blocks: Sequence[Block]) -> Body:
    """Blocks as a stream: heads, and the caller's own buffers between them."""
    body: list[bytes | bytearray | memoryview] = [STREAM_BEGIN]
    for block in blocks:
        head = BlockHead(
            key=block.key.hex(),
            part=block.part,
            parent=None if block.parent is None else block.parent.hex(),
            depth=block.depth,
            exact=block.exact,
            digest=xxhash.xxh3_128_hexdigest(block.data),
            hint=None if block.hint is None else StreamHint(**asdict(block.hint)),
        )
        body += [record_head(head, memoryview(block.data).nbytes), block.data]
    body.append(STREAM_END)
    return body
