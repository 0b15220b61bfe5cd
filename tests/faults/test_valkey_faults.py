"""A store over a real Valkey server to which everything happens."""

import signal
from pathlib import Path

from remote_world import RemoteFaultSuite
from valkey_world import PREFIX, Server, settings

from kvtier.remote import ENVELOPE_BYTES

_FREE = 1 << 30


class ValkeyRig:
    """See `remote_world.Rig`."""

    fills = True

    def __init__(self, path: Path) -> None:
        self._server = Server(path / "valkey", "--maxmemory", str(_FREE), "--maxmemory-policy", "noeviction")
        self.settings = settings(self._server.url, timeout=0.4)

    def kill(self) -> None:
        self._server.kill()

    def start(self) -> None:
        self._server.start()

    def freeze(self) -> None:
        self._server.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._server.send(signal.SIGCONT)

    def fill(self) -> None:
        with self._server.client() as client:
            client.config_set("maxmemory", 1)

    def drain(self) -> None:
        with self._server.client() as client:
            client.config_set("maxmemory", _FREE)

    def corrupt(self) -> int:
        count = 0
        with self._server.client() as client:
            for name in client.scan_iter(PREFIX + b"*"):
                client.setrange(name, ENVELOPE_BYTES + 5000, b"damage")
                count += 1
        return count

    def close(self) -> None:
        self._server.kill()


class TestValkeyFaults(RemoteFaultSuite):
    def make_rig(self, path: Path) -> ValkeyRig:
        return ValkeyRig(path)
