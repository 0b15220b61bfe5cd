"""Sockets that send scattered memory and receive into memory, each call over by its deadline.

A plain socket blocks in the kernel, which fills the whole buffer in one call (MSG_WAITALL), or sleeps until a quarter
of a MiB is there (SO_RCVLOWAT), and gives up by itself (SO_RCVTIMEO): that is the least work per byte. TLS goes through
OpenSSL's buffers in any case.
"""

import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

__all__ = ["PlainTransport", "TlsTransport", "Transport", "connect"]

_Place: TypeAlias = tuple[Any, Any, int, str, Any]
"""As `socket.getaddrinfo` says it."""

_TIMEVAL = struct.Struct("@ll")
_MICRO = 1_000_000
# How much earlier or later than asked the kernel may give up, so that it need not be told for every call.
_SLACK = 0.01
_STALE = 0.5
_IOV_MAX = 1024
_BURST = 1 << 18
_JOINED = 1 << 14


class Transport(Protocol):
    """A connected byte stream. One thread at a time."""

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send all of it.

        Raises:
            TimeoutError: not by the deadline; the stream is of no use any more.
            OSError: the other side is gone.
        """
        ...

    def receive(self, buffer: memoryview, deadline: float) -> int:
        """What is there, at least one byte; 0: the other side closed. Raises as `send` does."""
        ...

    def fill(self, buffers: Sequence[memoryview], deadline: float) -> None:
        """Receive until all buffers are full. Raises as `send` does, and `ConnectionResetError` where it closed."""
        ...

    def interrupt(self) -> None:
        """Make a call that blocks in another thread fail; whoever made it closes."""
        ...

    def close(self) -> None:
        """Let go of it. Idempotent."""
        ...


def connect(host: str, port: int, deadline: float, tls: ssl.SSLContext | None) -> Transport:
    """Connect to a server.

    Raises:
        TimeoutError, OSError: it does not answer, refuses, or (`ssl.SSLError`) is not who it should be.
    """
    sock = _connected(_resolved(host, port, deadline), deadline)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return PlainTransport(sock)
        sock.settimeout(_left(deadline))
        return TlsTransport(tls.wrap_socket(sock, server_hostname=host))
    except BaseException:
        sock.close()
        raise


def _resolved(host: str, port: int, deadline: float) -> list[_Place]:
    """Where the host is. A resolver takes no deadline, so it has a thread of its own, which is left behind."""
    answer: SimpleQueue[list[_Place] | OSError] = SimpleQueue()

    def ask() -> None:
        try:
            answer.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            answer.put(error)

    if _is_literal(host):
        ask()
    else:
        threading.Thread(target=ask, name=f"kvtier-resolve-{host}", daemon=True).start()
    try:
        found = answer.get(timeout=_left(deadline))
    except Empty:
        raise TimeoutError(f"the name {host} was not resolved by the deadline") from None
    if isinstance(found, OSError):
        raise found
    return found


def _is_literal(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _connected(places: Sequence[_Place], deadline: float) -> socket.socket:
    failure: OSError = OSError("the host has no address")
    for family, kind, protocol, _, address in places:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_left(deadline))
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


class PlainTransport:
    """See `Transport`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._armed = -1.0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def _arm(self, deadline: float) -> None:
        """Have the kernel give up at the deadline."""
        left = _left(deadline)
        if left + _SLACK < self._armed or self._armed < left - _STALE:
            limit = _TIMEVAL.pack(int(left), int(left % 1 * _MICRO) or 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._armed = left

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """See `Transport.send`."""
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            self._arm(deadline)
            try:
                sent = self._socket.sendmsg(left[:_IOV_MAX])
            except BlockingIOError as error:
                raise _late() from error
            left = _after(left, sent)

    def receive(self, buffer: memoryview, deadline: float) -> int:
        """See `Transport.receive`."""
        self._arm(deadline)
        try:
            return self._socket.recv_into(buffer)
        except BlockingIOError as error:
            raise _late() from error

    def fill(self, buffers: Sequence[memoryview], deadline: float) -> None:
        """See `Transport.fill`."""
        if sum(buffer.nbytes for buffer in buffers) >= 2 * _BURST:
            self._fill_in_bursts(list(buffers), deadline)
            return
        left = list(buffers)
        while left:
            self._arm(deadline)
            try:
                count = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as error:
                raise _late() from error
            left = _after(left, _some(count))

    def _fill_in_bursts(self, left: list[memoryview], deadline: float) -> None:
        """Servers send what is large in small pieces: sleep until there is more than one of them."""
        rest, least = sum(buffer.nbytes for buffer in left), 1
        while left:
            if least != min(rest, _BURST):
                least = min(rest, _BURST)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            if not self._poll.poll(1000 * _left(deadline)):
                raise _late()
            count = _some(self._socket.recvmsg_into(left, 0, socket.MSG_DONTWAIT)[0])
            left, rest = _after(left, count), rest - count
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def interrupt(self) -> None:
        """See `Transport.interrupt`."""
        _interrupt(self._socket)

    def close(self) -> None:
        """See `Transport.close`."""
        self._socket.close()


class TlsTransport:
    """See `Transport`."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """See `Transport.send`."""
        small = bytearray()
        for buffer in buffers:
            # Each call makes a record of its own: what is short goes together.
            if len(buffer) < _JOINED:
                small += buffer
                continue
            self._send(small, deadline)
            small = bytearray()
            self._send(buffer, deadline)
        self._send(small, deadline)

    def _send(self, buffer: bytes | bytearray | memoryview, deadline: float) -> None:
        if buffer:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(buffer)

    def receive(self, buffer: memoryview, deadline: float) -> int:
        """See `Transport.receive`."""
        self._socket.settimeout(_left(deadline))
        return self._socket.recv_into(buffer)

    def fill(self, buffers: Sequence[memoryview], deadline: float) -> None:
        """See `Transport.fill`."""
        for buffer in buffers:
            done = 0
            while done < buffer.nbytes:
                done += _some(self.receive(buffer[done:], deadline))

    def interrupt(self) -> None:
        """See `Transport.interrupt`."""
        _interrupt(self._socket)

    def close(self) -> None:
        """See `Transport.close`."""
        self._socket.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _late()
    return left


def _late() -> TimeoutError:
    return TimeoutError("no answer by the deadline")


def _some(count: int) -> int:
    if not count:
        raise ConnectionResetError("the server closed the connection in the middle of a reply")
    return count


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers behind the first `count` bytes."""
    at = 0
    while at < len(buffers) and count >= buffers[at].nbytes:
        count -= buffers[at].nbytes
        at += 1
    rest = buffers[at:]
    if rest and count:
        rest[0] = rest[0][count:]
    return rest


def _interrupt(sock: socket.socket) -> None:
    # A thread that waits in the kernel does not notice that its descriptor was closed, and another file may get it.
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
