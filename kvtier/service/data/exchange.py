"""Exchange: one message after the other over a stream, the server's end."""

import contextlib
from collections.abc import Sequence

from kvtier.client.stream import Stream, StreamClosed, StreamTimeout
from kvtier.wire.frames import HEADER_BYTES, Flag, Header, frame, read_header
from kvtier.wire.messages import Error, encode

__all__ = ["Exchange"]

# A message that has begun comes, or goes, at this rate or faster, beside the idle time-out.
_SLOWEST = 1 << 20
_SCRAP = 1 << 18
# What the other side may still send, so that it can read why it is being left.
_LINGER_SECONDS = 1.0
_LINGER_READS = 64

_NOTHING = Header(0, 0, 0, 0, 0)


class Exchange:
    """Reads requests and sends their answers.

    `header` is that of the request under way, `unread` what of its body was not received yet, `waiting` whether the
    next request has not begun.

    Args:
        stream: see `Stream`.
        idle: seconds without a move after which the other side is given up.
    """

    def __init__(self, stream: Stream, idle: float) -> None:
        self.stream = stream
        self.header = _NOTHING
        self.unread = 0
        self.waiting = False
        self._idle = idle
        self._owed = b""

    @property
    def quiet(self) -> bool:
        """Whether the request wants no answer."""
        return bool(self.header.flags & Flag.QUIET)

    def next(self, seconds: float | None = None) -> bool:
        """Wait for the next request's header, as long as idle connections may; False: the other side is done.

        Raises:
            StreamClosed, StreamTimeout: it came in part, or not in time.
            WireError: it is none.
        """
        raw = memoryview(bytearray(HEADER_BYTES))
        self.header, self.unread = _NOTHING, 0
        self.waiting = True
        wait, owed = self._idle if seconds is None else seconds, self._owed
        self._owed = b""
        try:
            if owed:
                self.stream.turn(owed, self._seconds(len(owed)), raw[:1], wait)
            else:
                self.stream.receive(raw[:1], wait)
        except StreamClosed:
            return False
        self.waiting = False
        self.stream.receive(raw[1:], self._idle)
        self.header = read_header(raw)
        self.unread = self.header.body
        return True

    def head(self) -> memoryview:
        """The request's head."""
        head = memoryview(bytearray(self.header.head))
        self.stream.receive(head, self._idle)
        return head

    def body(self, *outs: memoryview, heads: Sequence[bytes | None] = ()) -> list[bytes]:
        """Fill `outs`, in order, with what follows of the request's body; hashes as `Stream.fill` makes them."""
        nbytes = sum([out.nbytes for out in outs])
        hashes = self.stream.fill(outs, self._seconds(nbytes), heads)
        self.unread -= nbytes
        return hashes

    def skip(self) -> None:
        """Receive the rest of the body, for nothing."""
        scrap = memoryview(bytearray(min(self.unread, _SCRAP)))
        while self.unread:
            self.body(scrap[: self.unread])

    def owe(self, head: bytes) -> None:
        """Send an answer that is a head with the call that waits for the next request: nothing is done in between."""
        header = self.header
        self._owed = frame(header.opcode, Flag.ANSWER, header.request, head)

    def settle(self) -> None:
        """Send what is owed, where no request follows."""
        owed, self._owed = self._owed, b""
        if owed:
            self.stream.send([owed], self._seconds(len(owed)))

    def answer(self, head: bytes, views: Sequence[memoryview] = (), flags: int = Flag.NONE) -> None:
        """Send an answer: a head, and a body of these views."""
        header = self.header
        nbytes = sum([view.nbytes for view in views])
        message = frame(header.opcode, Flag.ANSWER | flags, header.request, head, nbytes)
        self.stream.send([message, *views], self._seconds(nbytes))

    def refuse(self, error: Error) -> None:
        """Send an error, unless no answer is wanted."""
        if not self.quiet:
            self.answer(encode(error), flags=Flag.ERROR)

    def _seconds(self, nbytes: int) -> float:
        return self._idle + nbytes / _SLOWEST

    def part(self, error: Error) -> None:
        """Send an error as the last message, and let the other side read it."""
        with contextlib.suppress(StreamClosed, StreamTimeout):
            self.answer(encode(error), flags=Flag.ERROR)
            # Closed with bytes unread, TCP would throw away what was just sent.
            self.stream.stop(reading=False)
            scrap = memoryview(bytearray(_SCRAP))
            for _ in range(_LINGER_READS):
                self.stream.receive(scrap, _LINGER_SECONDS)
