"""uvicorn's connection with limits that it lacks: on heads, on silence, on clients that do not read.

A connection ends when its client sends no whole head, or takes nothing of an answer, for `service.idle_timeout`
seconds; one that waits for a further request also where there are as many as may be, and somebody else comes. A client
that ends its half of the connection after a whole request still gets its answer; one that ends it within a request is
told so.
"""

import asyncio
import json
import logging
from functools import partial
from operator import itemgetter
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kvtier.config import ServiceSettings
from kvtier.http.protocol import HeadProtocol
from kvtier.service.rest.sending import WRITE_BUFFER

__all__ = ["HEAD_LIMIT", "GuardedProtocol", "connection_options"]

HEAD_LIMIT = 1 << 16
"""Bytes of a request's line and headers, at most."""
_RETRY_SECONDS = 1

_log = logging.getLogger("kvtier.service.access")


def connection_options(settings: ServiceSettings) -> dict[str, Any]:
    """Options of `uvicorn.Config` for connections that are kept within the service's limits."""
    return {
        "http": partial(GuardedProtocol, settings),
        # Whole seconds, and at least one.
        "timeout_keep_alive": max(round(settings.idle_timeout), 1),
    }


class GuardedProtocol(HeadProtocol):
    """One connection.

    Args:
        settings: the limits.
        options: uvicorn's.
    """

    def __init__(self, settings: ServiceSettings, **options: Any) -> None:
        super().__init__(**options)
        self._settings = settings
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let it in, if there is room."""
        super().connection_made(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER)
        if len(self.connections) > self._settings.max_connections and not self._make_room():
            self._refuse(503, "busy", f"{self._settings.max_connections} connections are open: try again")
            return
        self._watch_head()

    def _make_room(self) -> bool:
        """End the connection that waits longest for a further request; whether one does."""
        waiting = [
            (one.timeout_keep_alive_task.when(), one)
            for one in cast(set[HeadProtocol], self.connections)
            if one.timeout_keep_alive_task is not None and not one.transport.is_closing()
        ]
        if waiting:
            _, longest = min(waiting, key=itemgetter(0))
            longest.timeout_keep_alive_handler()
        return bool(waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._cancel_timers()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # uvicorn's never stays open
        """The client will send no more."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.transport.is_closing():
            if self._in_head and self._head_bytes:
                self._refuse(400, "invalid", "the request ends within its head: send all of it")
            return None
        if cycle.more_body:
            if not cycle.response_started:
                self._refuse(400, "invalid", "the request ends within its body: send all of it")
            cycle.disconnected = True
            cycle.message_event.set()
            return None
        if cycle.chunked_encoding:
            # An answer without end, and nobody waits for its end.
            cycle.disconnected = True
            cycle.message_event.set()
            return None
        cycle.keep_alive = False
        # TLS cannot be half closed.
        return self.scheme == "http"

    # ---- what comes in

    def data_received(self, data: bytes) -> None:
        """Some bytes came."""
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # Whole heads are measured by `HeadGuard`.
        if self._in_head and self._head_bytes > HEAD_LIMIT and not self.transport.is_closing():
            self._refuse(
                431, "too_large", f"the head is longer than {HEAD_LIMIT} bytes: send fewer and shorter headers"
            )

    def on_message_begin(self) -> None:
        """A request begins."""
        if not self._in_head:
            self._head_bytes = 0
        super().on_message_begin()
        if self._timer is None:
            self._watch_head()

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """It is no HTTP."""
        if not self.transport.is_closing():
            self._refuse(400, "invalid", f"{msg} Send HTTP/1.1")

    # ---- what goes out

    def pause_writing(self) -> None:
        """The client takes less than is sent."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._settings.idle_timeout, self._abort)

    def resume_writing(self) -> None:
        """It took some."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came since the last answer."""
        if self.transport.get_write_buffer_size():
            # What the client has not taken by now would hold the connection for ever.
            self._abort()
        else:
            super().timeout_keep_alive_handler()

    # ---- how it ends early

    def _watch_head(self) -> None:
        self._timer = self.loop.call_later(self._settings.idle_timeout, self._head_is_late)

    def _head_is_late(self) -> None:
        self._timer = None
        if self._in_head and not self.transport.is_closing():
            seconds = self._settings.idle_timeout
            self._refuse(408, "request_timeout", f"no whole head within {seconds} s: send it at once")

    def _abort(self) -> None:
        self.transport.abort()

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._stall):
            if timer is not None:
                timer.cancel()
        self._timer = self._stall = None

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer without the application, and hang up; after the answer to what was asked before, if that is due."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body):
            cycle.keep_alive = False
            self.flow.pause_reading()
            return
        client = self.client[0] if self.client else None
        _log.info("refused connection", extra={"status": status, "code": code, "client": client})
        body = json.dumps({"error": {"code": code, "message": message, "param": None}}).encode()
        retry = b"retry-after: %d\r\n" % _RETRY_SECONDS if status == 503 else b""
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        self.transport.write(b"".join([STATUS_LINE[status], head, retry, b"\r\n", body]))
        self.transport.close()
        # What does not go out in time is given up.
        self._stall = self._stall or self.loop.call_later(self._settings.idle_timeout, self._abort)
