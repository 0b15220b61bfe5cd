"""DrainingServer: a signal lets what runs end and nobody else in; a second one ends it at once."""

import asyncio
import logging
import socket
from functools import partial
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from kvtier.http.listening import shown
from kvtier.http.protocol import HeadProtocol

__all__ = ["Drainable", "DrainingServer", "adopt_log"]

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 5


class Drainable(Protocol):
    """What is served, as its draining sees it."""

    drain_timeout: float

    @property
    def underway(self) -> int:
        """How much runs."""
        ...

    async def drain(self) -> object:
        """Let nobody else in; returns once nothing runs any more."""
        ...

    def abandon(self) -> object:
        """The time is over: end what still runs. May block."""
        ...


class DrainingServer(uvicorn.Server):
    """Ends when nothing is under way any more, or when `drain_timeout` is over.

    Args:
        app: the application.
        served: what drains.
        path: of the URL that is announced in the log.
        handshake_timeout: seconds that a client may take to agree on TLS; None: a minute, as asyncio has it.
        fields: of that line, too.
        options: further ones of `uvicorn.Config`.
    """

    def __init__(
        self,
        app: ASGIApp,
        served: Drainable,
        *,
        path: str = "/",
        handshake_timeout: float | None = None,
        fields: dict[str, object] | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("http", HeadProtocol)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            **options,
        )
        super().__init__(config)
        self._drainable = served
        self._path = path
        self._handshake_timeout = handshake_timeout
        self._fields = fields or {}
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None
        self.left = 0
        """How much was still under way at the end."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say where."""
        loop = asyncio.get_running_loop()
        if self.config.is_ssl and self._handshake_timeout is not None:
            # uvicorn passes no such option on.
            within = partial(loop.create_server, ssl_handshake_timeout=self._handshake_timeout)
            loop.create_server = within  # type: ignore[method-assign]
        await super().startup(sockets)
        scheme = "https" if self.config.is_ssl else "http"
        for taken in sockets or ():
            _log.info("listening", extra={"url": f"{scheme}://{shown(taken)}{self._path}", **self._fields})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal arrived; the loop looks after it."""
        self._signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: begin to drain, or stop at once."""
        if self._signals and self._drain is None:
            self._drain = asyncio.create_task(self._drained())
        if self._signals > 1:
            self.left = self._drainable.underway
            self.should_exit = self.force_exit = True
        return await super().on_tick(counter)

    async def _drained(self) -> None:
        patience = self._drainable.drain_timeout
        _log.info("draining", extra={"underway": self._drainable.underway, "seconds": patience})
        try:
            await asyncio.wait_for(self._drainable.drain(), patience)
        except TimeoutError:
            self.left = self._drainable.underway
            _log.warning("drain_timeout is over", extra={"aborted": self.left})
            # Whoever still waits gets what there is.
            await asyncio.to_thread(self._drainable.abandon)
        self.should_exit = True


def adopt_log() -> None:
    """What uvicorn has to say goes where kvtier's log goes."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("uvicorn")
    theirs.handlers[:] = ours.handlers
    theirs.propagate = False
    theirs.setLevel(logging.WARNING)
