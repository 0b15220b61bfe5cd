"""A store over a real S3 server to which everything happens, and over a directory that is full."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from objects_world import S3Server
from remote_world import BLOCK, RemoteFaultSuite, World
from test_fault_disk import mounted

from kvtier.config import RemoteSettings
from kvtier.remote.objects.packing import table_bytes

RUN = 4


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


class S3Rig:
    """See `remote_world.Rig`."""

    fills = False

    def __init__(self, server: S3Server) -> None:
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

    def corrupt(self) -> int:
        store = self._server.store()
        objects = [meta["path"] for batch in obstore.list(store) for meta in batch]
        for path in objects:
            with contextlib.suppress(FileNotFoundError):
                data = bytearray(obstore.get(store, path).bytes())
                for at in range(RUN):
                    data[table_bytes(RUN) + at * BLOCK + 5000] ^= 1
                obstore.put(store, path, bytes(data))
        return RUN * len(objects)

    def close(self) -> None:
        """The next one has the same server."""


class TestS3Faults(RemoteFaultSuite):
    @pytest.fixture(autouse=True)
    def _server_of_all(self, server: S3Server) -> None:
        self._server = server

    def make_rig(self, path: object) -> S3Rig:
        return S3Rig(self._server)


class DirectoryRig:
    """A shared directory: nothing to kill, but a disk that is full."""

    fills = True

    def __init__(self, disk: Path) -> None:
        self._filler = disk / "filler"
        self.settings = RemoteSettings(url=(disk / "objects").as_uri(), options=f"run={RUN}", timeout=0.5)

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def drain(self) -> None:
        self._filler.unlink()


def test_a_full_directory(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=16m") as disk:
        world = World(DirectoryRig(disk))
        with contextlib.closing(world.store):
            RemoteFaultSuite().test_full(world)
