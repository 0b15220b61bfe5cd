"""A store over a real S3 server to which everything happens, and over a directory that is full."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from objects_world import S3Server
from remote_world import RemoteFaultSuite, World
from rigs_world import RUN, ObjectsRig
from test_fault_disk import mounted

from kvtier.config import RemoteSettings


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


class TestS3Faults(RemoteFaultSuite):
    @pytest.fixture(autouse=True)
    def _server_of_all(self, server: S3Server) -> None:
        self._server = server

    def make_rig(self, path: object) -> ObjectsRig:
        return ObjectsRig(self._server)


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
