"""The server's process: its socket, its signals, and how it ends."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn

from kvtier.api import AsyncLLM
from kvtier.errors import ConfigError
from kvtier.server.app import make_app
from kvtier.server.served import Served

__all__ = ["DrainingServer", "listen", "serve"]

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 5


def listen(host: str, port: int) -> socket.socket:
    """Take an address, before a model is loaded in vain. Nobody can connect until the server runs.

    Raises:
        ConfigError: it is taken, or none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"server.host = {host!r}: {error.strerror}: name an address of this machine") from error
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise ConfigError(f"server.host = {host!r}, server.port = {port}: {error.strerror}: choose others") from error
    return taken


def serve(llm: AsyncLLM, name: str, taken: socket.socket, api_keys: Sequence[str] = ()) -> None:
    """Serve until a signal ends it. The first one drains: what runs may end, nobody else is let in. The second kills.

    Args:
        llm: stays the caller's.
        name: what clients call the model.
        taken: from `listen`; closed at the end.
        api_keys: see `make_app`.
    """
    _adopt_log()
    DrainingServer(Served(llm, name), api_keys).run(sockets=[taken])


class DrainingServer(uvicorn.Server):
    """Ends when nothing is under way any more, or when `server.drain_timeout` is over.

    Args:
        served: what it serves.
        api_keys: see `make_app`.
    """

    def __init__(self, served: Served, api_keys: Sequence[str] = ()) -> None:
        config = uvicorn.Config(
            make_app(served, api_keys),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        super().__init__(config)
        self._served = served
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say where."""
        await super().startup(sockets)
        for taken in sockets or ():
            host, port = taken.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            _log.info("listening", extra={"url": f"http://{shown}:{port}/v1", "model": self._served.name})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal arrived; the loop looks after it."""
        self._signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: begin to drain, or stop at once."""
        if self._signals and self._drain is None:
            self._drain = asyncio.create_task(self._drained())
        if self._signals > 1:
            self.should_exit = self.force_exit = True
        return await super().on_tick(counter)

    async def _drained(self) -> None:
        admission, patience = self._served.admission, self._served.llm.config.server.drain_timeout
        _log.info("draining", extra={"sequences": admission.inflight, "seconds": patience})
        try:
            await asyncio.wait_for(admission.drain(), patience)
        except TimeoutError:
            _log.warning("drain_timeout is over", extra={"aborted": admission.inflight})
            # Whoever still waits gets what there is.
            await asyncio.to_thread(self._served.llm.close)
        self.should_exit = True


def _adopt_log() -> None:
    """What uvicorn has to say goes where kvtier's log goes."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("uvicorn")
    theirs.handlers[:] = ours.handlers
    theirs.propagate = False
    theirs.setLevel(logging.WARNING)
