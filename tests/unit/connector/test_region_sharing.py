"""Regions given to workers: bytes seen by both sides, and who is refused."""

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.connector import sharing
from kvtier.connector.sharing import RegionServer, attach
from kvtier.cpu import StagingRegion
from kvtier.errors import TierUnavailable


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Not in `tmp_path`, which may be longer than a socket's path can be.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory, f"kvtier-{os.getuid()}")


@pytest.fixture
def staging():
    staging = StagingRegion(4096, 2)
    yield staging
    staging.close()


def test_both_sides_see_the_same_bytes(staging):
    server = RegionServer("engine-1", staging.regions())
    try:
        (span,) = staging.allocate(1)
        # As often as there are workers.
        for text in (b"first", b"second"):
            regions = attach("engine-1", 10)
            regions[span.region].view(span)[: len(text)] = text
            assert bytes(staging.view(span)[: len(text)]) == text
        with pytest.raises(TierUnavailable, match="does not answer"):
            attach("engine-2", 0)
    finally:
        server.close()
        server.close()
    assert not server.path.exists()
    with pytest.raises(TierUnavailable, match="does not answer"):
        attach("engine-1", 0)


def test_who_comes_first_waits(staging):
    servers = []
    timer = threading.Timer(0.2, lambda: servers.append(RegionServer("late", staging.regions())))
    timer.start()
    try:
        assert list(attach("late", 20)) == [share.region for share in staging.regions()]
    finally:
        timer.join()
        servers[0].close()


def test_a_directory_that_others_can_enter_is_refused(staging, runtime):
    runtime.mkdir(mode=0o755)
    with pytest.raises(TierUnavailable, match="nobody else can enter"):
        RegionServer("engine", staging.regions())
    runtime.chmod(0o700)
    RegionServer("engine", staging.regions()).close()
    runtime.rmdir()
    runtime.symlink_to(runtime.parent)
    with pytest.raises(TierUnavailable, match="remove it"):
        attach("engine", 0)


def test_another_user_gets_nothing(staging, monkeypatch):
    server = RegionServer("engine", staging.regions())
    try:
        monkeypatch.setattr(sharing, "_user", lambda _: os.getuid() + 1)
        with pytest.raises(TierUnavailable, match="served by user"):
            attach("engine", 0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(server.path))
            sock.settimeout(10)
            assert sock.recv(1) == b""
    finally:
        server.close()


def test_what_the_dead_left_is_swept_away_and_the_living_stay(staging, runtime):
    living, dead = RegionServer("living", staging.regions()), runtime / "dead.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(dead))
    try:
        RegionServer("young", staging.regions()).close()
        assert dead.exists()
        for path in (dead, living.path):
            os.utime(path, (0, 0))
        RegionServer("later", staging.regions()).close()
        assert not dead.exists()
        assert attach("living", 10)
    finally:
        living.close()


def test_a_socket_left_behind_is_replaced(staging):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        path = RegionServer("engine", staging.regions())
        path.close()
        dead.bind(str(path.path))
    server = RegionServer("engine", staging.regions())
    try:
        assert attach("engine", 10)
    finally:
        server.close()
