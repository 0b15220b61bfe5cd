"""Stream: a connected socket that sends and fills buffers whole, each call with its own time limit.

Both ends of the data port use it. Without TLS bytes go from and into the caller's buffers in as few calls as can be,
with the GIL released; TLS copies by its nature.
"""

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from kvtier.errors import KVTierError
from kvtier.native.receiving import hashed, receive, turn

__all__ = ["PlainStream", "Stream", "StreamClosed", "StreamTimeout", "TlsStream", "connect", "stream_over"]

_TIMEVAL = struct.Struct("@ll")
_MOST_BUFFERS = 512  # the kernel takes 1,024 at once
_AHEAD = 32 << 10  # a match of 512 blocks fits
_SHORTEST = 1e-4
# What Linux grants to everybody; with less the two sides wait for one another twice as often.
_LOCAL_SEND_BUFFER = 208 << 10


class StreamClosed(KVTierError):
    """The other side has closed the connection, or it broke."""


class StreamTimeout(KVTierError):
    """The other side did not send, or take, what it had to within the time."""


class Stream(Protocol):
    """See the module."""

    def receive(self, out: memoryview, seconds: float) -> None:
        """Fill `out` within so many seconds.

        Raises:
            StreamClosed, StreamTimeout: it could not be filled.
        """
        ...

    def fill(self, outs: Sequence[memoryview], seconds: float, heads: Sequence[bytes | None] = ()) -> list[bytes]:
        """Fill all of `outs`, in order, within so many seconds. Raises as `receive` does.

        heads: hash each on the way, as `kvtier.native.receiving.receive` does; empty: none.
        """
        ...

    def send(self, buffers: Sequence[bytes | memoryview], seconds: float) -> None:
        """Send all of the buffers, in order, within so many seconds.

        Raises:
            StreamClosed, StreamTimeout: they could not be sent whole.
        """
        ...

    def turn(self, message: bytes, seconds: float, out: memoryview, wait: float) -> None:
        """Send a message within so many seconds, then fill `out` within `wait`. Raises as `send` and `receive` do."""
        ...

    def stop(self, *, reading: bool = True, writing: bool = True) -> None:
        """Wake whoever waits in here: what it waits for will not come."""
        ...

    def close(self) -> None:
        """Let go of the socket. Idempotent."""
        ...


class PlainStream:
    """Without TLS.

    Args:
        sock: connected, in blocking mode; it is the stream's from now on.
        ahead: read ahead, so that a short message costs one call. Not where descriptors may arrive beside bytes.
    """

    def __init__(self, sock: socket.socket, *, ahead: bool = False) -> None:
        self.sock = sock
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BUFFER)
        self._ahead = memoryview(bytearray(_AHEAD if ahead else 0))
        self._start = self._stop = 0
        self._limits = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    def receive(self, out: memoryview, seconds: float) -> None:
        """See `Stream.receive`."""
        at = self._buffered(out)
        if at == out.nbytes:
            return
        until = time.monotonic() + seconds
        while at < out.nbytes:
            left = until - time.monotonic()
            rest = out.nbytes - at
            if rest < self._ahead.nbytes:
                self._start, self._stop = 0, self._read(self._ahead, 0, left)
                at += self._buffered(out[at:])
            else:
                at += self._read(out[at:], socket.MSG_WAITALL, left)

    def fill(self, outs: Sequence[memoryview], seconds: float, heads: Sequence[bytes | None] = ()) -> list[bytes]:
        """See `Stream.fill`: one call of the kernel for many of them, where nothing is to be hashed."""
        if heads:
            there = sum([self._buffered(out) for out in outs])
            try:
                return receive(self.sock, outs, heads, there, seconds)
            except OSError as error:
                raise _trouble(error, "nothing came", seconds) from error
        until = time.monotonic() + seconds
        left: list[bytes | memoryview] = [rest for out in outs if (rest := out[self._buffered(out) :])]
        while left:
            self._limit(socket.SO_RCVTIMEO, until - time.monotonic())
            try:
                count = self.sock.recvmsg_into(left[:_MOST_BUFFERS], 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                raise _trouble(error, "nothing came", seconds) from error
            if not count:
                raise StreamClosed("the other side closed the connection")
            left = _rest(left, count)
        return []

    def _buffered(self, out: memoryview) -> int:
        count = min(out.nbytes, self._stop - self._start)
        if count:
            out[:count] = self._ahead[self._start : self._start + count]
            self._start += count
        return count

    def _read(self, out: memoryview, flags: int, seconds: float) -> int:
        self._limit(socket.SO_RCVTIMEO, seconds)
        try:
            count = self.sock.recv_into(out, 0, flags)
        except OSError as error:
            raise _trouble(error, "nothing came", seconds) from error
        if not count:
            raise StreamClosed("the other side closed the connection")
        return count

    def send(self, buffers: Sequence[bytes | memoryview], seconds: float) -> None:
        """See `Stream.send`."""
        until = time.monotonic() + seconds
        for first in range(0, len(buffers), _MOST_BUFFERS):
            some = list(buffers[first : first + _MOST_BUFFERS])
            flags = socket.MSG_NOSIGNAL
            if first + _MOST_BUFFERS < len(buffers):
                flags |= socket.MSG_MORE
            while some:
                some = _rest(some, self._write(some, flags, until - time.monotonic()))

    def _write(self, buffers: Sequence[bytes | memoryview], flags: int, seconds: float) -> int:
        self._limit(socket.SO_SNDTIMEO, seconds)
        try:
            return self.sock.sendmsg(buffers, (), flags)
        except OSError as error:
            raise _trouble(error, "nothing was taken", seconds) from error

    def turn(self, message: bytes, seconds: float, out: memoryview, wait: float) -> None:
        """See `Stream.turn`: one call of the kernel after the other, and none of Python's in between."""
        if out.nbytes >= self._ahead.nbytes or self._start < self._stop:
            self.send([message], seconds)
        else:
            self._limit(socket.SO_SNDTIMEO, seconds)
            self._limit(socket.SO_RCVTIMEO, wait)
            try:
                self._start, self._stop = 0, turn(self.sock, message, self._ahead)
            except OSError as error:
                raise _trouble(error, "nothing was taken, or nothing came", wait) from error
            if not self._stop:
                raise StreamClosed("the other side closed the connection")
        self.receive(out, wait)

    def _limit(self, option: int, seconds: float) -> None:
        if seconds <= 0:
            raise StreamTimeout("the time for this message is over")
        # A limit that is a little late is as good, and saves most of these calls.
        known = self._limits[option]
        if not seconds <= known <= 1.05 * seconds:
            self._limits[option] = seconds = max(1.04 * seconds, _SHORTEST)
            whole = int(seconds)
            with contextlib.suppress(OSError):  # a socket that broke says so at the next call
                self.sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, int(1e6 * (seconds - whole))))

    def stop(self, *, reading: bool = True, writing: bool = True) -> None:
        """See `Stream.stop`."""
        _shut(self.sock, reading=reading, writing=writing)

    def close(self) -> None:
        """See `Stream.close`."""
        self.sock.close()


def _trouble(error: OSError, what: str, seconds: float) -> StreamClosed | StreamTimeout:
    """What the kernel's refusal means, on a socket that has its time limits."""
    if isinstance(error, BlockingIOError):
        return StreamTimeout(f"{what} within {seconds:.1f} s")
    return StreamClosed(f"the connection broke: {error.strerror or error}")


class TlsStream:
    """With TLS, of which the handshake is done.

    Args:
        sock: it is the stream's from now on.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def receive(self, out: memoryview, seconds: float) -> None:
        """See `Stream.receive`."""
        until = time.monotonic() + seconds
        at = 0
        while at < out.nbytes:
            count = self._call(lambda rest=out[at:]: self._sock.recv_into(rest), until)
            if not count:
                raise StreamClosed("the other side closed the connection")
            at += count

    def fill(self, outs: Sequence[memoryview], seconds: float, heads: Sequence[bytes | None] = ()) -> list[bytes]:
        """See `Stream.fill`."""
        until = time.monotonic() + seconds
        for out in outs:
            self.receive(out, until - time.monotonic())
        return hashed(outs, heads) if heads else []

    def send(self, buffers: Sequence[bytes | memoryview], seconds: float) -> None:
        """See `Stream.send`."""
        until = time.monotonic() + seconds
        for buffer in buffers:
            rest = memoryview(buffer).cast("B")
            while rest:
                rest = rest[self._call(lambda now=rest: self._sock.send(now), until) :]

    def turn(self, message: bytes, seconds: float, out: memoryview, wait: float) -> None:
        """See `Stream.turn`."""
        self.send([message], seconds)
        self.receive(out, wait)

    def _call(self, call: "_Count", until: float) -> int:
        left = until - time.monotonic()
        if left <= 0:
            raise StreamTimeout("the time for this message is over")
        try:
            self._sock.settimeout(left)
            return call()
        except TimeoutError:
            raise StreamTimeout(f"the other side did not move within {left:.1f} s") from None
        except (OSError, ValueError) as error:
            raise StreamClosed(f"the connection broke: {error}") from error

    def stop(self, *, reading: bool = True, writing: bool = True) -> None:
        """See `Stream.stop`."""
        _shut(self._sock, reading=reading, writing=writing)

    def close(self) -> None:
        """See `Stream.close`."""
        self._sock.close()


class _Count(Protocol):
    def __call__(self) -> int: ...


def _shut(sock: socket.socket, *, reading: bool, writing: bool) -> None:
    how = {(True, True): socket.SHUT_RDWR, (True, False): socket.SHUT_RD, (False, True): socket.SHUT_WR}
    with contextlib.suppress(OSError):
        # Not SSLSocket's own, which ends TLS under whoever is reading.
        socket.socket.shutdown(sock, how[reading, writing])


def _rest(buffers: list[bytes | memoryview], sent: int) -> list[bytes | memoryview]:
    """What of them is not sent yet."""
    for at, buffer in enumerate(buffers):
        size = memoryview(buffer).nbytes
        if sent < size:
            return [memoryview(buffer).cast("B")[sent:], *buffers[at + 1 :]]
        sent -= size
    return []


def stream_over(sock: socket.socket, context: ssl.SSLContext | None, seconds: float) -> Stream:
    """The server's end of a connection that was just accepted; with a context, after TLS's handshake.

    Raises:
        StreamClosed, StreamTimeout: the handshake failed.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is None or sock.family == socket.AF_UNIX:
        sock.setblocking(True)
        return PlainStream(sock, ahead=True)
    sock.settimeout(seconds)
    try:
        return TlsStream(context.wrap_socket(sock, server_side=True))
    except TimeoutError:
        sock.close()
        raise StreamTimeout(f"no TLS handshake within {seconds} s") from None
    except (OSError, ValueError) as error:
        sock.close()
        raise StreamClosed(f"the TLS handshake failed: {error}") from error


def connect(address: str, context: ssl.SSLContext | None, seconds: float) -> Stream:
    """The client's end: `address` is "host:port", "[v6]:port" or "unix:PATH".

    Raises:
        StreamClosed, StreamTimeout: nobody accepted.
    """
    try:
        if address.startswith("unix:"):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(seconds)
                sock.connect(os.fsencode(address.removeprefix("unix:")))
            except OSError:
                sock.close()
                raise
            sock.setblocking(True)
            return PlainStream(sock)
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is None:
            sock.setblocking(True)
            return PlainStream(sock, ahead=True)
        try:
            return TlsStream(context.wrap_socket(sock, server_hostname=host.strip("[]")))
        except (OSError, ValueError):
            sock.close()
            raise
    except TimeoutError:
        raise StreamTimeout(f"{address}: no connection within {seconds:.1f} s") from None
    except (OSError, ValueError) as error:
        raise StreamClosed(f"{address}: no connection: {error}") from error
