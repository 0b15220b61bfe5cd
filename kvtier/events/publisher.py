"""Publisher: block events over ZMQ, in a thread of its own. Needs the extra `events` (pyzmq).

Nobody waits for it: what an engine changes is folded into its mirror at once, and sent when this thread comes to it. A
subscriber that is too slow loses messages, sees it by their sequence numbers, and asks for them again.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import zmq
from prometheus_client import CollectorRegistry, Counter

from kvtier.errors import ConfigError, FormatMismatch
from kvtier.events.frames import (
    END_OF_REPLAY,
    BlockEvent,
    decode_sequence,
    encode_batch,
    encode_sequence,
)

__all__ = ["Publisher", "Source"]

_log = logging.getLogger(__name__)

_JOIN_SECONDS = 5.0
_LONGEST_QUEUE = 100_000


class Source(Protocol):
    """Where events come from; see `Mirror`."""

    wake: Callable[[], None]

    def take(self) -> list[BlockEvent]:
        """Changes since the last call; empty if there are none."""
        ...

    def snapshot(self) -> list[BlockEvent]:
        """All there is, behind a `BlocksCleared`."""
        ...

    def close(self) -> None:
        """Nobody asks any more."""
        ...


class Publisher:
    """Publishes from construction to `close`.

    Messages are numbered from 0 on. Whoever asks for some that are not kept any more gets one message in their place,
    with the number of the latest: all there is, behind a `BlocksCleared`.

    Args:
        source: the publisher's from now on; closed with it.
        endpoint: to bind, for subscribers: `tcp://127.0.0.1:5557`, `ipc:///run/kvtier/events`; port 0 is any free one.
        replay_endpoint: to bind, for those that lost messages; None: they have to wait for what comes.
        topic: first frame of every message.
        buffer_bytes: of messages that are kept for replay.
        queue: messages that wait for one subscriber at most; what comes then is lost for it.
        registry: where it counts.

    Attributes:
        endpoint, replay_endpoint: as they are bound.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(
        self,
        source: Source,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer_bytes: int = 64 << 20,
        queue: int = _LONGEST_QUEUE,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._source = source
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._buffer_bytes = buffer_bytes
        self._next = 0
        self._published = _Counts(registry or CollectorRegistry())
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub = _bound(context, zmq.PUB, endpoint, queue)
        self.endpoint = _where(self._pub)
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        if replay_endpoint is not None:
            try:
                # Of what is asked for, nothing may be lost again; it is bounded by `buffer_bytes`.
                self._replay = _bound(context, zmq.ROUTER, replay_endpoint, 0)
            except ConfigError:
                self._pub.close(0)
                raise
            self.replay_endpoint = _where(self._replay)
        self._bell = _Bell()
        source.wake = self._bell.ring
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()
        self._bell.ring()

    def close(self) -> None:
        """Send what is known now, then end. Idempotent."""
        self._closing = True
        self._bell.ring()
        self._thread.join(_JOIN_SECONDS)
        self._source.close()
        self._bell.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._closing:
                poller.poll()
                self._bell.hush()
                self._publish_all()
                self._answer_all()
            self._publish_all()
        finally:
            # What was sent last may still be on its way.
            self._pub.close(1000)
            if self._replay is not None:
                self._replay.close(0)

    def _publish_all(self) -> None:
        while events := self._source.take():
            payload = encode_batch(time.time(), events)
            number, self._next = self._next, self._next + 1
            self._pub.send_multipart([self._topic, encode_sequence(number), payload])
            self._published.messages.inc()
            self._published.events.inc(len(events))
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while self._kept_bytes > self._buffer_bytes:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer_all(self) -> None:
        replay = self._replay
        while replay is not None and replay.poll(0):
            *envelope, asked = replay.recv_multipart()
            try:
                start = decode_sequence(asked)
            except FormatMismatch as error:
                _log.warning("replay request: %s", error)
                continue
            self._published.replays.inc()
            for number, payload in self._from(start):
                replay.send_multipart([*envelope, self._topic, encode_sequence(number), payload])
            replay.send_multipart([*envelope, b"", encode_sequence(END_OF_REPLAY), b""])

    def _from(self, start: int) -> list[tuple[int, bytes]]:
        """Messages from a number on; where they are not kept, all there is in one."""
        last = self._next - 1
        if last < 0 or start == self._next:
            return []
        first = self._kept[0][0] if self._kept else self._next
        if first <= start <= last:
            return [(number, payload) for number, payload in self._kept if number >= start]
        # Those that come after it have told a part of it already, or will: to hear it twice changes nothing.
        self._published.snapshots.inc()
        return [(last, encode_batch(time.time(), self._source.snapshot()))]


class _Counts:
    """Metrics of one publisher."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.messages = Counter("kvtier_events_messages", "Messages published", registry=registry)
        self.events = Counter("kvtier_events_published", "Block events published", registry=registry)
        self.replays = Counter("kvtier_events_replays", "Replays asked for", registry=registry)
        self.snapshots = Counter(
            "kvtier_events_snapshots", "Replays of messages that were not kept any more", registry=registry
        )


class _Bell:
    """Wakes a thread that polls, from any other, which never waits."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._rung = self._closed = False

    def ring(self) -> None:
        if self._rung:
            return
        with self._lock:
            if not self._closed:
                self._rung = True
                os.eventfd_write(self.fd, 1)

    def hush(self) -> None:
        """Before the work is looked for: what comes while that goes on rings again."""
        with self._lock:
            if self._rung:
                self._rung = False
                os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


def _bound(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str, queue: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.set_hwm(queue)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(
            f"events endpoint {endpoint!r}: {error}; expected one to bind, such as tcp://127.0.0.1:5557"
        ) from error
    return socket


def _where(socket: "zmq.Socket[bytes]") -> str:
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
