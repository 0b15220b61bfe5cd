"""A store over another process's cache service, to which everything happens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_world import nursery
from remote_world import RemoteFaultSuite
from rigs_world import PeerRig


class TestPeerFaults(RemoteFaultSuite):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def daemons(cls) -> Iterator[None]:
        with nursery() as cls.nursery:
            yield

    def make_rig(self, path: Path) -> PeerRig:
        return PeerRig(self.nursery, path)
