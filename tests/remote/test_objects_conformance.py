"""Object stores pass the public suite: a directory, and S3; block by block, where a run is one."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from objects_world import S3Server, flip

from kvtier.config.remote import RemoteSettings
from kvtier.metrics import Metrics
from kvtier.remote import RemoteTier, open_remote
from kvtier.testing import OpenTierSuite
from kvtier.tiers import Tier

_folders = count()


class TestDirectory(OpenTierSuite):
    bounded = False
    eager_closure = False

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.settings = RemoteSettings(url=tmp_path.as_uri(), options="run=1")

    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> RemoteTier:
        return open_remote(self.settings, metrics)

    def corrupt(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, RemoteTier)
        flip(tier, key + b"e", at=-100)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


class TestS3(TestDirectory):
    capacity_blocks = 4

    @pytest.fixture(autouse=True)
    def _directory(self, server: S3Server) -> None:
        self.settings = server.settings(f"conformance-{next(_folders)}", 1, timeout=30)
