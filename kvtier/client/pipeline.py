"""Pipeline: one connection to a data port. Requests leave in the order of calls, answers come in the same order.

There is no thread of its own: whoever waits for the next answer reads it, straight into its own buffers. A caller that
gives up before its turn leaves its answer to be skipped by the next one.
"""

import itertools
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvtier import __version__
from kvtier.client.errors import ClientError, DeadlineExceeded, Interrupted, ProtocolError, Unreachable, refused
from kvtier.client.stream import Stream, StreamClosed, StreamTimeout, connect
from kvtier.wire.frames import HEADER_BYTES, VERSION, Flag, Header, Opcode, WireError, frame, read_header
from kvtier.wire.messages import ANSWERS, Error, Hello, Welcome, decode, encode

__all__ = ["Incoming", "Pipeline", "Turn"]

_SCRAP = 1 << 18
_MOST_NUMBERS = (1 << 32) - 1
_T = TypeVar("_T")
_A = TypeVar("_A", bound=msgspec.Struct)


class Turn:
    """One request whose answer is to be read."""

    __slots__ = ("_due", "_waiting", "abandoned", "deadline", "opcode", "request")

    def __init__(self, opcode: Opcode, request: int, deadline: float) -> None:
        self.opcode = opcode
        self.request = request
        self.deadline = deadline
        self.abandoned = False
        # Locked until it is due: a fifth of the work of an Event.
        self._waiting = threading.Lock()
        self._waiting.acquire()
        self._due = False

    def call_up(self) -> None:
        """It is due. Not thread-safe: under the pipeline's lock."""
        if not self._due:
            self._due = True
            self._waiting.release()

    def wait(self) -> bool:
        """Until it is due, or its deadline; whether it is. Called once."""
        return self._waiting.acquire(timeout=max(0.0, self.deadline - time.monotonic()))


class Incoming:
    """The answers to one request, for the caller whose turn it is."""

    def __init__(self, stream: Stream, turn: Turn, deadline: float) -> None:
        self._stream = stream
        self._turn = turn
        self._deadline = deadline
        self._header: Header | None = None
        self._unread = 0

    @property
    def more(self) -> bool:
        """Whether another answer follows the one whose head was read last; before the first: True."""
        return self._header is None or bool(self._header.flags & Flag.MORE)

    def head(self, kind: type[_A]) -> _A:
        """The next answer's head.

        Raises:
            Refused: the service refused; nothing follows.
        """
        raw = self._next()
        if self._header is not None and self._header.flags & Flag.ERROR:
            error = decode(Error, raw)
            raise refused(error.message, error.status, error.code, error.retry_after)
        return decode(kind, raw)

    def _next(self) -> memoryview:
        raw = memoryview(bytearray(HEADER_BYTES))
        self._receive(raw)
        header = read_header(raw)
        opcode = self._turn.opcode
        # A service that ends the connection may say why in a message without a number.
        parting = header.flags & Flag.ERROR and not header.request
        ours = (header.opcode, header.request) == (opcode, self._turn.request)
        if not header.flags & Flag.ANSWER or not (ours or parting):
            raise WireError(f"expected an answer to request {self._turn.request}, {opcode.name}; this is {header}")
        self._header, self._unread = header, header.body
        head = memoryview(bytearray(header.head))
        self._receive(head)
        return head

    @property
    def unread(self) -> int:
        """Bytes of the answer's body that were not received yet."""
        return self._unread

    def body(self, *outs: memoryview, heads: Sequence[bytes | None] = ()) -> list[bytes]:
        """Fill `outs`, in order, with what follows of the answer's body; hashes as `Stream.fill` makes them."""
        nbytes = sum([out.nbytes for out in outs])
        if nbytes > self._unread:
            raise WireError(f"a body with {self._unread} bytes left: its head announces {nbytes} more")
        hashes = self._stream.fill(outs, self._deadline - time.monotonic(), heads)
        self._unread -= nbytes
        return hashes

    def skip(self) -> None:
        """Receive the rest of all answers, for nothing."""
        while True:
            scrap = memoryview(bytearray(min(self._unread, _SCRAP)))
            while self._unread:
                self.body(scrap[: self._unread])
            if not self.more:
                return
            self._next()

    def _receive(self, out: memoryview) -> None:
        self._stream.receive(out, self._deadline - time.monotonic())


class Pipeline:
    """See the module. Thread-safe.

    Args:
        address: "host:port" or "unix:PATH".
        token: the caller's.
        context: of TLS; None: without.
        deadline: `time.monotonic()` seconds, for connection and hello.

    Raises:
        Unreachable, Refused, DeadlineExceeded, ProtocolError: there is no connection.
    """

    def __init__(self, address: str, token: str, context: ssl.SSLContext | None, deadline: float) -> None:
        self.address = address
        self.broken: ClientError | None = None
        self._numbers = itertools.count(1)
        self._turns: deque[Turn] = deque()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        try:
            self.stream: Stream = connect(address, context, max(0.001, deadline - time.monotonic()))
        except StreamTimeout as error:
            raise DeadlineExceeded(str(error)) from error
        except StreamClosed as error:
            raise Unreachable(f"{error}: is the service up, and this its data port?") from error
        self.welcome = self._greet(token, deadline)

    def _greet(self, token: str, deadline: float) -> Welcome:
        hello = Hello([VERSION], token, f"kvtier {__version__}")
        try:
            turn = self.begin(Opcode.HELLO, hello, (), deadline)
            return self.finish(turn, lambda incoming: incoming.head(Welcome))
        except ClientError:
            self.close()
            raise

    # ---- calls

    def call(self, opcode: Opcode, message: msgspec.Struct, kind: type[_A], deadline: float) -> _A:
        """Ask, and wait for an answer that is a head."""
        if ANSWERS[opcode] is not kind:
            raise TypeError(f"{opcode.name} is answered by {ANSWERS[opcode].__name__}, not by {kind.__name__}")
        return self.finish(self.begin(opcode, message, (), deadline), lambda incoming: incoming.head(kind))

    def begin(self, opcode: Opcode, message: msgspec.Struct, body: Sequence[memoryview], deadline: float) -> Turn:
        """Send a request; every turn must be finished or abandoned.

        Raises:
            Interrupted, DeadlineExceeded: it could not be sent whole.
        """
        head = encode(message)
        nbytes = sum(view.nbytes for view in body)
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded(f"{self.address}: other requests took all of the time")
        try:
            turn = self._queue(opcode, deadline)
            try:
                self.stream.send([frame(opcode, 0, turn.request, head, nbytes), *body], deadline - time.monotonic())
            except (StreamClosed, StreamTimeout) as error:
                failed = self._fail(error)
                self._done(turn)
                raise failed from error
        finally:
            self._sending.release()
        return turn

    def _queue(self, opcode: Opcode, deadline: float) -> Turn:
        with self._lock:
            if self.broken is not None:
                raise self.broken
            turn = Turn(opcode, 1 + next(self._numbers) % _MOST_NUMBERS, deadline)
            self._turns.append(turn)
            self._wake()
        return turn

    def finish(self, turn: Turn, take: Callable[[Incoming], _T]) -> _T:
        """Wait for the turn, and read its answers with `take`.

        Raises:
            Refused: the service refused.
            Interrupted, DeadlineExceeded, ProtocolError: no whole answer came.
        """
        if not turn.wait():
            self.abandon(turn)
            raise DeadlineExceeded(f"{self.address}: no answer in time")
        incoming = Incoming(self.stream, turn, turn.deadline)
        try:
            if self.broken is not None:
                raise self.broken
            self._skip_abandoned(turn)
            return self._taken(incoming, take)
        except (StreamClosed, StreamTimeout, WireError) as error:
            raise self._fail(error) from error
        finally:
            self._done(turn)

    @staticmethod
    def _taken(incoming: Incoming, take: Callable[[Incoming], _T]) -> _T:
        try:
            result = take(incoming)
        except (StreamClosed, StreamTimeout, WireError):
            raise
        except BaseException:
            # The connection stays in step for others.
            incoming.skip()
            raise
        incoming.skip()
        return result

    def _skip_abandoned(self, turn: Turn) -> None:
        while (before := self._turns[0]) is not turn:
            Incoming(self.stream, before, turn.deadline).skip()
            with self._lock:
                self._turns.popleft()

    def abandon(self, turn: Turn) -> None:
        """Nobody will read this answer."""
        with self._lock:
            turn.abandoned = True
            self._wake()
            self._let_go()

    def _done(self, turn: Turn) -> None:
        with self._lock:
            if turn in self._turns:
                self._turns.remove(turn)
            self._wake()
            self._let_go()

    def _wake(self) -> None:
        turn = next((turn for turn in self._turns if not turn.abandoned), None)
        if turn is not None:
            turn.call_up()

    def _fail(self, error: StreamClosed | StreamTimeout | WireError) -> ClientError:
        """The connection is of no use any more; what its callers are told."""
        kinds: dict[type[Exception], type[ClientError]] = {StreamTimeout: DeadlineExceeded, WireError: ProtocolError}
        failed = kinds.get(type(error), Interrupted)(f"{self.address}: {error}")
        with self._lock:
            if self.broken is None:
                self.broken = Interrupted(f"{self.address}: the connection was given up: {error}")
            for turn in self._turns:
                turn.call_up()
        self.stream.stop()
        return failed

    def close(self) -> None:
        """End the connection; calls under way end with `Interrupted`. Idempotent."""
        self._fail(StreamClosed("closed by its owner"))
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        # A descriptor that somebody still uses must not be closed: its number may soon be another's.
        if self.broken is not None and all(turn.abandoned for turn in self._turns):
            self.stream.close()
