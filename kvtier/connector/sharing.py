"""Where the two hook halves meet: the scheduler half's process gives its regions to the workers of its engine.

    worker half                                              scheduler half
    attach(name)  -- connect to <private directory>/<name> -->  RegionServer(name, regions)
                  <-- regions: descriptors over the socket ---

The directory belongs to the user alone (mode 0700), and both sides ask the kernel who the other one is.
"""

import errno
import hashlib
import os
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time

from kvtier.cpu import AttachedRegion, recv_regions, send_regions
from kvtier.errors import KVTierError, TierUnavailable
from kvtier.tiers import RegionShare

__all__ = ["RegionServer", "attach"]

_CREDENTIALS = struct.Struct("3i")
_TALK_SECONDS = 10.0
_RETRY_SECONDS = 0.05
_LEFT_SECONDS = 60.0


class RegionServer:
    """Gives regions to whoever of this user asks under `name`, until closed.

    Args:
        name: known to both sides and nobody else's, for instance an engine's id.
        regions: stay the caller's.

    Raises:
        TierUnavailable: the socket cannot be made.
    """

    def __init__(self, name: str, regions: Sequence[RegionShare]) -> None:
        self._regions = tuple(regions)
        self.path = _socket_path(name)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _sweep(self.path.parent)
            self.path.unlink(missing_ok=True)
            self._socket.bind(str(self.path))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise TierUnavailable(
                f"socket {self.path}: {error}: workers could not reach the host tier; XDG_RUNTIME_DIR or TMPDIR may "
                "name another place for it, with a short path"
            ) from error
        self._thread = threading.Thread(target=self._serve, name="kvtier-regions", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer, suppress(OSError, KVTierError):
                peer.settimeout(_TALK_SECONDS)
                if _user(peer) in (os.getuid(), 0):
                    send_regions(peer, self._regions)

    def close(self) -> None:
        """Give nothing any more. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        self.path.unlink(missing_ok=True)


def attach(name: str, timeout: float = 30.0) -> dict[int, AttachedRegion]:
    """The regions that a `RegionServer` of this user on this machine gives under `name`, mapped.

    Raises:
        TierUnavailable: nobody does within `timeout` seconds.
    """
    path, until = _socket_path(name), monotonic() + timeout
    while True:
        try:
            return _attach(path)
        except OSError as error:
            if monotonic() >= until:
                raise TierUnavailable(
                    f"socket {path}: {error}: the scheduler's process does not answer; workers must run on its machine "
                    "and under its user"
                ) from error
            sleep(_RETRY_SECONDS)


def _attach(path: Path) -> dict[int, AttachedRegion]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_TALK_SECONDS)
        sock.connect(str(path))
        if _user(sock) != os.getuid():
            raise TierUnavailable(f"socket {path} is served by user {_user(sock)}, expected {os.getuid()}")
        return recv_regions(sock)


def _sweep(directory: Path) -> None:
    """Remove what processes that were killed left behind."""
    for path in directory.glob("*.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            # A young one may be about to listen.
            if time() - path.stat().st_mtime > _LEFT_SECONDS and sock.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()


def _user(sock: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _socket_path(name: str) -> Path:
    directory = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"kvtier-{os.getuid()}"
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise TierUnavailable(
            f"{directory}: mode {stat.filemode(found.st_mode)}, owner {found.st_uid}: expected a directory of this "
            "user that nobody else can enter; remove it"
        )
    return directory / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.sock"
