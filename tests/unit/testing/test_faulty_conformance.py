"""With an empty plan a FaultyTier is the tier it wraps: the public suite holds."""

from pathlib import Path

import pytest

from kvtier.cpu import HostTier
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.testing import FaultyHostTier, FaultyTier, TierSuite
from kvtier.tiers import Tier


class TestFaultyHost(TierSuite):
    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> FaultyTier:
        return FaultyHostTier(HostTier(capacity_bytes, metrics=metrics))

    def corrupt(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, FaultyHostTier)
        handles = tier.acquire([key], "vandal").wait().handles
        span = tier.span(handles[0])
        tier._inner._slab.region.array[span.offset + span.nbytes // 2] ^= 1
        tier.release(handles)


class TestFaultyNvme(TierSuite):
    capacity_blocks = 128
    eviction_slack = 32
    eager_closure = False

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self._path = tmp_path / "nvme"

    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> FaultyTier:
        options = NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0)
        return FaultyTier(NvmeTier(self._path, capacity_bytes, options, metrics=metrics))

    def corrupt(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, FaultyTier)
        (handle,) = tier.acquire([key], "vandal").wait().handles
        with (self._path / "seg-00000.kv").open("r+b") as file:
            file.seek(handle.page * 4096 + handle.nbytes // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        tier.release([handle])
