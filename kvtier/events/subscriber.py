"""Subscriber: follows a publisher of block events, and knows when it has missed something. Needs the extra `events`.

message is the next one             applied
message was replayed already        skipped
messages are missing                replayed; where the publisher has them no more, the view is dropped and rebuilt
numbers begin anew, or the          a new publisher: the view is dropped and rebuilt
connection was lost
nothing comes                       now and then it is asked whether that is all
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvtier.errors import ConfigError, FormatMismatch
from kvtier.events.frames import (
    END_OF_REPLAY,
    Batch,
    BlockEvent,
    decode_batch,
    decode_sequence,
    encode_sequence,
)

__all__ = ["Follower", "Subscriber", "SubscriberCounts"]

_log = logging.getLogger(__name__)

_POLL_MS = 100
_REPLAY_SECONDS = 5.0
_RETRY_SECONDS = 30.0
_JOIN_SECONDS = 5.0
_QUEUE = 100_000


class Follower(Protocol):
    """Keeps a view of what a publisher holds. Called in the subscriber's thread, in the order of the events."""

    def apply(self, events: Sequence[BlockEvent]) -> None:
        """These happened."""
        ...

    def reset(self) -> None:
        """Nothing is known of this publisher any more; what follows builds it up again."""
        ...


class SubscriberCounts(NamedTuple):
    """messages: applied. gaps: times that some were missing. resyncs: times that the view was dropped, for whatever
    reason. failures: replays that were not answered. malformed: messages and events that could not be read.
    """

    messages: int = 0
    gaps: int = 0
    resyncs: int = 0
    failures: int = 0
    malformed: int = 0


class Subscriber:
    """Follows from construction to `close`.

    Args:
        endpoint: of the publisher.
        follower: keeps the view; stays the caller's.
        replay_endpoint: of the publisher; None: what is lost stays lost, and the view is dropped each time.
        topic: the beginning of those to follow.
        queue: messages that may wait here.
        quiet_seconds: after so long without a message the publisher is asked for what may have been lost.

    Attributes:
        connected: to the publisher, at the moment.

    Raises:
        ConfigError: an endpoint is none.
    """

    def __init__(
        self,
        endpoint: str,
        follower: Follower,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        queue: int = _QUEUE,
        quiet_seconds: float = 5.0,
    ) -> None:
        self.connected = False
        self._follower = follower
        self._replay_endpoint = replay_endpoint
        self._quiet_seconds = quiet_seconds
        self._counts = SubscriberCounts()
        self._next = 0  # to be applied
        self._live: int | None = None  # the latest that came by itself
        self._viewed = False  # the follower knows something
        self._stale = replay_endpoint is not None  # to be rebuilt
        self._not_before = 0.0  # nor asked for a replay that was not answered
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.set_hwm(queue)
        self._sub.setsockopt(zmq.LINGER, 0)
        self._sub.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._sub.subscribe(topic.encode())
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._sub.connect(endpoint)
            self._check(replay_endpoint)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(
                f"events endpoint {endpoint!r}, replay {replay_endpoint!r}: {error}; expected such as tcp://host:5557"
            ) from error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-follow", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> SubscriberCounts:
        """So far."""
        return self._counts

    def close(self) -> None:
        """Follow no more. Idempotent."""
        self._closing.set()
        self._thread.join(_JOIN_SECONDS)

    def _check(self, replay_endpoint: str | None) -> None:
        """An address that can never be connected is found now, not in the thread."""
        if replay_endpoint is not None:
            with self._context.socket(zmq.DEALER) as probe:
                probe.setsockopt(zmq.LINGER, 0)
                probe.connect(replay_endpoint)

    def _close_sockets(self) -> None:
        self._sub.disable_monitor()
        self._monitor.close(0)
        self._sub.close(0)

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._sub, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        heard = time.monotonic()
        try:
            while not self._closing.is_set():
                ready = dict(poller.poll(_POLL_MS))
                if self._monitor in ready:
                    self._connection_changed()
                if self._sub in ready:
                    self._receive()
                    heard = time.monotonic()
                elif time.monotonic() - heard > self._quiet_seconds:
                    self._look_after()
                    heard = time.monotonic()
        finally:
            # Whatever ended it: nobody is to take the view for a followed one.
            self.connected = False
            self._close_sockets()

    def _connection_changed(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if not self.connected:
            # Who answers next may be another: its numbers say nothing about ours.
            self._stale = True
        elif self._stale:
            self._not_before = 0.0
            self._rebuild()

    def _look_after(self) -> None:
        """It is quiet: nothing happens there, or the last messages were lost."""
        if self._replay_endpoint is None or time.monotonic() < self._not_before:
            return
        if self._stale:
            self._rebuild()
        else:
            self._catch_up()

    def _receive(self) -> None:
        """Everything that has come."""
        while not self._closing.is_set() and self._sub.poll(0):
            frames = self._sub.recv_multipart()
            message = self._read(frames)
            if message is not None:
                self._take(*message)

    def _read(self, frames: Sequence[bytes]) -> tuple[int, Batch] | None:
        try:
            number, batch = decode_sequence(frames[-2]), decode_batch(frames[-1])
        except (FormatMismatch, IndexError) as error:
            self._count(malformed=1)
            _log.warning("events: a message that cannot be read: %s", error)
            return None
        self._count(malformed=batch.skipped)
        return number, batch

    def _take(self, number: int, batch: Batch) -> None:
        """A message that came by itself."""
        restarted = self._live is not None and number <= self._live
        if restarted or (self._stale and time.monotonic() >= self._not_before):
            self._rebuild()
        elif number > self._next and self._viewed:
            self._count(gaps=1)
            self._catch_up()
        self._live = number
        # What a replay has brought is older than what waited here meanwhile, or the same.
        if number >= self._next:
            self._apply(number, batch)

    def _apply(self, number: int, batch: Batch) -> None:
        """The next message, or the first after some that nobody has any more: then it begins a new view."""
        if number != self._next:
            self._reset()
        self._viewed = True
        self._next = number + 1
        self._count(messages=1)
        self._follower.apply(batch.events)

    def _reset(self) -> None:
        if self._viewed:
            self._viewed = False
            self._count(resyncs=1)
            self._follower.reset()

    def _rebuild(self) -> None:
        """Drop the view, and build it from all that the publisher still has."""
        self._reset()
        self._stale = False
        self._next = 0
        self._live = None
        self._catch_up()

    def _catch_up(self) -> None:
        """Have what is missing sent again, from the next message on."""
        if self._replay_endpoint is None or time.monotonic() < self._not_before:
            return
        try:
            for number, batch in self._replayed(self._next):
                self._apply(number, batch)
        except TimeoutError:
            self._count(failures=1)
            # Somebody may answer later; until then nobody waits for it.
            self._stale = True
            self._not_before = time.monotonic() + _RETRY_SECONDS

    def _replayed(self, start: int) -> Iterator[tuple[int, Batch]]:
        """Messages of a replay.

        Raises:
            TimeoutError: its end did not come.
        """
        with self._context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.set_hwm(0)
            asking.connect(str(self._replay_endpoint))
            asking.send_multipart([b"", encode_sequence(start)])
            until = time.monotonic() + _REPLAY_SECONDS
            while not self._closing.is_set():
                if not asking.poll(_POLL_MS):
                    if time.monotonic() > until:
                        raise TimeoutError
                    continue
                frames = asking.recv_multipart()
                if len(frames) >= 2 and frames[-2] == encode_sequence(END_OF_REPLAY):
                    return
                until = time.monotonic() + _REPLAY_SECONDS
                message = self._read(frames)
                if message is not None:
                    yield message

    def _count(self, messages: int = 0, gaps: int = 0, resyncs: int = 0, failures: int = 0, malformed: int = 0) -> None:
        now, more = self._counts, (messages, gaps, resyncs, failures, malformed)
        self._counts = SubscriberCounts(*(had + new for had, new in zip(now, more, strict=True)))
