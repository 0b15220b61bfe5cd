"""The scheduler half and requests that were swapped out: what it evacuates, offers and lets go, what comes ahead."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
from connector_world import (
    BLOCK_BYTES,
    NAMESPACE,
    SIZE,
    Request,
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

from kvtier.connector import TierScheduler
from kvtier.cpu import HostTier, StagingRegion
from kvtier.hooks import Match, StepSpan, TransferPlan, TransferResults
from kvtier.store import TieredStore

TOKENS = list(range(11))  # two full blocks and three tokens
BLOCKS = (5, 6, 7)


@pytest.fixture
def store() -> Iterator[TieredStore]:
    with contextlib.closing(
        TieredStore(HostTier(64 * BLOCK_BYTES), [HostTier(64 * BLOCK_BYTES, name="below")])
    ) as made:
        yield made


@pytest.fixture
def staging() -> Iterator[StagingRegion]:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 4)) as made:
        yield made


@pytest.fixture
def half(store: TieredStore, staging: StagingRegion) -> Iterator[TierScheduler]:
    made = TierScheduler(store, NAMESPACE, SIZE, staging)
    yield made
    settle(made)
    store.flush()
    assert holds_nothing(store)
    assert staging.free_slots == 4


def swap_out(half: TierScheduler, request: Request, tokens: int, *, exact: bool = True, forced: bool = True) -> bool:
    return half.swap_out(request, BLOCKS[: -(-tokens // SIZE)], tokens, exact=exact, forced=forced)


def evacuated(plan: TransferPlan) -> list[int]:
    return sorted(copy.block_id for copies in plan.evacuations.values() for copy in copies)


def leave(half: TierScheduler, request: Request, tokens: int, *, exact: bool = True) -> TransferPlan:
    """Swap a request out, and see it through."""
    assert swap_out(half, request, tokens, exact=exact)
    plan = step(half, written=BLOCKS)
    done = [finish(half, plan).swapped]
    until(lambda: done.append(half.completed(TransferResults()).swapped) or any(done))
    assert (request.id,) in done
    return plan


@pytest.mark.parametrize(("saved", "expected"), [(0, [5, 6, 7]), (8, [7])])
def test_only_what_was_not_saved_is_evacuated_before_anybody_writes(
    half: TierScheduler, saved: int, expected: Sequence[int]
) -> None:
    request = Request("r", TOKENS)
    if saved:
        finish(half, step(half, StepSpan(request, BLOCKS, 0, saved, exact=True)))
    assert evacuated(leave(half, request, 11)) == expected
    half.finished("r", "abort")


@pytest.mark.parametrize(("device", "offered"), [(0, 11), (4, 7), (8, 3)])
def test_all_of_it_is_offered_to_the_token(half: TierScheduler, device: int, offered: int) -> None:
    request = Request("r", [*TOKENS, 99])
    leave(half, request, 11)
    assert answer(half, request, device) == Match(offered, exact=True)
    assert load(half, request, offered) == {"r": (11, True)}


def test_nobody_else_is_offered_what_is_private(half: TierScheduler, store: TieredStore) -> None:
    request = Request("r", [*TOKENS, 99])
    leave(half, request, 11)
    assert answer(half, Request("other", [*TOKENS, 99])) == Match(8)
    half.allocated(Request("other", TOKENS), BLOCKS, 0)
    assert store_run(store, request) == ("host", "host")
    half.finished("r", "abort")


def test_what_is_not_exact_is_private_as_a_whole(half: TierScheduler, store: TieredStore) -> None:
    request = Request("r", [*TOKENS, 99], lossy=True)
    assert evacuated(leave(half, request, 11, exact=False)) == [5, 6, 7]
    assert store_run(store, request) == ()
    assert answer(half, request) == Match(11, exact=False)
    assert load(half, request, 11) == {"r": (11, False)}


def test_without_staging_memory_it_starts_over(half: TierScheduler, staging: StagingRegion) -> None:
    taken = staging.allocate(2)
    assert not swap_out(half, Request("r", TOKENS), 11)
    assert step(half).evacuations == {}
    staging.free(taken)


def test_auto_computes_again_where_that_is_expected_to_be_sooner(half: TierScheduler) -> None:
    half.observe_prefill(10_000, 1e-6)
    half._gate.link.observe(BLOCK_BYTES, 1.0)
    assert not swap_out(half, Request("r", TOKENS), 11, forced=False)
    assert swap_out(half, Request("r", TOKENS), 11, forced=True)
    half.finished("r", "abort")
    finish(half, step(half))


def test_a_copy_that_failed_leaves_the_full_blocks_at_most(half: TierScheduler) -> None:
    request = Request("r", [*TOKENS, 99])
    finish(half, step(half, StepSpan(request, BLOCKS, 0, 8, exact=True)))
    assert swap_out(half, request, 11)
    (job,) = step(half, written=BLOCKS).evacuations
    results = TransferResults(failed={job: 0})
    done = [half.completed(results).swapped]
    until(lambda: done.append(half.completed(TransferResults()).swapped) or any(done))
    assert answer(half, request) == Match(8)
    half.allocated(request, BLOCKS, 0)


def test_aborted_on_its_way_out_nothing_stays(half: TierScheduler, store: TieredStore) -> None:
    request = Request("r", TOKENS)
    assert swap_out(half, request, 11)
    plan = step(half, written=BLOCKS)
    half.finished("r", "abort")
    assert finish(half, plan).swapped == ()
    settle(half)
    assert store.stats()["host"]["reservations"] == 0


def test_a_waiting_request_finds_its_kv_in_host(half: TierScheduler, store: TieredStore) -> None:
    save(half, store, Request("before", TOKENS), BLOCKS)
    store.clear("host")
    request = Request("r", [*TOKENS, 99])
    assert store_run(store, request) == ("below", "below")
    for _ in range(3):
        half.prefetch(request)
    until(lambda: store_run(store, request) == ("host", "host"))
    assert store.metrics.value("prefetched_blocks_total") == 2
    half.finished("r", "abort")
