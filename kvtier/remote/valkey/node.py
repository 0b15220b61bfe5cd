"""One server: its connections, and how long it is left alone after it could not be reached."""

import logging
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.breaker import Breaker
from kvtier.errors import TierTimeout, TierUnavailable
from kvtier.remote.counting import Counts
from kvtier.remote.valkey.resp import Replies, Reply, ReplyError, command
from kvtier.remote.valkey.transport import Transport, connect

__all__ = ["Address", "Connection", "Login", "Node", "Refused"]

_log = logging.getLogger(__name__)

# From a tenth of a second to 1.6: the store need not know that a server is being restarted.
_PAUSE = 0.1
_IDLE = 16


class Refused(TierUnavailable):
    """The server is up and does not want this client: waiting does not help."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Login:
    """How a connection begins.

    Args:
        username, password: for AUTH; no password, no AUTH.
        database: for SELECT, which clusters do not have.
        tls: verifies the server; None: no TLS.
    """

    username: str | None = None
    password: str | None = None
    database: int = 0
    tls: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return f"Login(username={self.username!r}, database={self.database}, tls={self.tls is not None})"

    def commands(self) -> list[bytes]:
        """What is sent first."""
        words: list[list[str]] = []
        if self.password is not None:
            words.append(["AUTH", *([] if self.username is None else [self.username]), self.password])
        if self.database:
            words.append(["SELECT", str(self.database)])
        return [command(*line) for line in words]


class Connection:
    """A logged in connection. One thread at a time.

    fresh: nothing was received over it yet, so that its failure is no sign of age.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.replies = Replies(transport)
        self.fresh = True

    def ask(self, commands: Sequence[bytes], deadline: float) -> list[Reply]:
        """Send commands and receive their replies."""
        self.transport.send([b"".join(commands)], deadline)
        return [self.replies.next(deadline) for _ in commands]


class Node:
    """A server's connections. Thread-safe.

    A server that cannot be reached is tried by one call per pause, and all others fail at once meanwhile.

    Args:
        address: of the server.
        login: how connections begin.
        counts: where to count.
    """

    def __init__(self, address: Address, login: Login, counts: Counts) -> None:
        self.address = address
        self._login = login
        self._counts = counts
        self._breaker = Breaker(1, _PAUSE, time.monotonic)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False

    def take(self, deadline: float) -> Connection:
        """A connection for the caller alone, until `give` or `drop`.

        Raises:
            TierUnavailable: the server cannot be reached, or could not a moment ago.
            TierTimeout: it does not answer.
        """
        found = self._idler()
        if found is not None:
            return found
        if not self._breaker.allows():
            raise TierUnavailable(f"{self.address} could not be reached a moment ago")
        made = self._connect(deadline)
        if self._breaker.is_open:
            self._breaker.succeeded()
            self._counts.met("reconnect")
            _log.info("%s: reached %s again", self._counts.name, self.address)
        return self._admitted(made)

    def _idler(self) -> Connection | None:
        """The connection that was used last."""
        with self._lock:
            if self._closed:
                raise TierUnavailable(f"{self.address}: this tier is closed")
            found = self._idle.pop() if self._idle else None
            if found is not None:
                self._busy.add(found)
            return found

    def _admitted(self, made: Connection) -> Connection:
        with self._lock:
            if not self._closed:
                self._busy.add(made)
                return made
        made.transport.close()
        raise TierUnavailable(f"{self.address}: this tier is closed")

    def _connect(self, deadline: float) -> Connection:
        try:
            transport = connect(self.address.host, self.address.port, deadline, self._login.tls)
        except ssl.SSLError as error:
            self.failed()
            raise Refused(
                f"{self.address}: TLS failed ({error}); check certificates, and that it speaks TLS"
            ) from error
        except TimeoutError as error:
            self.failed()
            hint = "" if self._login.tls is None else "; it may not speak TLS"
            raise TierTimeout(f"{self.address}: no answer to a connection{hint}") from error
        except OSError as error:
            self.failed()
            raise TierUnavailable(f"{self.address}: {error.strerror or error}") from error
        made = Connection(transport)
        try:
            self._log_in(made, deadline)
        except BaseException:
            self.failed()
            transport.close()
            raise
        return made

    def _log_in(self, made: Connection, deadline: float) -> None:
        commands = self._login.commands()
        if not commands:
            return
        try:
            replies = made.ask(commands, deadline)
        except TimeoutError as error:
            raise TierTimeout(f"{self.address}: no answer to a login") from error
        except OSError as error:
            raise TierUnavailable(f"{self.address}: {error}") from error
        for reply in replies:
            if isinstance(reply, ReplyError):
                # The server's own words name the user at most, never a password.
                raise Refused(f"{self.address} refuses the login: {reply}")

    def failed(self) -> None:
        """It could not be reached, or broke off."""
        self._counts.met("refused")
        self._breaker.failed()

    def give(self, connection: Connection) -> None:
        """Return a connection that owes no reply."""
        connection.fresh = False
        with self._lock:
            self._busy.discard(connection)
            if not self._closed and len(self._idle) < _IDLE and connection.replies.idle:
                self._idle.append(connection)
                return
        connection.transport.close()

    def drop(self, connection: Connection) -> None:
        """Close a connection that failed, or owes replies."""
        with self._lock:
            self._busy.discard(connection)
            connection.transport.close()

    def forget(self) -> None:
        """Close the idle connections: the server they led to is gone."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.transport.close()

    def close(self) -> None:
        """Close all connections; calls under way fail."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.transport.interrupt()
        for connection in idle:
            connection.transport.close()
