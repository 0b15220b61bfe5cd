"""Unix sockets that only their owner may connect to."""

import errno
import os
import socket
from pathlib import Path

from kvtier.errors import ConfigError

__all__ = ["listen_at"]

_LONGEST = 107  # bytes of a path that the kernel takes


def listen_at(path: Path) -> socket.socket:
    """A listening socket at `path`; one that a dead process left there is replaced.

    Raises:
        ConfigError: a live process listens there, or the path is none for a socket.
    """
    if len(os.fsencode(path)) > _LONGEST:
        raise ConfigError(f"socket {str(path)!r}: a socket's path has at most {_LONGEST} bytes; choose a shorter one")
    if path.exists() and not path.is_socket():
        raise ConfigError(f"socket {str(path)!r} is a file or a directory: name a path where nothing is")
    if path.is_socket():
        if _answers(path):
            raise ConfigError(f"socket {str(path)!r}: a process listens there already; choose another path, or end it")
        path.unlink()
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Before `bind`, which makes the file with it: there is no moment at which others may connect.
        os.fchmod(taken.fileno(), 0o600)
        taken.bind(str(path))
        taken.listen()
    except OSError as error:
        taken.close()
        raise ConfigError(f"socket {str(path)!r}: {error.strerror}: choose another path") from error
    return taken


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full queue of connections is an answer, too
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)
