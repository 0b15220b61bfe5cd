"""Galloping look-up against a linear scan, and what a look-up at an awkward moment gives."""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from store_world import items, keys

from kvtier.cpu import HostTier
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import TieredStore
from kvtier.store.lookup import leading_run
from kvtier.tiers import Ticket, Tier


class _Index:
    def __init__(self, held: int) -> None:
        self.held = held
        self.probes = 0

    def __call__(self, blocks: Sequence[int]) -> list[bool]:
        self.probes += len(blocks)
        return [block < self.held for block in blocks]


@given(st.integers(0, 300), st.integers(0, 300))
def test_equals_a_linear_scan(length: int, held: int) -> None:
    assert leading_run(length, _Index(held)) == min(length, held)


def test_needs_logarithmically_many_probes() -> None:
    for held in (0, 1, 4095, 5000, 8191, 8192):
        index = _Index(held)
        assert leading_run(8192, index) == held
        assert index.probes <= 27


@given(st.integers(0, 9000), st.integers(0, 9000))
def test_a_wide_one_asks_few_times_and_never_for_many(length: int, held: int) -> None:
    batches = []
    index = _Index(held)

    def counted(blocks: Sequence[int]) -> list[bool]:
        batches.append(len(blocks))
        return index(blocks)

    assert leading_run(length, counted, wide=True, few=16) == min(length, held)
    assert len(batches) <= (1 if length <= 16 else 2 if length <= 128 else 3)
    assert max(batches, default=0) <= 64


class _HeldUp:
    """A tier whose caller loses the processor for longer than a look-up may take, just before each."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def contains(self, keys: Sequence[bytes], deadline: float | None = None, *, exact: bool = False) -> Ticket:
        time.sleep(1.2 * self._tier.caps.probe)
        return self._tier.contains(keys, deadline, exact=exact)


def test_a_busy_machine_is_no_miss(tmp_path: Path) -> None:
    nvme = NvmeTier(tmp_path / "nvme", 1 << 20, NvmeOptions(min_free_bytes=0))
    with closing(TieredStore(HostTier(1 << 20), [_HeldUp(nvme)])) as store:
        store.put(items("a", 8)).result()
        store.flush()
        store.clear("host")
        # More often than a tier that gives no answer is asked before it is left alone.
        for _ in range(store.options.breaker_timeouts + 1):
            assert store.match(keys("a", 9)).tiers == ("nvme",) * 8
        assert store.metrics.value("timeouts_total", tier="nvme", operation="match") == 0
