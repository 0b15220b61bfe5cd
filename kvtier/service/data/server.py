"""DataServer: listens on TCP and on a Unix socket, one thread per connection."""

import logging
import socket
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from kvtier.config import ServiceSettings
from kvtier.errors import ConfigError
from kvtier.http.exposure import server_context
from kvtier.service.cache import Cache, Places, Tokens
from kvtier.service.data.buffers import BufferPool
from kvtier.service.data.connection import Connection
from kvtier.service.data.session import Port
from kvtier.sockets import listen_at

__all__ = ["DataServer"]

_log = logging.getLogger(__name__)
_BACKLOG = 128
_DRAIN_STEP = 0.05
_CLOSE_SECONDS = 5.0
_numbers = count(1)


class DataServer:
    """The data port over a `Cache`. Thread-safe.

    Args:
        cache: stays the caller's.
        tokens: who is let in.
        settings: addresses, TLS and limits.

    Raises:
        ConfigError: an address is taken, or TLS's files are none.
    """

    def __init__(self, cache: Cache, tokens: Tokens, settings: ServiceSettings) -> None:
        self._settings = settings
        places = Places(settings.max_connections)
        self._port = Port(cache, tokens, settings, BufferPool(settings.inflight_bytes), places)
        self._context = server_context(settings, "service")
        self._listeners: list[socket.socket] = []
        self._acceptors: list[threading.Thread] = []
        self._connections: dict[Connection, threading.Thread] = {}
        self._lock = threading.Lock()
        self._draining = False
        self.address: tuple[str, int] | None = None
        self.socket: Path | None = None
        self._socket_file = (0, 0)

    def start(self) -> None:
        """Listen where the settings say."""
        settings = self._settings
        try:
            if settings.data_port is not None:
                listener = _listen(settings.host, settings.data_port)
                self._listeners.append(listener)
                host, port = listener.getsockname()[:2]
                self.address = (host, port)
            if settings.socket is not None:
                self._listeners.append(listen_at(settings.socket))
                self.socket, self._socket_file = settings.socket, _file(settings.socket)
        except ConfigError:
            self._stop_listening()
            raise
        for listener in self._listeners:
            thread = threading.Thread(target=self._accept, args=(listener,), name="kvtier-data-accept", daemon=True)
            self._acceptors.append(thread)
            thread.start()

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of bodies under way, and of staging regions."""
        return self._port.buffers.bytes_out

    def drain(self, seconds: float) -> bool:
        """Let nobody in, answer what has arrived, end the connections; False: some were still busy at the end."""
        self._stop_listening()
        until = time.monotonic() + seconds
        while self._connections and time.monotonic() < until:
            for connection, _ in self._open():
                connection.finish()
            time.sleep(_DRAIN_STEP)
        return not self._connections

    def close(self) -> None:
        """End everything at once. Idempotent."""
        self._stop_listening()
        for connection, _ in self._open():
            connection.kill()
        until = time.monotonic() + _CLOSE_SECONDS
        for _, thread in self._open():
            thread.join(max(0.0, until - time.monotonic()))

    def _open(self) -> list[tuple[Connection, threading.Thread]]:
        with self._lock:
            return list(self._connections.items())

    def _stop_listening(self) -> None:
        with self._lock:
            self._draining = True
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        for thread in self._acceptors:
            thread.join()
        for listener in listeners:
            listener.close()
        if listeners and self.socket is not None:
            with suppress(OSError):
                # Somebody may have removed it, and another service may listen at the path now.
                if _file(self.socket) == self._socket_file:
                    self.socket.unlink()

    # ---- letting in

    def _accept(self, listener: socket.socket) -> None:
        while not self._draining:
            try:
                sock, peer = listener.accept()
            except OSError as error:
                if not self._draining:
                    # Out of descriptors, most likely: those that leave make room.
                    _log.error("cannot accept a connection: %s", error)
                    time.sleep(_DRAIN_STEP)
                continue
            self._admit(sock, peer)

    def _admit(self, sock: socket.socket, peer: object) -> None:
        local = sock.family == socket.AF_UNIX
        name = f"data-{next(_numbers)}"
        _log.debug("%s: a connection from %s", name, "the Unix socket" if local else peer)
        connection = Connection(sock, self._port, name, context=None if local else self._context)
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"kvtier-{name}", daemon=True)
        with self._lock:
            admitted = not self._draining and len(self._connections) < self._settings.max_connections
            if admitted:
                self._connections[connection] = thread
        if admitted and _starts(thread):
            return
        with self._lock:
            self._connections.pop(connection, None)
        connection.turn_away()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.run()
        except Exception:  # noqa: BLE001  the thread's top level
            _log.exception("a connection died")
        finally:
            with self._lock:
                self._connections.pop(connection, None)


def _file(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _starts(thread: threading.Thread) -> bool:
    try:
        thread.start()
    except RuntimeError as error:  # as many threads as the system allows
        _log.error("cannot serve a connection: %s", error)
        return False
    return True


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"service.host = {host!r}: {error.strerror}: name an address of this machine") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"service.host = {host!r}, service.data_port = {port}: {error.strerror}: choose others"
        ) from error
    return listener
