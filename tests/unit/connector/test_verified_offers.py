"""Offers of what is in host only; what a request leaves behind; resets."""

import contextlib
import time
from collections.abc import Iterator

import pytest
from connector_world import (
    BLOCK_BYTES,
    NAMESPACE,
    SIZE,
    HangingTier,
    Request,
    SlowTier,
    answer,
    finish,
    holds_nothing,
    load,
    save,
    settle,
    step,
    store_run,
)
from patience import until

from kvtier.connector import ConnectorOptions, TierScheduler
from kvtier.cpu import HostTier, StagingRegion
from kvtier.errors import ConfigError
from kvtier.hooks import Match, Pending, StepSpan, TransferResults
from kvtier.store import TieredStore

TOKENS = list(range(5 * SIZE + 1))
VERIFIED = ConnectorOptions(offers="verified", recompute_gate=False)


@pytest.fixture
def staging() -> Iterator[StagingRegion]:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 8)) as staging:
        yield staging


def _store(lower: HostTier) -> TieredStore:
    return TieredStore(HostTier(64 * BLOCK_BYTES), [lower])


def test_lower_tiers_are_promoted_before_they_are_offered(staging):
    lower = SlowTier(64 * BLOCK_BYTES, rate=100 * BLOCK_BYTES)
    with contextlib.closing(_store(lower)) as store:
        half = TierScheduler(store, NAMESPACE, SIZE, staging, VERIFIED)
        save(half, store, Request("first", TOKENS), range(5))
        store.clear("host")
        second = Request("second", TOKENS)
        assert isinstance(half.match(second, 0), Pending)
        assert answer(half, second).tokens == 5 * SIZE
        assert store_run(store, second) == ("host",) * 5
        # Every byte is there: the very next plan loads it.
        half.allocated(second, range(6), 5 * SIZE)
        assert half.found_in("second") == ("slow",) * 5
        plan = step(half)
        assert [len(loads) for loads in plan.loads.values()] == [5]
        assert half.request_of(next(iter(plan.loads))) == "second"
        assert finish(half, plan).loaded == {"second": (5 * SIZE, True)}
        assert store.metrics.value("loaded_bytes_total", tier="slow") == 5 * BLOCK_BYTES
        half.finished("second", "stop")
        settle(half)
        until(lambda: holds_nothing(store))


def test_what_does_not_come_into_host_is_not_offered(staging):
    lower = HangingTier(64 * BLOCK_BYTES)
    options = ConnectorOptions(offers="verified", recompute_gate=False, load_seconds=0.3, least_seconds=0.1)
    with contextlib.closing(_store(lower)) as store:
        half = TierScheduler(store, NAMESPACE, SIZE, staging, options)
        save(half, store, Request("first", TOKENS), range(5))
        store.clear("host")
        lower.hangs = "read"
        try:
            assert answer(half, Request("second", TOKENS)) == Match(0)
        finally:
            lower.released.set()
        half.finished("second", "stop")
        settle(half)
        until(lambda: holds_nothing(store))


def test_an_answer_can_be_waited_for(staging):
    with contextlib.closing(TieredStore(HostTier(64 * BLOCK_BYTES))) as store:
        half = TierScheduler(store, NAMESPACE, SIZE, staging, VERIFIED)
        save(half, store, Request("first", TOKENS), range(5))
        second = Request("second", TOKENS)
        found = half.match(second, 0, wait=10.0)
        assert isinstance(found, Match)
        assert found.tokens == 5 * SIZE
        assert load(half, second, found.tokens) == {"second": (5 * SIZE, True)}
        half.finished("second", "stop")


def test_waiting_ends(staging):
    lower = HangingTier(64 * BLOCK_BYTES)
    with contextlib.closing(_store(lower)) as store:
        half = TierScheduler(store, NAMESPACE, SIZE, staging, VERIFIED)
        save(half, store, Request("first", TOKENS), range(5))
        store.clear("host")
        lower.hangs = "read"
        began = time.monotonic()
        try:
            assert isinstance(half.match(Request("second", TOKENS), 0, wait=0.05), Pending)
            assert 0.04 < time.monotonic() - began < 5
        finally:
            lower.released.set()
        half.finished("second", "abort")
        settle(half)
        until(lambda: holds_nothing(store))


def test_full_blocks_that_a_request_leaves_are_saved_before_their_reuse(staging):
    with contextlib.closing(TieredStore(HostTier(64 * BLOCK_BYTES))) as store:
        half = TierScheduler(store, NAMESPACE, SIZE, staging, VERIFIED)
        request = Request("first", TOKENS)
        half.leave(request, range(10, 16), 3 * SIZE + 1)
        assert half.saved("first") == 3
        assert not half.finished("first", "stop")
        plan = step(half, written=[10, 11, 12])
        (evacuation,) = plan.evacuations.values()
        assert [copy.block_id for copy in evacuation] == [10, 11, 12]
        assert plan.fences == frozenset()
        assert half.copying
        finish(half, plan)
        assert not half.copying
        settle(half)
        assert store_run(store, request) == ("host",) * 3
        # Nothing is left over, and nothing is saved twice.
        half.leave(request, range(20, 26), 3 * SIZE)
        assert step(half).evacuations == {}
        half.finished("first", "stop")


def test_what_finds_no_staging_memory_is_counted():
    with (
        contextlib.closing(StagingRegion(BLOCK_BYTES, 2)) as staging,
        contextlib.closing(TieredStore(HostTier(64 * BLOCK_BYTES))) as store,
    ):
        half = TierScheduler(store, NAMESPACE, SIZE, staging, VERIFIED)
        request = Request("first", TOKENS)
        half.leave(request, range(6), len(TOKENS))
        half.finished("first", "stop")
        finish(half, step(half))
        settle(half)
        assert store_run(store, request) == ("host",) * 2
        assert store.metrics.value("dropped_blocks_total", tier="host", reason="staging_full") == 3


def test_a_reset_forgets_what_is_stored_and_what_is_on_its_way(staging):
    with contextlib.closing(_store(SlowTier(64 * BLOCK_BYTES))) as store:
        half = TierScheduler(store, NAMESPACE, SIZE, staging, VERIFIED)
        first, other = Request("first", TOKENS), Request("other", [*range(100, 100 + 2 * SIZE)])
        save(half, store, first, range(5))
        offered = Request("offered", TOKENS)
        assert answer(half, offered).tokens == 5 * SIZE
        copying = step(half, StepSpan(other, (7, 8), 0, 2 * SIZE, exact=True))
        half.reset()
        assert store_run(store, first) == ()
        finish(half, copying)
        settle(half)
        assert store_run(store, other) == ()
        assert answer(half, offered) == Match(0)
        # What is computed from now on is kept.
        finish(half, step(half, StepSpan(other, (7, 8), 0, 2 * SIZE, exact=True)))
        settle(half)
        assert store_run(store, other) == ("host",) * 2
        for request in (other, offered):
            half.finished(request.id, "stop")
        settle(half)
        assert staging.free_slots == 8
        until(lambda: holds_nothing(store))


def test_an_unknown_rule_is_refused():
    with pytest.raises(ConfigError, match="offers='all'"):
        ConnectorOptions(offers="all")


def test_how_many_blocks_are_saved_is_known(staging):
    with contextlib.closing(TieredStore(HostTier(64 * BLOCK_BYTES))) as store:
        half = TierScheduler(store, NAMESPACE, SIZE, staging, VERIFIED)
        request = Request("first", TOKENS)
        assert half.saved("first") == 0
        plan = step(half, StepSpan(request, tuple(range(6)), 0, 2 * SIZE, exact=True))
        assert half.saved("first") == 2
        finish(half, plan)
        half.finished("first", "stop")
        assert half.saved("first") == 0
        half.completed(TransferResults())
        settle(half)
