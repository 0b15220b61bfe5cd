"""The scheduler half alone: what it offers, plans and reports, with transfers ended by hand."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
from connector_world import BLOCK_BYTES, NAMESPACE, SIZE, Request
from patience import until

from kvtier.connector import TierScheduler
from kvtier.cpu import HostTier, StagingRegion
from kvtier.hooks import Completed, Match, Pending, Step, StepSpan, TransferPlan, TransferResults
from kvtier.keys import store_keys
from kvtier.store import TieredStore


@pytest.fixture
def store() -> Iterator[TieredStore]:
    with contextlib.closing(TieredStore(HostTier(64 * BLOCK_BYTES))) as store:
        yield store


@pytest.fixture
def staging() -> Iterator[StagingRegion]:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 4)) as staging:
        yield staging


@pytest.fixture
def half(store: TieredStore, staging: StagingRegion) -> Iterator[TierScheduler]:
    half = TierScheduler(store, NAMESPACE, SIZE, staging)
    yield half
    until(lambda: (step(half), half.completed(TransferResults()), not half.busy)[-1])
    stats = store.stats()["host"]
    assert stats["leases"] == stats["reservations"] == 0
    assert staging.free_slots == 4


def step(half: TierScheduler, *spans: StepSpan, written: Sequence[int] = ()) -> TransferPlan:
    return half.plan(Step(0, spans, frozenset(written)))


def answer(half: TierScheduler, request: Request, device_tokens: int = 0) -> Match:
    found: list[Match | Pending] = []
    until(lambda: not isinstance(found.append(half.match(request, device_tokens)) or found[-1], Pending))
    assert isinstance(found[-1], Match)
    return found[-1]


def finish(half: TierScheduler, plan: TransferPlan) -> Completed:
    return half.completed(TransferResults(finished=(*plan.loads, *plan.saves)))


def save(half: TierScheduler, request: Request, blocks: Sequence[int], *, exact: bool = True) -> TransferPlan:
    plan = step(half, StepSpan(request, tuple(blocks), 0, request.num_tokens, exact), written=blocks)
    finish(half, plan)
    return plan


def load_plan(half: TierScheduler) -> TransferPlan:
    plans: list[TransferPlan] = []
    until(lambda: bool(plans.append(step(half)) or plans[-1].loads))
    return plans[-1]


def stored(store: TieredStore, request: Request) -> int:
    store.flush()
    return len(store.match(store_keys(request.chain, NAMESPACE.mask()), lossy=True).tiers)


FIRST = Request("first", list(range(13)))
SECOND = Request("second", [*range(12), 77])


def test_full_blocks_are_saved_once(half: TierScheduler, store: TieredStore) -> None:
    plan = save(half, FIRST, [5, 6, 7, 8])
    (copies,) = plan.saves.values()
    assert [copy.block_id for copy in copies] == [5, 6, 7]
    assert stored(store, FIRST) == 3
    assert step(half, StepSpan(FIRST, (5, 6, 7, 8), 13, 14, exact=True)).saves == {}
    half.finished("first", "stop")
    assert save(half, SECOND, [1, 2, 3, 4]).saves == {}


def test_offers_whole_blocks_and_leaves_a_token(half: TierScheduler) -> None:
    save(half, FIRST, [5, 6, 7, 8])
    until(lambda: answer(half, SECOND) == Match(12))
    assert half.match(SECOND, 4) == Match(8)
    exact_multiple = Request("third", list(range(12)))
    assert answer(half, exact_multiple) == Match(8)
    half.finished("second", "abort")
    half.finished("third", "abort")


def test_a_match_that_the_device_covers_is_given_up(half: TierScheduler, store: TieredStore) -> None:
    save(half, FIRST, [5, 6, 7, 8])
    assert stored(store, FIRST) == 3
    assert half.match(SECOND, 12) == Match(0)
    half.match(SECOND, 0)
    until(lambda: half.match(SECOND, 12) == Match(0))
    assert store.stats()["host"]["leases"] == 0


def test_only_what_the_device_lacks_is_leased(half: TierScheduler, store: TieredStore) -> None:
    save(half, FIRST, [5, 6, 7, 8])
    assert stored(store, FIRST) == 3
    assert answer(half, SECOND, 8) == Match(4)
    assert store.stats()["host"]["leases"] == 1
    # By the next step the device has lost a block: what was leased does not fit any more.
    assert answer(half, SECOND, 4) == Match(8)
    assert store.stats()["host"]["leases"] == 2
    half.allocated(SECOND, [20, 21, 22, 23], 8)
    plan = load_plan(half)
    assert [copy.block_id for copy in next(iter(plan.loads.values()))] == [21, 22]
    assert finish(half, plan).loaded == {"second": (12, True)}


@pytest.mark.parametrize("good", [None, 1, 0])
def test_a_load_reports_what_is_good(half: TierScheduler, store: TieredStore, good: int | None) -> None:
    save(half, FIRST, [5, 6, 7, 8])
    assert stored(store, FIRST) == 3
    assert answer(half, SECOND, 4) == Match(8)
    half.allocated(SECOND, [20, 21, 22, 23], 8)
    plan = load_plan(half)
    ((job, copies),) = plan.loads.items()
    assert [copy.block_id for copy in copies] == [21, 22]
    results = TransferResults(finished=(job,)) if good is None else TransferResults(failed={job: good})
    done = half.completed(results)
    assert done.loaded == {"second": (12 if good is None else 4 + 4 * good, True)}
    assert done.failed == (frozenset() if good is None else {"second"})
    arrived = 2 if good is None else good
    assert store.metrics.value("loaded_bytes_total", tier="host") == arrived * BLOCK_BYTES


def test_abort_while_looking_up(half: TierScheduler, store: TieredStore) -> None:
    save(half, FIRST, [5, 6, 7, 8])
    stored(store, FIRST)
    half.match(SECOND, 0)
    assert half.finished("second", "abort") is False


def test_abort_while_offered(half: TierScheduler, store: TieredStore) -> None:
    save(half, FIRST, [5, 6, 7, 8])
    stored(store, FIRST)
    answer(half, SECOND)
    assert half.finished("second", "abort") is False
    assert store.stats()["host"]["leases"] == 0


def test_abort_while_copying_holds_the_blocks(half: TierScheduler, store: TieredStore) -> None:
    save(half, FIRST, [5, 6, 7, 8])
    stored(store, FIRST)
    answer(half, SECOND)
    half.allocated(SECOND, [20, 21, 22, 23], 12)
    plan = load_plan(half)
    assert half.finished("second", "abort") is True
    done = finish(half, plan)
    assert done.released == ("second",)
    assert done.loaded == {}


def test_preempted_while_copying_and_asked_again(half: TierScheduler, store: TieredStore) -> None:
    save(half, FIRST, [5, 6, 7, 8])
    stored(store, FIRST)
    answer(half, SECOND)
    half.allocated(SECOND, [20, 21, 22, 23], 12)
    plan = load_plan(half)
    assert half.finished("second", "preempt") is True
    assert isinstance(half.match(SECOND, 0), Pending)
    assert finish(half, plan).released == ("second",)
    assert answer(half, SECOND) == Match(12)
    half.finished("second", "abort")


@pytest.mark.parametrize("device_tokens", [0, 4])
def test_asked_again_while_copying_without_a_word_of_preemption(
    half: TierScheduler, store: TieredStore, device_tokens: int
) -> None:
    save(half, FIRST, [5, 6, 7, 8])
    assert stored(store, FIRST) == 3
    assert answer(half, SECOND, 4) == Match(8)
    half.allocated(SECOND, [20, 21, 22, 23], 8)
    plan = load_plan(half)
    # Its bytes are on their way into blocks that it has no more.
    assert isinstance(half.match(SECOND, device_tokens), Pending)
    assert finish(half, plan).loaded == {}
    assert answer(half, SECOND, device_tokens) == Match(12 - device_tokens)
    half.allocated(SECOND, [30, 31, 32, 33], 12 - device_tokens)
    again = load_plan(half)
    assert [copy.block_id for copy in next(iter(again.loads.values()))] == [30, 31, 32][device_tokens // 4 :]
    assert finish(half, again).loaded == {"second": (12, True)}


@pytest.mark.parametrize("order", [("load", "save"), ("save", "load"), ("both",)])
def test_abort_with_load_and_save_pending_frees_once(
    half: TierScheduler, store: TieredStore, order: tuple[str, ...]
) -> None:
    save(half, FIRST, [5, 6, 7, 8])
    stored(store, FIRST)
    half.completed(TransferResults())
    longer = Request("longer", [*range(12), *range(50, 60)])
    # Its first life saves what it computed beyond the stored prefix, and is preempted while that goes on.
    saving = step(half, StepSpan(longer, tuple(range(10, 16)), 0, 22, exact=True), written=range(10, 16))
    assert len(saving.saves) == 1
    assert half.finished("longer", "preempt") is False
    assert answer(half, longer) == Match(12)
    half.allocated(longer, list(range(20, 26)), 12)
    loading = load_plan(half)
    assert half.finished("longer", "abort") is True
    assert half.finished("longer", "abort") is True
    jobs = {"load": tuple(loading.loads), "save": tuple(saving.saves), "both": (*loading.loads, *saving.saves)}
    released = [half.completed(TransferResults(finished=jobs[which])).released for which in order]
    assert [ids for ids in released if ids] == [("longer",)]
    assert half.finished("longer", "abort") is False


def test_unknown_ids_are_tolerated(half: TierScheduler) -> None:
    assert half.finished("nobody", "abort") is False
    half.allocated(Request("nobody", [1]), [], 0)
    assert half.completed(TransferResults(finished=(99,), failed={98: 0})) == Completed()


def test_blocks_under_copy_are_fenced(half: TierScheduler) -> None:
    plan = step(half, StepSpan(FIRST, (5, 6, 7, 8), 0, 13, exact=True), written=[5, 6, 7, 8])
    (job,) = plan.saves
    assert plan.fences == frozenset()
    assert step(half, written=[1, 2]).fences == frozenset()
    assert step(half, written=[6]).fences == {job}
    finish(half, plan)
    assert step(half, written=[6]).fences == frozenset()


def test_a_chain_longer_than_staging_gets_no_holes(half: TierScheduler, store: TieredStore) -> None:
    long = Request("long", list(range(41)))
    ids = list(range(11))
    plan = step(half, StepSpan(long, tuple(ids), 0, 41, exact=True), written=ids)
    while plan.saves:
        finish(half, plan)
        store.flush()
        half.completed(TransferResults())
        plan = step(half, StepSpan(long, tuple(ids), 41, 41, exact=True))
    assert stored(store, long) == 10
    half.finished("long", "stop")


def test_what_staging_never_took_is_counted(half: TierScheduler, store: TieredStore) -> None:
    plan = step(half, StepSpan(Request("long", list(range(41))), tuple(range(11)), 0, 41, exact=True))
    half.finished("long", "abort")
    assert store.metrics.value("dropped_blocks_total", tier="host", reason="staging_full") == 6
    finish(half, plan)


def test_lossy_kv_is_stored_as_such_and_offered_to_those_who_want_it(half: TierScheduler, store: TieredStore) -> None:
    save(half, FIRST, [5, 6, 7, 8], exact=False)
    assert stored(store, FIRST) == 3
    assert answer(half, SECOND) == Match(0)
    willing = Request("willing", SECOND.tokens, lossy=True)
    assert answer(half, willing) == Match(12, exact=False)
    half.allocated(willing, [20, 21, 22, 23], 12)
    assert finish(half, load_plan(half)).loaded == {"willing": (12, False)}


def test_exact_blocks_are_sent_over_lossy_ones(half: TierScheduler, store: TieredStore) -> None:
    save(half, FIRST, [5, 6, 7, 8], exact=False)
    assert stored(store, FIRST) == 3
    half.finished("first", "stop")
    half.completed(TransferResults())
    assert len(next(iter(save(half, SECOND, [1, 2, 3, 4], exact=True).saves.values()))) == 3
    store.flush()
    half.completed(TransferResults())
    third = Request("third", SECOND.tokens)
    assert answer(half, third) == Match(12, exact=True)
    half.finished("third", "abort")
    # Neither the exact ones again, nor lossy ones over them.
    for number, exact in enumerate((True, False)):
        again = Request(f"again {number}", SECOND.tokens)
        assert save(half, again, [1, 2, 3, 4], exact=exact).saves == {}


def test_a_dead_store_is_a_miss(half: TierScheduler, store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(half, FIRST, [5, 6, 7, 8])
    stored(store, FIRST)

    def broken(*_: object) -> Iterator[None]:
        raise MemoryError("injected")
        yield

    monkeypatch.setattr(store, "_acquire", broken)
    assert answer(half, SECOND) == Match(0)
