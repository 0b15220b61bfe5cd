"""BlockReply: block bytes go out while they are held in host, from where they lie."""

from collections.abc import Iterable, Iterator, Mapping

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from kvtier.service.cache import Reading

__all__ = ["WRITE_BUFFER", "BlockReply"]

WRITE_BUFFER = 1 << 16
"""Bytes that a connection may buffer before its sender waits."""
_CHUNK = 1 << 18


class BlockReply(Response):
    """A response out of a reading, which it closes at the end, whatever the end is.

    A connection may still hold what was given to it when `send` returns, `WRITE_BUFFER` bytes at most: the last that
    many bytes are sent as a copy, so that when those are accepted, no byte of the reading is in use any more.

    Args:
        reading: what `pieces` are views of.
        pieces: of the body, in order; an iterable, since some are made as they go out.
        length: of all of them.
        status, headers, media_type: of the response.
    """

    def __init__(
        self,
        reading: Reading,
        pieces: Iterable[bytes | memoryview],
        length: int,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str = "application/octet-stream",
    ) -> None:
        super().__init__(None, status, None, media_type)
        # A response without a body was measured to have none.
        self.headers.update({**(headers or {}), "content-length": str(length)})
        self._reading = reading
        self._pieces = pieces
        self._length = length

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self._reading:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] != "HEAD":
                for chunk in _chunks(self._pieces, self._length):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            # Waits until the connection has room, thus until all views are out.
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _chunks(pieces: Iterable[bytes | memoryview], length: int) -> Iterator[bytes | memoryview]:
    """The pieces, cut; the last `WRITE_BUFFER` bytes of all as one copy."""
    borrowed = max(length - WRITE_BUFFER, 0)
    tail = bytearray()
    for piece in pieces:
        cut = min(len(piece), borrowed)
        for start in range(0, cut, _CHUNK):
            yield piece[start : min(start + _CHUNK, cut)]
        borrowed -= cut
        tail += piece[cut:]
    if tail:
        yield bytes(tail)
