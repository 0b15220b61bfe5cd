"""From a `valkey://` URL to a backend.

valkey://host[:port][/database]       one server; redis:// is the same
valkeys://...                         with TLS; rediss:// is the same
valkey+cluster://host[:port],host...  a cluster, some of whose servers these are; valkeys+cluster:// with TLS
"""

import logging
import ssl
import time
from urllib.parse import SplitResult, urlsplit

from kvtier.config.remote import RemoteSettings
from kvtier.errors import ConfigError, TierError
from kvtier.remote.counting import Counts
from kvtier.remote.envelope import NAME_BYTES
from kvtier.remote.opening import secret_of
from kvtier.remote.valkey.backend import ValkeyBackend
from kvtier.remote.valkey.exchange import Dispatcher
from kvtier.remote.valkey.node import Address, Login, Node, Refused
from kvtier.remote.valkey.routing import ClusterRouter, Router, SingleRouter

__all__ = ["open_backend"]

_log = logging.getLogger(__name__)

_PORT = 6379
_WITH_TLS = ("valkeys", "rediss")
_MAX_PREFIX = 64


def open_backend(url: SplitResult, settings: RemoteSettings, counts: Counts) -> ValkeyBackend:
    """Open the backend, and ask the server for a first key.

    Raises:
        ConfigError: the URL, the prefix or a file does not do.
        TierUnavailable: the server is up and refuses. One that is not up is no error: it may come.
    """
    prefix = settings.prefix.encode()
    if len(prefix) > _MAX_PREFIX:
        raise ConfigError(f"tiering.remote.prefix has {len(prefix)} bytes: expected at most {_MAX_PREFIX}")
    scheme, _, cluster = url.scheme.partition("+")
    tls = _tls(settings) if scheme in _WITH_TLS else None
    login = Login(settings.username, secret_of(settings), _database(url), tls)
    if settings.username is not None and login.password is None:
        raise ConfigError(
            "tiering.remote.username without a password: set tiering.remote.password_file or password_variable"
        )
    addresses = [_address(place, settings.url) for place in url.netloc.split(",")]

    def make(address: Address) -> Node:
        return Node(address, login, counts)

    router: Router
    if cluster:
        if login.database:
            raise ConfigError(f"tiering.remote.url = {settings.url!r}: a cluster has no databases; drop {url.path}")
        router = ClusterRouter(addresses, make)
    elif len(addresses) == 1:
        router = SingleRouter(make(addresses[0]))
    else:
        raise ConfigError(
            f"tiering.remote.url = {settings.url!r}: several servers are a cluster; write {scheme}+cluster://"
        )
    backend = ValkeyBackend(Dispatcher(router, counts), prefix=prefix, ttl=settings.ttl)
    _try(backend, time.monotonic() + settings.timeout)
    return backend


def _try(backend: ValkeyBackend, deadline: float) -> None:
    try:
        backend.exists([bytes(NAME_BYTES)], deadline)
    except Refused:
        backend.close()
        raise
    except TierError as error:
        _log.warning("the remote tier is not there yet: %s", error)


def _address(place: str, url: str) -> Address:
    try:
        parts = urlsplit(f"//{place}")
        port = _PORT if parts.port is None else parts.port
    except ValueError as error:
        raise ConfigError(f"tiering.remote.url = {url!r}: {place!r}: {error}; expected host:port") from error
    if not parts.hostname:
        raise ConfigError(f"tiering.remote.url = {url!r}: {place!r} names no host; expected host:port")
    return Address(parts.hostname, port)


def _database(url: SplitResult) -> int:
    path = url.path.strip("/")
    if path and not path.isdecimal():
        raise ConfigError(f"tiering.remote.url ends in {url.path!r}: expected the number of a database, or nothing")
    return int(path or 0)


def _tls(settings: RemoteSettings) -> ssl.SSLContext:
    if (settings.cert_file is None) != (settings.key_file is None):
        raise ConfigError("tiering.remote: cert_file and key_file belong together; set both or none")
    try:
        context = ssl.create_default_context(cafile=None if settings.ca_file is None else str(settings.ca_file))
        if settings.cert_file is not None and settings.key_file is not None:
            context.load_cert_chain(settings.cert_file, settings.key_file)
    except OSError as error:
        named = [str(path) for path in (settings.ca_file, settings.cert_file, settings.key_file) if path is not None]
        raise ConfigError(
            f"tiering.remote: {', '.join(named)}: {error.strerror or error}; expected readable PEM files"
        ) from error
    return context
