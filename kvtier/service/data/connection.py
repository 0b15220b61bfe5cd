"""One connection: requests are read, done and answered one after the other, in one thread."""

import contextlib
import logging
import socket
import ssl
import time

from kvtier import __version__
from kvtier.client.stream import StreamClosed, StreamTimeout, stream_over
from kvtier.errors import FormatMismatch, KVTierError, RequestError
from kvtier.service.cache import ServiceError
from kvtier.service.data.exchange import Exchange
from kvtier.service.data.session import Port, Session
from kvtier.service.data.verbs import HANDLERS
from kvtier.wire.frames import VERSION, Flag, Header, Opcode, WireError, frame
from kvtier.wire.messages import Error, Hello, Limits, Welcome, decode, encode

__all__ = ["Connection"]

_log = logging.getLogger(__name__)
_access = logging.getLogger("kvtier.service.access")

# Before anybody is known: a hello is short.
_HELLO_HEAD = 4096
_RETRY_SECONDS = 1.0
_HANDSHAKE_SECONDS = 10.0
_EVER = 1e9
# Worth a line also where all went well; what moves blocks has counters.
_TOLD = (Opcode.CREATE,)
# Done for their answers alone: where none is wanted, there is nothing to do.
_FOR_THE_ANSWER = (Opcode.GET, Opcode.LEASE, Opcode.SHARE, Opcode.LIST)


class Connection:
    """Speaks with one client, from hello to the end.

    Args:
        sock: just accepted; closed at the end.
        port: see `Port`.
        name: names the connection in logs, and to the cache as an owner.
        context: of TLS; None: without.
    """

    def __init__(self, sock: socket.socket, port: Port, name: str, *, context: ssl.SSLContext | None) -> None:
        self._sock = sock
        self._context = context
        self._port = port
        self._name = name
        self._local = sock.family == socket.AF_UNIX
        self._exchange: Exchange | None = None
        self._finishing = False
        self._killed = False

    def run(self) -> None:
        """Serve until the other side closes, breaks the rules or is too slow."""
        idle = self._port.settings.idle_timeout
        try:
            stream = stream_over(self._sock, self._context, min(idle, _HANDSHAKE_SECONDS))
        except (StreamClosed, StreamTimeout) as error:
            _log.info("%s: %s", self._name, error)
            return
        self._exchange = Exchange(stream, idle)
        try:
            self._converse(self._exchange)
        finally:
            stream.close()

    def _converse(self, exchange: Exchange) -> None:
        session: Session | None = None
        try:
            session = self._greet(exchange)
            # A hold ends by its release or the death of its owner, never by a timer.
            while not self._killed and exchange.next(_EVER if session.holds else None):
                self._serve(exchange, session)
                # Only after a request: one may have arrived before this was said.
                if self._finishing:
                    break
            exchange.settle()
        except StreamClosed as error:
            _log.debug("%s: %s", self._name, error)
        except StreamTimeout as error:
            _log.info("%s: %s", self._name, error)
            if not exchange.waiting:
                exchange.part(Error(504, "timeout", f"{error}: this connection is closed"))
        except WireError as error:
            self._part(exchange, Error(400, "invalid", str(error)))
        except ServiceError as error:
            self._part(exchange, _refusal(error))
        finally:
            if session is not None:
                session.close(lambda what: _log.info("%s is gone: %s", self._name, what))

    # ---- from other threads

    def turn_away(self) -> None:
        """Too many are here: say so, if that can be done at once."""
        error = Error(503, "busy", "this port has all the connections that it may: try again", _RETRY_SECONDS)
        with self._sock as sock, contextlib.suppress(OSError):
            if self._context is None:
                sock.setblocking(False)
                sock.send(frame(Opcode.HELLO, Flag.ANSWER | Flag.ERROR, 0, encode(error)))
                sock.shutdown(socket.SHUT_WR)

    def finish(self) -> None:
        """Answer what has arrived, then end; to be called again where it was just between two requests."""
        self._finishing = True
        exchange = self._exchange
        if exchange is not None and exchange.waiting:
            exchange.stream.stop(writing=False)

    def kill(self) -> None:
        """End at once."""
        self._killed = True
        if self._exchange is not None:
            self._exchange.stream.stop()
        else:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    # ---- the conversation

    def _part(self, exchange: Exchange, error: Error) -> None:
        _log.info("%s: %s", self._name, error.message)
        exchange.part(error)

    def _greet(self, exchange: Exchange) -> Session:
        if not exchange.next(min(self._port.settings.idle_timeout, _HANDSHAKE_SECONDS)):
            raise StreamClosed("gone before it said hello")
        header = exchange.header
        if header.opcode != Opcode.HELLO or header.flags or header.head > _HELLO_HEAD or header.body:
            raise ServiceError("unauthorized", f"opcode {header.opcode} before anybody is known: say hello first")
        hello = decode(Hello, exchange.head())
        if VERSION not in hello.versions:
            raise WireError(f"protocol versions {hello.versions[:8]}: this service speaks {VERSION}")
        session = Session(self._port, hello.token, self._name, local=self._local)
        exchange.answer(encode(self._welcome(session)))
        _log.debug("%s: hello from token %s", self._name, session.caller.token)
        return session

    def _welcome(self, session: Session) -> Welcome:
        settings, caller = self._port.settings, session.caller
        limits = Limits(settings.max_block, settings.max_batch, settings.max_batch_keys, settings.idle_timeout)
        scopes = sorted(scope.value for scope in caller.scopes)
        return Welcome(VERSION, f"kvtier {__version__}", caller.tenant, scopes, limits, session.may_share)

    def _serve(self, exchange: Exchange, session: Session) -> None:
        began = time.perf_counter()
        error = self._refused(exchange, session)
        if error is not None or exchange.header.opcode in _TOLD:
            self._tell(exchange.header, session, error, time.perf_counter() - began)
        if error is not None:
            self._refuse(exchange, error)
        exchange.skip()

    def _refused(self, exchange: Exchange, session: Session) -> Error | None:
        """Do a request; why it was not done."""
        try:
            self._do(exchange, session)
        except (StreamClosed, StreamTimeout):
            raise
        except ServiceError as error:
            return _refusal(error)
        except (FormatMismatch, RequestError, WireError) as error:
            return Error(400, "invalid", str(error))
        except KVTierError as error:
            _log.warning("%s: %s", self._name, error)
            return Error(503, "busy", f"{error}", _RETRY_SECONDS)
        return None

    def _tell(self, header: Header, session: Session, error: Error | None, seconds: float) -> None:
        """A line in the access log, as REST has one for each request. The client knows the number at its end."""
        known = header.opcode in HANDLERS
        _access.info(
            "request",
            extra={
                "method": Opcode(header.opcode).name.lower() if known else str(header.opcode),
                "status": 200 if error is None else error.status,
                "code": None if error is None else error.code,
                "seconds": round(seconds, 4),
                "request_id": f"{self._name}-{header.request}",
                "token": session.known.token,
                "tenant": session.known.tenant,
            },
        )

    @staticmethod
    def _do(exchange: Exchange, session: Session) -> None:
        opcode, flags = exchange.header.opcode, exchange.header.flags
        head = exchange.head()
        if opcode not in HANDLERS or flags & ~Flag.QUIET:
            raise ServiceError("invalid", f"opcode {opcode} with flags {flags}: no request of version {VERSION}")
        if exchange.unread and opcode != Opcode.PUT:
            raise ServiceError("invalid", f"a body of {exchange.unread} bytes: {Opcode(opcode).name} has none")
        if not (exchange.quiet and opcode in _FOR_THE_ANSWER):
            HANDLERS[Opcode(opcode)](exchange, session, head)

    def _refuse(self, exchange: Exchange, error: Error) -> None:
        if exchange.unread > self._port.settings.max_batch:
            # To read all of it would serve nobody.
            exchange.part(error)
            raise StreamClosed("a body beyond all limits")
        exchange.refuse(error)


def _refusal(error: ServiceError) -> Error:
    return Error(error.status, error.code, str(error), error.retry_after)
