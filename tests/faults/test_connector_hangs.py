"""Tiers that hang under the connector: a request is never Pending or LOADING for ever, and nothing leaks."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from connector_world import (
    BLOCK_BYTES,
    NAMESPACE,
    SIZE,
    HangingTier,
    Request,
    answer,
    finish,
    holds_nothing,
    load,
    save,
    settle,
    step,
)
from patience import until

from kvtier.connector import ConnectorOptions, TierScheduler
from kvtier.cpu import HostTier, StagingRegion
from kvtier.hooks import Completed, Match
from kvtier.store import TieredStore

TOKENS = list(range(13))
IDS = [1, 2, 3, 4]


@pytest.fixture
def hanging() -> Iterator[HangingTier]:
    tier = HangingTier(64 * BLOCK_BYTES)
    yield tier
    tier.released.set()


@pytest.fixture
def store(hanging: HangingTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(64 * BLOCK_BYTES), [hanging])
    yield store
    hanging.hangs = ""
    hanging.released.set()
    until(lambda: holds_nothing(store))
    store.close()


@pytest.fixture
def half(store: TieredStore) -> Iterator[TierScheduler]:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 4)) as staging:
        options = ConnectorOptions(load_seconds=2.0, least_seconds=0.1)
        half = TierScheduler(store, NAMESPACE, SIZE, staging, options)
        save(half, store, Request("first", TOKENS), IDS)
        store.clear("host")
        yield half


def test_a_look_up_that_hangs_is_given_up_and_the_request_computes(
    half: TierScheduler, store: TieredStore, hanging: HangingTier
) -> None:
    hanging.hangs = "acquire"
    request = Request("r", TOKENS)
    assert answer(half, request) == Match(0)
    # It is not asked about again, however long it still waits for room.
    assert half.match(request, 0) == Match(0)
    half.allocated(request, IDS, 0)
    until(lambda: not half.busy)
    assert half.finished("r", "stop") is False
    # Somebody who needs nothing of that tier is served.
    save(half, store, Request("other", [99, *TOKENS]), IDS)
    assert answer(half, Request("again", [99, *TOKENS])) == Match(12)
    half.finished("again", "abort")


def test_a_load_that_hangs_ends_with_nothing_and_the_request_computes(
    half: TierScheduler, hanging: HangingTier
) -> None:
    request = Request("r", TOKENS)
    assert answer(half, request) == Match(12)
    hanging.hangs = "read"
    half.allocated(request, IDS, 12)
    done: list[Completed] = []
    until(lambda: done.append(finish(half, step(half))) or done[-1].loaded)
    assert done[-1].loaded["r"][0] == 0
    assert done[-1].failed == {"r"}
    until(lambda: not half.busy)
    assert half.finished("r", "stop") is False


@pytest.mark.parametrize("verb", ["acquire", "read"])
def test_an_abort_does_not_wait_for_what_hangs(half: TierScheduler, hanging: HangingTier, verb: str) -> None:
    request = Request("r", TOKENS)
    if verb == "read":
        assert answer(half, request) == Match(12)
    hanging.hangs = verb
    half.match(request, 0)
    if verb == "read":
        half.allocated(request, IDS, 12)
        step(half)
    assert half.finished("r", "abort") is False
    until(lambda: not half.busy)


def test_late_results_end_their_leases_and_the_tier_is_used_again(
    half: TierScheduler, store: TieredStore, hanging: HangingTier
) -> None:
    hanging.hangs = "read"
    request = Request("r", TOKENS)
    assert answer(half, request) == Match(12)
    half.allocated(request, IDS, 12)
    until(lambda: finish(half, step(half)).loaded)
    hanging.hangs = ""
    hanging.released.set()
    until(lambda: store.stats()["hanging"]["leases"] == 0)
    store.clear("host")
    again = Request("again", TOKENS)
    assert answer(half, again) == Match(12)
    assert load(half, again, 12) == {"again": (12, True)}
    settle(half)


def test_a_store_that_never_answers_is_given_up_and_its_answer_released(
    half: TierScheduler, store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent: list[Future[object]] = []

    def never(*arguments: object, **options: object) -> "Future[object]":
        silent.append(Future())
        return silent[-1]

    with monkeypatch.context() as patched:
        patched.setattr(store, "acquire", never)
        assert answer(half, Request("looks up", TOKENS)) == Match(0)
        half.finished("looks up", "abort")
    loads = Request("loads", TOKENS)
    assert answer(half, loads) == Match(12)
    assert store.stats()["hanging"]["leases"] == 3
    with monkeypatch.context() as patched:
        patched.setattr(store, "fetch", never)
        half.allocated(loads, IDS, 12)
    done: list[Completed] = []
    until(lambda: done.append(finish(half, step(half))) or done[-1].loaded)
    assert (done[-1].loaded, done[-1].failed) == ({"loads": (0, True)}, {"loads"})
    until(lambda: not half.busy)
    for operation in ("acquire", "fetch"):
        assert store.metrics.value("errors_total", tier="connector", operation=f"{operation}_timeout") == 1
    # A thread of the store may still be using the lease of the second; both end with their futures.
    assert store.stats()["hanging"]["leases"] == 3
    silent[1].set_result(0)
    assert store.stats()["hanging"]["leases"] == 0
    late = store.acquire(half._parts.keys(loads.chain), "looks up/1").result(10)
    assert store.stats()["hanging"]["leases"] == 3
    silent[0].set_result(late)
    assert store.stats()["hanging"]["leases"] == 0


def test_an_expired_deadline_is_counted(half: TierScheduler, store: TieredStore, hanging: HangingTier) -> None:
    hanging.hangs = "read"
    request = Request("r", TOKENS)
    assert answer(half, request) == Match(12)
    half.allocated(request, IDS, 12)
    began = time.monotonic()
    until(lambda: finish(half, step(half)).loaded)
    assert time.monotonic() - began < 30
    counted = store.metrics.value("errors_total", tier="connector", operation="fetch_timeout")
    counted += store.metrics.value("timeouts_total", tier="hanging", operation="fetch")
    counted += store.metrics.value("timeouts_total", tier="hanging", operation="read")
    assert counted >= 1
