"""SpeedMeter: what it says of transfers whose latency and speed are known."""

import threading
from random import Random

import pytest

from kvtier.cost import UNMEASURED, SpeedMeter, TierSpeed

MIB = 1 << 20


def test_latency_and_speed_are_told_apart_where_sizes_differ() -> None:
    meter = SpeedMeter()
    for nbytes in (MIB, 5 * MIB, 2 * MIB, 9 * MIB, 3 * MIB):
        meter.observe(nbytes, 0.004 + nbytes / 2e9)
    speed = meter.snapshot()
    assert speed.bytes_per_second == pytest.approx(2e9)
    assert speed.latency_seconds == pytest.approx(0.004)
    assert speed.seconds(10 * MIB) == pytest.approx(0.004 + 10 * MIB / 2e9)


def test_equal_sizes_leave_all_time_to_the_bytes() -> None:
    meter = SpeedMeter()
    for _ in range(4):
        meter.observe(MIB, 0.01)
    assert meter.snapshot() == TierSpeed(pytest.approx(MIB / 0.01), pytest.approx(0.0), 0)


def test_a_tier_that_slows_down_is_seen_to_and_so_is_its_recovery() -> None:
    meter = SpeedMeter()
    sizes = Random(1)
    for speed in (1e9, 1e7, 1e9):
        for _ in range(20):
            nbytes = sizes.randrange(MIB, 8 * MIB)
            meter.observe(nbytes, nbytes / speed)
        assert meter.snapshot().seconds(4 * MIB) == pytest.approx(4 * MIB / speed, rel=0.35)


def test_noise_gives_neither_negative_latency_nor_negative_speed() -> None:
    noise = Random(2)
    meter = SpeedMeter()
    for _ in range(500):
        meter.observe(noise.randrange(1, MIB), noise.random() + 1e-6)
        speed = meter.snapshot()
        assert speed.bytes_per_second is not None
        assert 0 < speed.bytes_per_second < float("inf")
        assert speed.latency_seconds >= 0


def test_what_says_nothing_is_ignored() -> None:
    meter = SpeedMeter()
    meter.observe(0, 1.0)
    meter.observe(5, 0.0)
    assert meter.snapshot() == UNMEASURED
    assert UNMEASURED.seconds(1) is None


def test_the_queue_adds_up_from_many_threads() -> None:
    meter = SpeedMeter()

    def move() -> None:
        for _ in range(500):
            meter.started(7)
            meter.observe(7, 0.5)
            meter.ended(7)

    meter.started(100)
    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.snapshot() == TierSpeed(pytest.approx(14.0), pytest.approx(0.0), 100)
    # 100 queued bytes go first.
    assert meter.snapshot().seconds(40) == pytest.approx(10.0)
