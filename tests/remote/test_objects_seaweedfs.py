"""The same on a second S3 server, SeaweedFS."""

import contextlib
from collections.abc import Iterator
from itertools import count

import pytest
from objects_world import SeaweedServer, flip

from kvtier.config.remote import RemoteSettings
from kvtier.metrics import Metrics
from kvtier.remote import RemoteTier, open_remote
from kvtier.testing import OpenTierSuite
from kvtier.testing.blocks import chain_refs, content, load, put
from kvtier.tiers import Exists, Status, Tier

_folders = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    running = SeaweedServer(tmp_path_factory.mktemp("seaweedfs"))
    yield running
    # It does not end on SIGTERM.
    running.kill()


def settings(server: SeaweedServer, run: int) -> RemoteSettings:
    return server.settings(str(next(_folders)), run, timeout=30)


class TestSeaweedFS(OpenTierSuite):
    bounded = False
    eager_closure = False
    capacity_blocks = 4

    @pytest.fixture(autouse=True)
    def _settings(self, server: SeaweedServer) -> None:
        self.settings = settings(server, 1)

    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> RemoteTier:
        return open_remote(self.settings, metrics)

    def corrupt(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, RemoteTier)
        flip(tier, key + b"e", at=-100)


def test_runs(server: SeaweedServer) -> None:
    chosen = settings(server, 4)
    refs = chain_refs(10)
    with contextlib.closing(open_remote(chosen)) as one, contextlib.closing(open_remote(chosen)) as two:
        put(one, refs[:8], 1 << 16)
        assert two.reserve(refs[:8], [1 << 16] * 8, ["raw"] * 8, "writer") == [Exists(ready=True)] * 8
        found = load(two, [ref.key for ref in refs[2:8]])
        assert [status for status, _ in found] == [Status.OK] * 6
        assert all(data == content(ref, 1 << 16) for ref, (_, data) in zip(refs[2:8], found, strict=True))
