"""The service's process: both ports, its signals, and how it ends.

SIGTERM, SIGINT   drain: /readyz turns to 503, new calls are refused, what runs may end within `service.drain_timeout`;
                  then everything is flushed. Exit code 0, or 1 if something was left behind, which is not waited for
                  then. A second one stops at once
SIGHUP            read the file of tokens again
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.config import ServiceSettings, TieringSettings
from kvtier.errors import ConfigError
from kvtier.http.draining import DrainingServer, adopt_log
from kvtier.http.exposure import tls_options
from kvtier.http.listening import listen
from kvtier.service.cache import Cache, Tokens
from kvtier.service.data import DataServer
from kvtier.service.exposure import check_exposure
from kvtier.service.rest import connection_options, make_app

__all__ = ["CacheServer", "serve"]

_log = logging.getLogger(__name__)
_STEP_SECONDS = 0.02
# A connection's thread works for tenths of a millisecond at a time: nobody is to wait 5 ms for it, as Python has it.
_SWITCH_SECONDS = 0.0005


def serve(settings: ServiceSettings, tiering: TieringSettings) -> int:
    """Serve until a signal ends it; returns the exit code, or ends the process where calls are left behind.

    Args:
        settings: of the service.
        tiering: of the tiers that its tenants share.

    Raises:
        ConfigError, CapacityError, TierUnavailable: see `check_exposure`, `Tokens.open`, `Cache.open`, `DataServer`.
    """
    check_exposure(settings)
    tokens = Tokens.open(settings.tokens)
    # From the beginning: until somebody looks after it, SIGHUP ends a process.
    with _rereading(tokens), listen(settings.host, settings.port, "service") as taken:
        if tokens.required and not tokens.entries():
            _log.warning("no token is known: nobody is let in", extra={"tokens": str(settings.tokens)})
        adopt_log()
        sys.setswitchinterval(_SWITCH_SECONDS)
        cache = Cache.open(settings, tiering)
        try:
            flushed, left = _serve(cache, tokens, settings, taken)
        finally:
            cache.close()
    if left:
        # Python waits for every thread at its end, and the calls that are left may be held up by a tier.
        logging.shutdown()
        os._exit(1)
    return 0 if flushed else 1


def _serve(cache: Cache, tokens: Tokens, settings: ServiceSettings, taken: socket.socket) -> tuple[bool, int]:
    """Until a signal; whether everything was flushed, and how many calls were left."""
    data = DataServer(cache, tokens, settings)
    if settings.data_port is not None or settings.socket is not None:
        data.start()
        _log.info("listening for block bytes", extra={"address": data.address, "socket": data.socket})
    if data.address is not None:
        # What REST tells its clients: the port that the kernel chose, where 0 was asked for.
        settings = settings.model_copy(update={"data_port": data.address[1]})
    try:
        server = CacheServer(cache, tokens, settings, data)
        _keep_what_is_here()
        server.run(sockets=[taken])
        if server.force_exit:
            _log.warning("stopped at once", extra={"left": server.left})
            logging.shutdown()
            # What waits for tiers here would not be at once; they are made for the death of their process.
            os._exit(1)
        return _flushed(cache), server.left
    finally:
        data.close()


def _keep_what_is_here() -> None:
    """Modules and what they made are here for good: to look through them again, every few hundred blocks, would hold up
    every call for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()


def _flushed(cache: Cache) -> bool:
    """Make everything as durable as it can be; whether all of it is."""
    cache.flush()
    waiting, untaken = cache.left_above()
    if waiting or untaken:
        _log.error("what no lower tier took is lost", extra={"waiting_bytes": waiting, "refused_blocks": untaken})
    return not (waiting or untaken)


@contextmanager
def _rereading(tokens: Tokens) -> Iterator[None]:
    def reread(_: int, __: object) -> None:
        try:
            tokens.reload()
        except ConfigError as error:
            _log.error("tokens stay as they were: %s", error)
        else:
            _log.info("read the tokens again", extra={"tokens": len(tokens.entries())})

    before = signal.signal(signal.SIGHUP, reread)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class CacheServer(DrainingServer):
    """The REST port; while it drains, so does the data port.

    Args:
        cache, tokens, settings: what it serves, to whom, within which limits.
        data: the data port; stays the caller's.
    """

    def __init__(self, cache: Cache, tokens: Tokens, settings: ServiceSettings, data: DataServer) -> None:
        options = connection_options(settings) | tls_options(settings)
        super().__init__(
            make_app(cache, tokens, settings),
            _Ports(cache, data, settings.drain_timeout),
            path="/v1",
            handshake_timeout=settings.idle_timeout,
            **options,
        )


class _Ports:
    """What drains: calls of both ports, and readings that are open."""

    def __init__(self, cache: Cache, data: DataServer, drain_timeout: float) -> None:
        self._cache = cache
        self._data = data
        self.drain_timeout = drain_timeout

    @property
    def underway(self) -> int:
        return self._cache.underway

    async def drain(self) -> None:
        self._cache.drain()
        until = time.monotonic() + self.drain_timeout
        data = asyncio.to_thread(self._data.drain, self.drain_timeout)
        _, pending = await asyncio.wait([asyncio.create_task(data)], timeout=self.drain_timeout)
        while self._cache.underway and time.monotonic() < until:
            await asyncio.sleep(_STEP_SECONDS)
        if pending or self._cache.underway:
            raise TimeoutError

    def abandon(self) -> None:
        self._data.close()
