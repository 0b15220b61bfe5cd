"""Who can reach a server, and whether somebody on the way could listen: checked before anything is opened."""

import ipaddress
import socket
import ssl
from pathlib import Path
from typing import Any, Protocol

from kvtier.errors import ConfigError

__all__ = ["Exposed", "check_tls", "is_loopback", "server_context", "tls_options"]


class Exposed(Protocol):
    """Settings of a server that may do TLS, of a section of the configuration."""

    @property
    def host(self) -> str:
        """Address to listen on."""
        ...

    @property
    def tls_cert(self) -> Path | None:
        """Certificate chain; with `tls_key`, or neither."""
        ...

    @property
    def tls_key(self) -> Path | None:
        """Private key of it."""
        ...

    @property
    def allow_plaintext(self) -> bool:
        """Whether the network can be trusted."""
        ...


def is_loopback(host: str, section: str) -> bool:
    """Whether every address that a name stands for is this machine's own.

    Raises:
        ConfigError: it stands for none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{section}.host = {host!r}: {error.strerror}: name an address of this machine") from error
    return all(ipaddress.ip_address(str(row[4][0]).partition("%")[0]).is_loopback for row in found)


def check_tls(settings: Exposed, section: str, secrets: str) -> None:
    """Let settings pass under which nobody on the way reads what is sent, unless they allow it.

    Args:
        settings: of the server.
        section: their name, for errors.
        secrets: what is sent, for errors.

    Raises:
        ConfigError: off loopback without TLS and without `allow_plaintext`; a certificate that is none.
    """
    context = server_context(settings, section)
    if context is None and not settings.allow_plaintext and not is_loopback(settings.host, section):
        raise ConfigError(
            f"{section}.host = {settings.host!r} is reached from other machines, and there is no TLS: who is on the "
            f"way could read {secrets}; set {section}.tls_cert and {section}.tls_key, or, where the network is your "
            f"own, {section}.allow_plaintext = true"
        )


def server_context(settings: Exposed, section: str) -> ssl.SSLContext | None:
    """What a listening socket needs for TLS (1.2 or later); None: it does none.

    Raises:
        ConfigError: a file is not there, or they are no certificate and its key.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    for name, path in (("tls_cert", settings.tls_cert), ("tls_key", settings.tls_key)):
        if not path.is_file():
            raise ConfigError(f"{section}.{name} = {path}: no such file: name a PEM file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An encrypted key is refused, instead of waiting at a terminal that nobody looks at.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except OSError as error:
        raise ConfigError(
            f"{section}.tls_cert = {settings.tls_cert}, {section}.tls_key = {settings.tls_key}: "
            f"{error.strerror or error}: name a PEM certificate and its key, without a passphrase"
        ) from error
    return context


def tls_options(settings: Exposed) -> dict[str, Any]:
    """Options of `kvtier.http.draining.DrainingServer` that make it do TLS, if settings do."""
    if settings.tls_cert is None:
        return {}
    return {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}
