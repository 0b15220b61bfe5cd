"""A store over another process's cache service, to which everything happens."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_world import Daemon, Nursery, nursery
from remote_world import CHAIN, CHAINS, RemoteFaultSuite

from kvtier.client import Block
from kvtier.client.data import DataClient
from kvtier.config import RemoteSettings
from kvtier.testing.blocks import chain_refs


class PeerRig:
    """See `remote_world.Rig`. A service evicts where it has no room: it is never full."""

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

    def corrupt(self) -> int:
        """Another client of the tenant writes what is wrong, under the right names."""
        count = 0
        with DataClient(f"unix:{self._daemon.socket}", shared=False) as client:
            ns = next(one.name for one in client.namespaces() if one.name.endswith(".exact"))
            for seed in [*range(CHAINS), 50, 100]:
                keys = [ref.key for ref in chain_refs(CHAIN, seed=seed)]
                found = client.get_many(ns, keys, each=True)
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


class TestPeerFaults(RemoteFaultSuite):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def daemons(cls) -> Iterator[None]:
        with nursery() as cls.nursery:
            yield

    def make_rig(self, path: Path) -> PeerRig:
        return PeerRig(self.nursery, path)
