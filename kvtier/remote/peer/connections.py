"""Connections to one cache service, each used by one call at a time, and errors as a remote tier tells them."""

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvtier.breaker import Breaker
from kvtier.client.errors import ClientError, DeadlineExceeded, Forbidden, Interrupted, Refused, Unauthorized
from kvtier.client.pipeline import Pipeline
from kvtier.errors import TierTimeout, TierUnavailable
from kvtier.remote.counting import Counts
from kvtier.remote.peer.link import Link

__all__ = ["Connections", "Peer", "Unwilling"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# From a tenth of a second to 1.6: the store need not know that a service is being restarted.
_PAUSE = 0.1
_IDLE = 16


class Unwilling(TierUnavailable):
    """The service is up and does not want this client: waiting does not help."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom connections lead to.

    Args:
        address: "host:port", or "unix:PATH".
        token: the caller's, "" for none.
        tls: verifies the service; None: no TLS.
    """

    address: str
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


class Connections:
    """Connections to a peer. Thread-safe.

    A peer that cannot be reached is tried by one call per pause, and all others fail at once meanwhile.

    Args:
        peer: whom they lead to.
        counts: where to count.
    """

    def __init__(self, peer: Peer, counts: Counts) -> None:
        self.peer = peer
        self._counts = counts
        self._breaker = Breaker(1, _PAUSE, time.monotonic)
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._closed = False

    def run(self, call: Callable[[Link], _T], deadline: float) -> _T:
        """Make a call over a connection of its own; once more where an idle one turned out to have ended.

        Raises:
            TierTimeout: no answer by the deadline.
            TierUnavailable: the peer cannot be reached, or could not a moment ago, or refuses.
            Refused: what the peer refuses, but for who asks.
        """
        try:
            known = self._idler()
            if known is not None:
                try:
                    return self._lent(known, call)
                except Interrupted:
                    # It may have ended long ago, and so may the other idle ones.
                    self._counts.met("retry")
                    self._forget()
            return self._lent(self._opened(deadline), call)
        except DeadlineExceeded as error:
            raise TierTimeout(str(error)) from error
        except Unauthorized as error:
            raise Unwilling(
                f"{self.peer.address} refuses: no valid token; tiering.remote.token_file is to hold what `kvtier cache "
                "token create` printed there"
            ) from error
        except Forbidden as error:
            raise Unwilling(f"{self.peer.address} refuses: {error}") from error
        except Refused:
            raise
        except ClientError as error:
            self._failed()
            raise TierUnavailable(str(error)) from error

    def _idler(self) -> Link | None:
        with self._lock:
            self._require_open()
            found = self._idle.pop() if self._idle else None
            if found is not None:
                self._busy.add(found)
            return found

    def _opened(self, deadline: float) -> Link:
        if not self._breaker.allows():
            raise TierUnavailable(f"{self.peer.address} could not be reached a moment ago")
        try:
            made = self._linked(deadline)
        except DeadlineExceeded:
            self._failed()
            raise
        if self._breaker.is_open:
            self._breaker.succeeded()
            self._counts.met("reconnect")
            _log.info("%s: reached %s again", self._counts.name, self.peer.address)
        with self._lock:
            if not self._closed:
                self._busy.add(made)
                return made
        made.pipeline.close()
        raise TierUnavailable(f"{self.peer.address}: this tier is closed")

    def _linked(self, deadline: float) -> Link:
        pipeline = Pipeline(self.peer.address, self.peer.token, self.peer.tls, deadline)
        try:
            return Link(pipeline, deadline)
        except BaseException:
            pipeline.close()
            raise

    def _lent(self, link: Link, call: Callable[[Link], _T]) -> _T:
        try:
            return call(link)
        finally:
            with self._lock:
                self._busy.discard(link)
                kept = link.pipeline.broken is None and not self._closed and len(self._idle) < _IDLE
                if kept:
                    self._idle.append(link)
            if not kept:
                link.pipeline.close()

    def _failed(self) -> None:
        self._counts.met("refused")
        self._breaker.failed()

    def _forget(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.pipeline.close()

    def _require_open(self) -> None:
        if self._closed:
            raise TierUnavailable(f"{self.peer.address}: this tier is closed")

    def close(self) -> None:
        """Close all connections; calls under way fail. Idempotent."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        for link in busy:
            link.pipeline.stream.stop()
        self._forget()
