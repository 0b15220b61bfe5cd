"""The host tier passes the public suite."""

import pytest

from kvtier.cpu import HostTier
from kvtier.metrics import Metrics
from kvtier.testing import TierSuite
from kvtier.tiers import Tier


class TestHostTier(TierSuite):
    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> HostTier:
        return HostTier(capacity_bytes, metrics=metrics)

    def corrupt(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, HostTier)
        handles = tier.acquire([key], "vandal").wait().handles
        span = tier.span(handles[0])
        tier._slab.region.array[span.offset + span.nbytes // 2] ^= 1
        tier.release(handles)


class TestHostTierWithManySizes(TestHostTier):
    """Blocks that do not fill their pages or chunks."""

    block_bytes = 20480
    capacity_blocks = 100


@pytest.fixture(autouse=True)
def _sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test ends with a check of the tier's bookkeeping."""
    close = HostTier.close

    def checked(tier: HostTier) -> None:
        tier.check()
        close(tier)

    monkeypatch.setattr(HostTier, "close", checked)
