"""Real remote servers that can be killed, frozen, filled, restarted empty, and have their values damaged."""

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import obstore
from daemon_world import Daemon, Nursery
from objects_world import ObjectServer
from valkey_world import PREFIX, Server, settings

from kvtier.client import Block
from kvtier.client.data import DataClient
from kvtier.config import RemoteSettings
from kvtier.remote.objects.packing import table_bytes

RUN = 4
"""Blocks per object."""
PATIENCE = 1.0
"""Seconds that a load may take, by the options of the stores over a rig."""
SLACK = 20.0
"""What a busy machine adds to a deadline."""
_FREE = 1 << 30
_TOLD = 64


class Rig(Protocol):
    """One server, its data, and what can happen to it.

    settings: of a tier on it, with a short timeout. fills: it can be made full.
    """

    settings: RemoteSettings
    fills: bool

    def kill(self) -> None:
        """End it at once."""

    def start(self) -> None:
        """Start it again, without any data."""

    def freeze(self) -> None:
        """It takes connections and answers nothing."""

    def thaw(self) -> None:
        """It goes on."""

    def fill(self) -> None:
        """It has room for nothing more, and drops nothing."""

    def drain(self) -> None:
        """It has room again."""

    def corrupt(self, keys: Sequence[bytes]) -> int:
        """Damage the block bytes of every record; how many there were. Those of a peer are found by keys alone."""

    def close(self) -> None:
        """End it for good."""


class ValkeyRig:
    """A Valkey server, which has a limit and drops nothing."""

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

    def corrupt(self, keys: Sequence[bytes]) -> int:
        damage, count = b"damage", 0
        with self._server.client() as client:
            for name in client.scan_iter(PREFIX + b"*"):
                # One that was found out meanwhile is gone.
                client.setrange(name, max(client.strlen(name) - len(damage), 0), damage)
                count += 1
        return count

    def close(self) -> None:
        self._server.kill()


class ObjectsRig:
    """An S3 server, which outlives the rig: the next one has the same."""

    fills = False

    def __init__(self, server: ObjectServer) -> None:
        self._server = server
        self._server.empty()
        self.settings = server.settings("faults", RUN, timeout=0.5)

    def kill(self) -> None:
        self._server.kill()

    def start(self) -> None:
        self._server.start()

    def freeze(self) -> None:
        self._server.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._server.signal(signal.SIGCONT)

    def fill(self) -> None:
        raise NotImplementedError

    def drain(self) -> None:
        raise NotImplementedError

    def corrupt(self, keys: Sequence[bytes]) -> int:
        store = self._server.store()
        objects = [meta["path"] for batch in obstore.list(store) for meta in batch]
        for path in objects:
            with contextlib.suppress(FileNotFoundError):
                data = bytearray(obstore.get(store, path).bytes())
                # Blocks are no smaller than that.
                for at in range(table_bytes(RUN), len(data), 512):
                    data[at] ^= 1
                obstore.put(store, path, bytes(data))
        return RUN * len(objects)

    def close(self) -> None:
        """The next one has the same server."""


class PeerRig:
    """Another process's cache service. It evicts where it has no room: it is never full."""

    fills = False

    def __init__(self, daemons: Nursery, path: Path) -> None:
        self._daemon = Daemon(daemons, path / "peer")
        self.settings = RemoteSettings(url=f"kvtier://{self._daemon.socket}", timeout=0.4, absent_ttl=0)

    def kill(self) -> None:
        self._daemon.kill()

    def start(self) -> None:
        self._daemon.start()

    def freeze(self) -> None:
        self._daemon.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._daemon.signal(signal.SIGCONT)

    def fill(self) -> None:
        raise NotImplementedError

    def drain(self) -> None:
        raise NotImplementedError

    def corrupt(self, keys: Sequence[bytes]) -> int:
        """Another client of the tenant writes what is wrong, under the right names."""
        count = 0
        with DataClient(f"unix:{self._daemon.socket}", shared=False) as client:
            ns = next(one.name for one in client.namespaces() if one.name.endswith(".exact"))
            for at in range(0, len(keys), _TOLD):
                found = client.get_many(ns, keys[at : at + _TOLD], each=True)
                if found:
                    client.delete(ns, [one.key for one in found])
                    client.put_many(ns, [_damaged(one.key, one.data) for one in found])
                count += len(found)
        return count

    def close(self) -> None:
        self._daemon.kill()


def _damaged(key: bytes, data: memoryview) -> Block:
    wrong = bytearray(data)
    wrong[len(wrong) // 2] ^= 1
    return Block(key, wrong)
