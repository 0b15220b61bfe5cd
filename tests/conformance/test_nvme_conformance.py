"""The NVMe tier passes the public suite."""

from pathlib import Path

import pytest

from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.testing import TierSuite
from kvtier.tiers import Tier

FAULTS = ("leaked_pages", "overlaps", "wrong_sums", "lost_rows", "corrupt")


class TestNvmeTier(TierSuite):
    block_bytes = 16384
    capacity_blocks = 128
    eviction_slack = 32
    eager_closure = False
    options = NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0)

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self._path = tmp_path / "nvme"

    @pytest.fixture(autouse=True)
    def _sound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every tier that a test closes is sound."""
        close = NvmeTier.close

        def checked(tier: NvmeTier) -> None:
            if not tier._holds.closed:
                report = tier.check(verify=True)
                assert not any(report[fault] for fault in FAULTS), report
            close(tier)

        monkeypatch.setattr(NvmeTier, "close", checked)

    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> NvmeTier:
        return NvmeTier(self._path, capacity_bytes, self.options, metrics=metrics)

    def corrupt(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, NvmeTier)
        with tier._index.read() as ledger:
            record = ledger.get(key)
        assert record is not None
        number, page = divmod(record.page, tier._segments.pages_per_file)
        with (self._path / f"seg-{number:05}.kv").open("r+b") as file:
            file.seek(page * 4096 + record.nbytes // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))


class TestNvmeTierWithBlocksThatShareNoPage(TestNvmeTier):
    """Blocks that do not fill their pages, and do not divide a segment."""

    block_bytes = 20480
    capacity_blocks = 100


class TestDurableNvmeTier(TestNvmeTier):
    options = NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0, durable=True)
