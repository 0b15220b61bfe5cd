"""SimulatedTier: the public suite, and time."""

import time

import pytest

from kvtier.errors import CapacityError
from kvtier.metrics import Metrics
from kvtier.testing import TierSuite, simulated
from kvtier.testing.blocks import chain_refs, load, put
from kvtier.testing.simulated import Medium, SimulatedTier
from kvtier.tiers import Status, Tier


class TestSimulatedTier(TierSuite):
    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> SimulatedTier:
        return SimulatedTier(capacity_bytes, metrics=metrics)

    def corrupt(self, tier: Tier, key: bytes) -> None:
        assert isinstance(tier, SimulatedTier)
        tier.damage(key)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tier_of_terabytes_takes_no_memory():
    tier = SimulatedTier(1 << 45)
    handles = tier.reserve(chain_refs(3), [1 << 40] * 3, ["raw"] * 3, "writer")
    assert tier.stats()["bytes"] == 3 << 40
    tier.abort(handles)
    tier.close()


def test_transfers_queue_up_in_the_clock_s_time():
    clock = Clock()
    medium = Medium(1000.0, 0.5, clock=clock)
    assert medium.transfer(1000)
    assert medium.transfer(1000)
    assert medium.busy_seconds == pytest.approx(3.0)
    clock.now = 100.0
    assert medium.transfer(500)
    assert medium.busy_seconds == pytest.approx(4.0)


def test_whoever_waits_waits_scaled_and_a_deadline_is_real(monkeypatch):
    slept = []
    monkeypatch.setattr(simulated.time, "sleep", slept.append)
    medium = Medium(1000.0, 0.0, clock=Clock(), time_scale=100.0)
    assert medium.transfer(1000)
    assert medium.transfer(500)
    assert slept == pytest.approx([0.01, 0.015])
    assert not medium.transfer(1_000_000, time.monotonic() + 1.0)
    assert medium.busy_seconds == pytest.approx(1.5)


def test_what_a_medium_does_not_deliver_in_time_is_a_timeout():
    tier = SimulatedTier(1 << 20, medium=Medium(1e9, 0.0, time_scale=1.0))
    refs = chain_refs(2)
    put(tier, refs, 4096)
    slow = SimulatedTier(1 << 20, medium=Medium(1.0, 0.0, time_scale=1.0))
    handles = slow.reserve(refs, [4096] * 2, ["raw"] * 2, "writer")
    items = [(handle, memoryview(bytes(4096))) for handle in handles]
    assert slow.write(items, time.monotonic() + 1.0).wait().statuses == (Status.TIMEOUT,) * 2
    slow.abort(handles)
    assert [status for status, _ in load(tier, [ref.key for ref in refs])] == [Status.OK] * 2
    for one in (tier, slow):
        one.close()


@pytest.mark.parametrize("arguments", [(0.0, 0.0, None), (1.0, -1.0, None), (1.0, 0.0, 0.0), (float("nan"), 0.0, None)])
def test_an_impossible_medium_is_refused(arguments):
    rate, latency, scale = arguments
    with pytest.raises(CapacityError, match="expected a rate"):
        Medium(rate, latency, time_scale=scale)
    with pytest.raises(CapacityError, match="expected at least 4096"):
        SimulatedTier(100)
