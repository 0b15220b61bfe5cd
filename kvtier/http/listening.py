"""Taking an address."""

import socket

from kvtier.errors import ConfigError

__all__ = ["listen", "shown"]


def listen(host: str, port: int, section: str = "server") -> socket.socket:
    """Take an address, before anything else is opened in vain. Nobody can connect until the server runs.

    Args:
        host: name or address; the first that it stands for is taken.
        port: 0: any free one.
        section: of the configuration that names them, for errors.

    Raises:
        ConfigError: it is taken, or none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{section}.host = {host!r}: {error.strerror}: name an address of this machine") from error
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise ConfigError(
            f"{section}.host = {host!r}, {section}.port = {port}: {error.strerror}: choose others"
        ) from error
    return taken


def shown(taken: socket.socket) -> str:
    """`host:port` of a bound socket, as it stands in a URL."""
    host, port = taken.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
