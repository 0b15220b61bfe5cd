"""RESP2, the wire format of Valkey and Redis: commands as they are sent, replies as they come in.

Replies with block bytes are not parsed but received where they belong: the length line and the envelope into a small
buffer, the rest by the kernel straight into the caller's memory.
"""

from collections.abc import Sequence
from typing import TypeAlias

from kvtier.remote.envelope import ENVELOPE_BYTES
from kvtier.remote.valkey.transport import Transport

__all__ = ["Replies", "Reply", "ReplyError", "command"]

_BUFFER = 1 << 16
_SCRATCH = 1 << 18
_LONGEST_LINE = 1 << 12
_LONGEST_BULK = 1 << 24
_DEEPEST = 8
_END = b"\r\n"


class ReplyError(str):
    """An error reply: its code and text, such as `MOVED 42 10.0.0.1:6379`."""

    __slots__ = ()

    @property
    def code(self) -> str:
        """The first word."""
        return self.partition(" ")[0]


Reply: TypeAlias = "int | bytes | ReplyError | list[Reply] | None"


def command(*words: bytes | str | int) -> bytes:
    """One command as it is sent."""
    packed = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(packed) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in packed)


class Replies:
    """The replies of one connection, in order.

    Raises everywhere:
        OSError: the connection ended, or what came is no RESP; it is of no use any more.
        TimeoutError: not by the deadline; nor is it then.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    # ---- small replies

    def next(self, deadline: float) -> Reply:
        """One reply, whole."""
        return self._parsed(self._line(_BUFFER, deadline), deadline, 0)

    def _parsed(self, line: bytes, deadline: float, depth: int) -> Reply:
        kind, rest = line[:1], line[1:]
        match kind:
            case b"+":
                return rest
            case b"-":
                return ReplyError(rest.decode("utf-8", "replace"))
            case b":":
                return _number(rest)
            case b"$":
                return self._bulk(_number(rest), deadline)
            case b"*" if depth < _DEEPEST:
                count = _number(rest)
                if count < 0:
                    return None
                return [self._parsed(self._line(_BUFFER, deadline), deadline, depth + 1) for _ in range(count)]
            case _:
                raise _nonsense(line)

    def _bulk(self, nbytes: int, deadline: float) -> bytes | None:
        if nbytes < 0:
            return None
        if nbytes > _LONGEST_BULK:
            raise _nonsense(b"$%d" % nbytes)
        data = bytearray(nbytes)
        self._into(memoryview(data), deadline)
        return bytes(data)

    def _line(self, most: int, deadline: float) -> bytes:
        """Up to the next line end, which is consumed; `most`: bytes to receive at a time."""
        while (at := self._buffer.find(_END, self._start, self._end)) < 0:
            if self._end - self._start > _LONGEST_LINE:
                raise _nonsense(self._buffer[self._start : self._end])
            self._receive(most, deadline)
        line = bytes(self._view[self._start : at])
        self._start = at + len(_END)
        return line

    def _receive(self, most: int, deadline: float) -> None:
        held = self._end - self._start
        if self._end == _BUFFER or not held:
            self._view[:held] = self._view[self._start : self._end]
            self._start, self._end = 0, held
        count = self._transport.receive(self._view[self._end : self._end + most], deadline)
        if not count:
            raise ConnectionResetError("the server closed the connection")
        self._end += count

    def _into(self, target: memoryview, deadline: float) -> None:
        """The next bytes, and the line end behind them, which is consumed."""
        tail = memoryview(bytearray(len(_END)))
        rest = [part for part in (self._taken(target), self._taken(tail)) if part.nbytes]
        if rest:
            self._transport.fill(rest, deadline)
        if tail != _END:
            raise _nonsense(bytes(tail))

    def _taken(self, target: memoryview) -> memoryview:
        """Fill a buffer from what was received already; returns what is left of it."""
        count = min(target.nbytes, self._end - self._start)
        target[:count] = self._view[self._start : self._start + count]
        self._start += count
        return target[count:]

    # ---- replies with block bytes

    def record(self, head: memoryview, body: memoryview, deadline: float) -> int | ReplyError | None:
        """A bulk reply: its envelope into `head`, what is behind it into `body`; returns the bytes of the latter.

        None: there is no such record. Where it is not `body.nbytes`, `body` is undefined; negative: shorter than an
        envelope.
        """
        # Exactly the length line and the envelope, so that what is behind them is not received twice.
        expected = len(b"$%d\r\n" % (ENVELOPE_BYTES + body.nbytes)) + ENVELOPE_BYTES
        line = self._line(max(expected - (self._end - self._start), 1), deadline)
        if line[:1] == b"-":
            return ReplyError(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise _nonsense(line)
        nbytes = _number(line[1:])
        if nbytes < 0:
            return None
        if nbytes < ENVELOPE_BYTES:
            self._bulk(nbytes, deadline)
            return nbytes - ENVELOPE_BYTES
        rest = self._taken(head)
        if rest.nbytes:
            self._transport.fill([rest], deadline)
        if nbytes - ENVELOPE_BYTES == body.nbytes:
            self._into(body, deadline)
        else:
            self._skip(nbytes - ENVELOPE_BYTES, deadline)
        return nbytes - ENVELOPE_BYTES

    def _skip(self, nbytes: int, deadline: float) -> None:
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH)))
        while nbytes > len(scratch):
            rest = self._taken(scratch)
            if rest.nbytes:
                self._transport.fill([rest], deadline)
            nbytes -= len(scratch)
        self._into(scratch[:nbytes], deadline)

    @property
    def idle(self) -> bool:
        """Whether nothing was received that nobody asked for."""
        return self._start == self._end


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise _nonsense(text) from None


def _nonsense(data: Sequence[int]) -> ConnectionError:
    return ConnectionError(f"expected a reply of a Valkey or Redis server, got {bytes(data[:40])!r}")
