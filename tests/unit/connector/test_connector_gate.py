"""The gate over real tiers, one of which is made to sleep."""

import contextlib
from collections.abc import Iterator

import pytest
from connector_world import (
    BLOCK_BYTES,
    NAMESPACE,
    SIZE,
    Request,
    SlowTier,
    answer,
    holds_nothing,
    load,
    save,
    settle,
    store_run,
)

from kvtier.connector import ConnectorOptions, TierScheduler
from kvtier.cost import LoadOrRecompute
from kvtier.cpu import HostTier, StagingRegion
from kvtier.errors import ConfigError
from kvtier.hooks import Match
from kvtier.store import TieredStore

TOKENS = list(range(8 * SIZE + 1))
IDS = list(range(9))


@pytest.fixture
def slow() -> SlowTier:
    return SlowTier(256 * BLOCK_BYTES)


@pytest.fixture
def store(slow: SlowTier) -> Iterator[TieredStore]:
    with contextlib.closing(TieredStore(HostTier(64 * BLOCK_BYTES), [slow])) as store:
        yield store


@pytest.fixture
def staging() -> Iterator[StagingRegion]:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 16)) as staging:
        yield staging


def half_of(store: TieredStore, staging: StagingRegion, *, gate: bool = True) -> TierScheduler:
    return TierScheduler(store, NAMESPACE, SIZE, staging, ConnectorOptions(recompute_gate=gate))


def decisions(store: TieredStore, choice: str, reason: str, tier: str) -> float:
    return store.metrics.value("gate_decisions_total", choice=choice, reason=reason, tier=tier)


def throttle(half: TierScheduler, store: TieredStore, slow: SlowTier) -> None:
    """Slow the tier down to 0.8 s for a chain of eight blocks, and load short chains until the gate has noticed.

    Against 0.32 s to compute them: a busy machine tips neither way.
    """
    slow.rate = 8 * BLOCK_BYTES / 0.8
    half.observe_prefill(100, 1.0)
    for number in range(4):
        request = Request(f"short {number}", [1000 + number, *TOKENS[1 : 2 * SIZE + 1]])
        save(half, store, request, IDS[:3])
        store.clear("host")
        again = Request(f"short {number} again", request.tokens)
        if not answer(half, again).tokens:
            half.allocated(again, IDS[:3], 0)
            return
        load(half, again, 2 * SIZE)
    raise AssertionError("never noticed")


def test_a_throttled_tier_flips_the_choice_and_says_so(
    store: TieredStore, staging: StagingRegion, slow: SlowTier
) -> None:
    half = half_of(store, staging)
    save(half, store, Request("first", TOKENS), IDS)
    half.observe_prefill(100, 1.0)
    store.clear("host")
    fast = Request("fast", TOKENS)
    assert answer(half, fast) == Match(8 * SIZE)
    assert half.explain("fast").reason == "unmeasured"
    assert load(half, fast, 8 * SIZE) == {"fast": (8 * SIZE, True)}

    throttle(half, store, slow)
    store.clear("host")
    refused = Request("refused", TOKENS)
    reads = slow.reads
    assert answer(half, refused) == Match(0)
    half.allocated(refused, IDS, 0)
    decision = half.explain("refused")
    assert (decision.load_tokens, decision.reason, decision.tier) == (0, "slow", "slow")
    assert decision.recompute_seconds == pytest.approx(0.32)
    assert slow.reads == reads
    assert decisions(store, "recompute", "slow", "slow") == 2  # and once for the short chain
    # Where computing is as slow as the tier, it is loaded from.
    for _ in range(40):
        half.observe_prefill(10, 1.0)
    assert answer(half, Request("patient", TOKENS)) == Match(8 * SIZE)
    half.finished("patient", "abort")
    settle(half)
    assert holds_nothing(store)


def test_a_fast_prefix_is_loaded_and_a_slow_tail_is_not(
    store: TieredStore, staging: StagingRegion, slow: SlowTier
) -> None:
    half = half_of(store, staging)
    save(half, store, Request("long", TOKENS), IDS)
    throttle(half, store, slow)
    store.clear("host")
    assert store_run(store, Request("all", TOKENS)) == ("slow",) * 8
    warm = store.prefetch(_keys(TOKENS[: 5 * SIZE]), "test").result(10)
    assert warm.blocks == 5
    assert store_run(store, Request("all", TOKENS)) == ("host",) * 5 + ("slow",) * 3
    split = Request("split", TOKENS)
    assert answer(half, split) == Match(5 * SIZE)
    assert half.explain("split").load_tokens == 5 * SIZE
    assert decisions(store, "split", "slow", "slow") == 1
    assert load(half, split, 5 * SIZE) == {"split": (5 * SIZE, True)}


def _keys(tokens: list[int]) -> list[bytes]:
    from kvtier.keys import store_keys

    return store_keys(Request("keys", tokens).chain, NAMESPACE.mask())


def test_a_slow_tier_is_probed_and_recovers(store: TieredStore, staging: StagingRegion, slow: SlowTier) -> None:
    half, now = half_of(store, staging), [0.0]
    half._gate._model = LoadOrRecompute(probe_seconds=10, probe_bytes=2 * BLOCK_BYTES, clock=lambda: now[0])
    save(half, store, Request("first", TOKENS), IDS)
    throttle(half, store, slow)
    slow.rate = float("inf")
    offers = []
    for number in range(6):
        now[0] += 11
        store.clear("host")
        request = Request(f"r{number}", TOKENS)
        offer = answer(half, request)
        offers.append(offer.tokens // SIZE)
        if offer.tokens:
            load(half, request, offer.tokens)
        else:
            half.allocated(request, IDS, 0)
    assert offers[0] == 2
    assert offers[-1] == 8


def test_without_the_gate_everything_found_is_loaded(
    store: TieredStore, staging: StagingRegion, slow: SlowTier
) -> None:
    half = half_of(store, staging, gate=False)
    half.observe_prefill(10**9, 1.0)
    slow.rate = 8 * BLOCK_BYTES / 0.02
    save(half, store, Request("first", TOKENS), IDS)
    for name in ("a", "b"):
        store.clear("host")
        request = Request(name, TOKENS)
        assert answer(half, request) == Match(8 * SIZE)
        load(half, request, 8 * SIZE)
        assert half.explain(name) is None


def test_a_declined_request_is_not_asked_about_again_until_it_is_admitted(
    store: TieredStore, staging: StagingRegion, slow: SlowTier
) -> None:
    half = half_of(store, staging)
    save(half, store, Request("first", TOKENS), IDS)
    throttle(half, store, slow)
    store.clear("host")
    before = decisions(store, "recompute", "slow", "slow")
    request = Request("waits", TOKENS)
    for _ in range(5):
        assert half.match(request, 0) == Match(0)
    assert decisions(store, "recompute", "slow", "slow") == before + 1


def test_patience_follows_from_what_computing_would_take(
    store: TieredStore, staging: StagingRegion, slow: SlowTier
) -> None:
    options = ConnectorOptions(load_seconds=8.0, least_seconds=0.5)
    half = TierScheduler(store, NAMESPACE, SIZE, staging, options)
    save(half, store, Request("first", TOKENS), IDS)
    assert half._gate.patience("nobody") == 8.0
    seen = []
    for rate in (16, 64, 10**6):
        half._gate._prefill.__init__()
        half.observe_prefill(rate, 1.0)
        request = Request(f"r{rate}", TOKENS)
        answer(half, request)
        half.finished(request.id, "abort")
        seen.append(half._gate.patience(request.id))
    # 32 tokens: 2 s, 0.5 s and nothing; half as much again, within the bounds.
    assert seen == [3.0, 0.75, 0.5]


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="shards=0"):
        ConnectorOptions(shards=0)
    with pytest.raises(ConfigError, match="load_seconds=0"):
        ConnectorOptions(load_seconds=0)
