"""Receive and hash in one pass over the bytes: compiled where it can be, `recvmsg_into` and xxhash elsewhere.

And `turn`: send and then receive in one call.
"""

import importlib
import select
import socket
import time
from collections.abc import Sequence
from typing import Protocol, cast

import xxhash

__all__ = ["available", "hashed", "receive", "turn"]

# xxh3 hashes up to 240 bytes in other ways, which are not worth compiling.
_SHORTEST = 241
_MOST_BUFFERS = 512  # the kernel takes 1,024 at once


class _Compiled(Protocol):
    def receive(
        self, fd: int, buffers: list[memoryview], heads: list[bytes | None], there: int, seconds: float, /
    ) -> list[bytes | None]: ...

    def turn(self, fd: int, message: bytes, out: memoryview, /) -> int: ...


def _load() -> _Compiled | None:
    try:
        found = importlib.import_module("kvtier.native._checksum")
    except ImportError:
        return None
    # One that an older version left in place is as good as none.
    return cast("_Compiled", found) if "turn" in vars(found) else None


_compiled = _load()


def available() -> bool:
    """Whether the compiled call is there."""
    return _compiled is not None


def receive(
    sock: socket.socket, outs: Sequence[memoryview], heads: Sequence[bytes | None], there: int, seconds: float
) -> list[bytes]:
    """Fill buffers from a connected socket; xxh3_128(head + buffer) of each, 16 bytes.

    One call for all of them, without the GIL: each piece is hashed while it is in the processor's cache.

    Args:
        sock: without TLS, blocking or not.
        outs: writable, contiguous bytes.
        heads: what each hash begins with, 64 bytes or none; None: it is not wanted, and b"" is returned.
        there: bytes of the outs, from the first on, that are in place already.
        seconds: until when all must have come.

    Raises:
        BlockingIOError: it had not.
        OSError: the connection broke, or (ConnectionResetError) the other side closed it.
    """
    if _compiled is None:
        _fill(sock, outs, there, seconds)
        return hashed(outs, heads)
    # What is too short for the compiled hash is hashed afterwards.
    inside = [
        None if head is None or len(head) + out.nbytes < _SHORTEST else head
        for out, head in zip(outs, heads, strict=True)
    ]
    found = _compiled.receive(sock.fileno(), list(outs), inside, there, seconds)
    return [digest or _hashed(out, head) for digest, out, head in zip(found, outs, heads, strict=True)]


def turn(sock: socket.socket, message: bytes, out: memoryview) -> int:
    """Send a message whole, then receive what comes next; how many bytes of `out`, 0 where the other side is done.

    One call for both, without the GIL: a thread that shares it with many waits for it once.

    Args:
        sock: without TLS, blocking, with whatever time limits it has.
        message: to be sent.
        out: writable, contiguous bytes, at least one.

    Raises:
        BlockingIOError: one of its time limits was over.
        OSError: the connection broke.
    """
    if _compiled is not None:
        return _compiled.turn(sock.fileno(), message, out)
    sock.sendall(message, socket.MSG_NOSIGNAL)
    return sock.recv_into(out)


def _fill(sock: socket.socket, outs: Sequence[memoryview], there: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    waiting = select.poll()
    waiting.register(sock, select.POLLIN)
    left = _behind(list(outs), there)
    while left:
        if not waiting.poll(max(0.0, 1e3 * (until - time.monotonic()))):
            raise BlockingIOError("nothing came in time")
        count = sock.recvmsg_into(left[:_MOST_BUFFERS], 0, socket.MSG_DONTWAIT)[0]
        if not count:
            raise ConnectionResetError("the other side closed the connection")
        left = _behind(left, count)


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers behind the first `count` bytes."""
    at = 0
    while at < len(buffers) and count >= buffers[at].nbytes:
        count -= buffers[at].nbytes
        at += 1
    return [buffers[at][count:], *buffers[at + 1 :]] if at < len(buffers) else []


def hashed(outs: Sequence[memoryview], heads: Sequence[bytes | None]) -> list[bytes]:
    """What `receive` returns, of buffers that are full."""
    return [_hashed(out, head) for out, head in zip(outs, heads, strict=True)]


def _hashed(out: memoryview, head: bytes | None) -> bytes:
    if head is None:
        return b""
    digest = xxhash.xxh3_128(head)
    digest.update(out)
    return digest.digest()
