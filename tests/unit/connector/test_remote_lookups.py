"""Look-ups over a tier that takes round trips: the scheduler's thread never waits, and asks once."""

from connector_world import BLOCK_BYTES, NAMESPACE, SIZE, Request, answer, holds_nothing, load, save, settle
from store_world import FarTier

from kvtier.connector import ConnectorOptions, TierScheduler
from kvtier.cpu import HostTier, StagingRegion
from kvtier.hooks import Match, Pending
from kvtier.store import TieredStore


def half_over(store: TieredStore) -> TierScheduler:
    staging = StagingRegion(BLOCK_BYTES, 64)
    return TierScheduler(store, NAMESPACE, SIZE, staging, ConnectorOptions(recompute_gate=False))


def test_a_request_waits_for_the_answer_and_nobody_else_does() -> None:
    far = FarTier()
    store = TieredStore(HostTier(1 << 20), [far])
    half = half_over(store)
    first = Request("first", list(range(1, 42)))
    save(half, store, first, range(10))
    assert far.asked == []
    store.clear("host")
    far.answers.clear()
    again = Request("again", first.tokens)
    assert all(isinstance(half.match(again, 0), Pending) for _ in range(20))
    assert half.match(Request("short", [1, 2]), 0) == Match(0)
    far.answers.set()
    assert answer(half, again).tokens == 40
    assert load(half, again, 40)["again"] == (40, True)
    half.finished("again", "stop")
    settle(half)
    assert set(far.asked) == {"kvtier-lookup-far"}
    assert holds_nothing(store)
    store.close()


def test_what_was_not_found_is_not_asked_for_until_the_request_is_admitted() -> None:
    far = FarTier()
    store = TieredStore(HostTier(1 << 20), [far])
    half = half_over(store)
    request = Request("r", list(range(1, 42)))
    assert answer(half, request) == Match(0)
    asked = len(far.asked)
    assert asked >= 1
    assert all(half.match(request, 0) == Match(0) for _ in range(10))
    assert len(far.asked) == asked
    half.allocated(request, range(11), 0)
    # Preempted and waiting again: it may be there by now.
    assert answer(half, request) == Match(0)
    assert len(far.asked) > asked
    store.close()


def test_a_look_up_that_nobody_waits_for_any_more() -> None:
    far = FarTier()
    store = TieredStore(HostTier(1 << 20), [far])
    half = half_over(store)
    request = Request("r", list(range(1, 42)))
    far.answers.clear()
    assert isinstance(half.match(request, 0), Pending)
    # The device has more of it now: another question.
    assert isinstance(half.match(request, 2 * SIZE), Pending)
    half.finished("r", "abort")
    far.answers.set()
    settle(half)
    assert holds_nothing(store)
    store.close()
