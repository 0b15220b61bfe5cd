"""From a `kvtier://` URL to a backend.

kvtier://host[:port]    the data port of a cache service; kvtiers:// with TLS
kvtier:///path.sock     its Unix socket
"""

import logging
import ssl
import time
from urllib.parse import SplitResult

from kvtier.config.remote import RemoteSettings
from kvtier.errors import ConfigError, TierError
from kvtier.keys import STORE_KEY_BYTES
from kvtier.remote.counting import Counts
from kvtier.remote.envelope import record_name
from kvtier.remote.opening import secret_of
from kvtier.remote.peer.backend import PeerBackend
from kvtier.remote.peer.connections import Connections, Peer, Unwilling

__all__ = ["open_backend"]

_log = logging.getLogger(__name__)

_PORT = 7701
_UNUSED = ("ttl", "username", "cert_file", "key_file", "options")


def open_backend(url: SplitResult, settings: RemoteSettings, counts: Counts) -> PeerBackend:
    """Open the backend, and say hello to the service.

    Args:
        url: what `settings.url` was split into.
        settings: `token_file`, or the password's file or variable, holds the token, whose tenant keeps the blocks.
        counts: where to count.

    Raises:
        ConfigError: the URL, an option or a file does not do.
        TierUnavailable: the service is up and refuses. One that is not up is no error: it may come.
    """
    unused = next((name for name in _UNUSED if getattr(settings, name)), None)
    if unused is not None:
        raise ConfigError(f"tiering.remote.{unused} is set, which a cache service has no use for; leave it out")
    peer = Peer(_address(url, settings.url), _token(settings), _tls(settings) if url.scheme == "kvtiers" else None)
    connections = Connections(peer, counts)
    backend = PeerBackend(connections, settings.prefix)
    deadline = time.monotonic() + settings.timeout
    try:
        backend.exists([record_name(bytes(STORE_KEY_BYTES), exact=True)], deadline)
    except Unwilling:
        backend.close()
        raise
    except TierError as error:
        _log.warning("the remote tier is not there yet: %s", error)
    return backend


def _address(url: SplitResult, text: str) -> str:
    if not url.netloc:
        if url.path in ("", "/"):
            raise ConfigError(f"tiering.remote.url = {text!r}: expected kvtier://host:port or kvtier:///socket")
        return f"unix:{url.path}"
    try:
        port = _PORT if url.port is None else url.port
    except ValueError as error:
        raise ConfigError(f"tiering.remote.url = {text!r}: {error}; expected host:port") from error
    if not url.hostname or url.path.strip("/"):
        raise ConfigError(f"tiering.remote.url = {text!r}: expected kvtier://host:port or kvtier:///socket")
    return f"[{url.hostname}]:{port}" if ":" in url.hostname else f"{url.hostname}:{port}"


def _token(settings: RemoteSettings) -> str:
    if settings.token_file is None:
        return secret_of(settings) or ""
    where = f"tiering.remote.token_file = {str(settings.token_file)!r}"
    try:
        token = settings.token_file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read ({error}); name a readable file") from error
    if not token:
        raise ConfigError(f"{where} is empty; put there what `kvtier cache token create` printed")
    return token


def _tls(settings: RemoteSettings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except OSError as error:
        raise ConfigError(f"tiering.remote.ca_file = {str(settings.ca_file)!r}: {error}; expected PEM") from error
