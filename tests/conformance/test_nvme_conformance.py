"""The NVMe tier passes the public suite."""

import mmap
from pathlib import Path

import pytest

from kvtier.metrics import Metrics
from kvtier.nvme import NvmeTier
from kvtier.testing import TierSuite
from kvtier.testing.blocks import content
from kvtier.tiers import BlockRef, Tier


class TestNvmeTier(TierSuite):
    block_bytes = 4096
    capacity_blocks = 256  # the smallest directory is 1 MiB
    eviction_slack = 32
    eager_closure = False

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.path = tmp_path / "kv"

    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> Tier:
        return NvmeTier(self.path, capacity_bytes, metrics=metrics)

    def corrupt(self, tier: Tier, key: bytes) -> None:
        wanted = bytes(content(BlockRef(key, 0, 0, None, exact=True), self.block_bytes))
        for segment in self.path.glob("seg-*.kv"):
            with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
                at = data.find(wanted)
                if at >= 0:
                    data[at + 100] ^= 1
                    data.flush()
                    return
        pytest.fail("the block's bytes are in no segment")
