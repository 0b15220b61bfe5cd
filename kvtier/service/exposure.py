"""Who can reach the service, and whether that is safe: refused before anything is opened."""

import ipaddress
import socket
from pathlib import Path

from kvtier.config import ServiceSettings
from kvtier.errors import ConfigError

__all__ = ["check_exposure"]


def check_exposure(settings: ServiceSettings) -> None:
    """Let settings pass under which nobody reads or writes others' blocks unasked.

    Raises:
        ConfigError: off loopback without tokens, or without TLS unless `service.allow_plaintext`; several tenants
            without tokens that tell them apart; a certificate that is no file.
    """
    for name, path in (("tls_cert", settings.tls_cert), ("tls_key", settings.tls_key)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"service.{name} = {path}: no such file: name a PEM file")
    if settings.tenants is not None and settings.tokens is None:
        raise ConfigError(
            "service.tenants without service.tokens: nobody could say which tenant a caller is of; set service.tokens "
            "and make some with `kvtier cache token create --tenant NAME`"
        )
    if _is_loopback(settings.host):
        return
    if settings.tokens is None:
        raise ConfigError(
            f"service.host = {settings.host!r} is reached from other machines, and service.tokens is none: set it and "
            "make a token with `kvtier cache token create`, or listen on 127.0.0.1"
        )
    if settings.tls_cert is None and not settings.allow_plaintext:
        raise ConfigError(
            f"service.host = {settings.host!r} is reached from other machines, and there is no TLS: who is on the way "
            "could read tokens and blocks; set service.tls_cert and service.tls_key, or, where the network is your "
            "own, service.allow_plaintext = true"
        )


def _is_loopback(host: str) -> bool:
    """Whether every address that a name stands for is this machine's own."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"service.host = {host!r}: {error.strerror}: name an address of this machine") from error
    return all(ipaddress.ip_address(str(row[4][0]).partition("%")[0]).is_loopback for row in found)
