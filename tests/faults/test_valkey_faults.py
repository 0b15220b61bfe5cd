"""A store over a real Valkey server to which everything happens."""

from pathlib import Path

from remote_world import RemoteFaultSuite
from rigs_world import ValkeyRig


class TestValkeyFaults(RemoteFaultSuite):
    def make_rig(self, path: Path) -> ValkeyRig:
        return ValkeyRig(path)
