"""What each kind of injected fault does, and that it never turns wrong bytes into good ones."""

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from kvtier.cpu import HostTier
from kvtier.errors import ConfigError, TierTimeout, TierUnavailable
from kvtier.testing import Fault, FaultyHostTier, FaultyTier, Kind
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.testing.faults import VERBS
from kvtier.tiers import Full, Handle, Status, Tier

SIZE = 8192
REFS = chain_refs(6)
KEYS = [ref.key for ref in REFS]


def flip_stored_bit(tier: Tier, key: bytes) -> None:
    assert isinstance(tier, HostTier)
    handles = tier.acquire([key], "vandal").wait().handles
    span = tier.span(handles[0])
    tier._slab.region.array[span.offset + span.nbytes // 2] ^= 1
    tier.release(handles)


@pytest.fixture
def inner() -> HostTier:
    return HostTier(64 * SIZE)


@pytest.fixture
def tier(inner: HostTier) -> Iterator[FaultyHostTier]:
    with contextlib.closing(FaultyHostTier(inner, damage=flip_stored_bit)) as tier:
        put(tier, REFS, SIZE)
        yield tier
        tier.heal()
        assert (inner.stats()["leases"], inner.stats()["reservations"]) == (0, 0)
        inner.check()


def statuses(tier: FaultyTier) -> list[Status]:
    """Of a load of all blocks; what is OK holds the right bytes."""
    found = load(tier, KEYS)
    for ref, (status, data) in zip(REFS, found, strict=True):
        assert status is not Status.OK or data == content(ref, SIZE)
    return [status for status, _ in found]


OK, MISS, CORRUPT = Status.OK, Status.MISS, Status.CORRUPT


@pytest.mark.parametrize(
    ("fault", "seen", "afterwards"),
    [
        (Fault("read", Kind.EIO, first_item=2), [OK] * 2 + [MISS] * 4, 6),
        (Fault("read", Kind.SHORT, first_item=5), [OK] * 5 + [MISS], 6),
        (Fault("read", Kind.CORRUPT, first_item=3), [OK] * 3 + [CORRUPT] * 3, 3),
        (Fault("read", Kind.VANISH, first_item=4), [OK] * 4 + [MISS] * 2, 4),
        (Fault("read", Kind.ROT, first_item=4), [OK] * 4 + [CORRUPT] * 2, 4),
        (Fault("read", Kind.TIMEOUT), [Status.TIMEOUT] * 6, 6),
        (Fault("acquire", Kind.EIO, first_item=1), [OK] + [MISS] * 5, 6),
        (Fault("acquire", Kind.CORRUPT, first_item=2), [OK] * 2 + [CORRUPT] + [MISS] * 3, 2),
        (Fault("acquire", Kind.VANISH, first_item=0), [MISS] * 6, 0),
        (Fault("acquire", Kind.ROT, first_item=2), [OK] * 2 + [CORRUPT] + [MISS] * 3, 2),
        (Fault("acquire", Kind.TIMEOUT), [Status.TIMEOUT] * 6, 6),
    ],
    ids=lambda value: f"{value.verb}-{value.kind}" if isinstance(value, Fault) else None,
)
def test_readers(tier: FaultyTier, fault: Fault, seen: list[Status], afterwards: int) -> None:
    tier.inject(fault)
    assert statuses(tier) == seen
    assert tier.injected == {(fault.verb, fault.kind): 1}
    tier.heal()
    assert run_length(tier, REFS) == afterwards
    put(tier, REFS, SIZE)
    assert statuses(tier) == [OK] * 6


def test_spoiled_buffers_hold_garbage_from_where_the_bytes_ended(tier: FaultyTier) -> None:
    handles = tier.acquire(KEYS[:1], "reader").wait().handles
    for kind, good in ((Kind.SHORT, SIZE // 2), (Kind.EIO, 0)):
        out = bytearray(SIZE)
        tier.inject(Fault("read", kind))
        tier.read([(handles[0], memoryview(out))]).wait()
        tier.heal()
        assert out[:good] == content(REFS[0], SIZE)[:good]
        assert set(out[good:]) == {0xA5}
    tier.release(handles)


def test_contains_can_err_either_way(tier: FaultyTier) -> None:
    tier.inject(Fault("contains", Kind.EIO, first_item=2))
    assert run_length(tier, REFS) == 2
    tier.heal()
    tier.inject(Fault("contains", Kind.VANISH, first_item=4))
    assert run_length(tier, REFS) == 6
    tier.heal()
    assert run_length(tier, REFS) == 4


def test_writers(tier: FaultyTier, inner: HostTier) -> None:
    refs = chain_refs(4, seed=1)
    tier.inject(Fault("reserve", Kind.ENOSPC, nth=1, first_item=1), Fault("write", Kind.ENOSPC, nth=2, first_item=2))
    first = put(tier, refs, SIZE)
    assert [isinstance(one, Handle) for one in first] == [True, False, False, False]
    assert first[1:] == [Full("no_space_on_device")] * 3
    put(tier, refs, SIZE)
    assert run_length(tier, refs) == 3
    tier.inject(Fault("commit", Kind.REFUSE))
    put(tier, refs, SIZE)
    assert run_length(tier, refs) == 3
    assert inner.stats()["reservations"] == 0
    tier.heal()
    put(tier, refs, SIZE)
    assert run_length(tier, refs) == 4


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_unavailable_raises_and_ends_no_hold_by_halves(tier: FaultyHostTier, inner: HostTier, verb: str) -> None:
    handles = tier.acquire(KEYS[:1], "reader").wait().handles
    new = [one for one in tier.reserve(chain_refs(1, seed=3), [SIZE], ["raw"], "writer") if isinstance(one, Handle)]
    calls = {
        "contains": lambda: tier.contains(KEYS),
        "acquire": lambda: tier.acquire(KEYS, "reader"),
        "read": lambda: tier.read([(handles[0], memoryview(bytearray(SIZE)))]),
        "release": lambda: tier.release(handles),
        "release_owner": lambda: tier.release_owner("reader"),
        "reserve": lambda: tier.reserve(chain_refs(1, seed=4), [SIZE], ["raw"], "writer"),
        "write": lambda: tier.write([(new[0], memoryview(bytes(SIZE)))]),
        "commit": lambda: tier.commit(new),
        "abort": lambda: tier.abort(new),
        "seal": lambda: tier.seal(new),
        "hint": lambda: tier.hint(KEYS, []),
        "remove": lambda: tier.remove(KEYS),
        "duplicate": lambda: tier.duplicate(KEYS, above=True),
        "coldest": lambda: tier.coldest(1),
        "clear": tier.clear,
        "stats": tier.stats,
        "flush": tier.flush,
    }
    tier.inject(Fault(verb, Kind.UNAVAILABLE))
    with pytest.raises(TierUnavailable, match=f"injected failure of {verb}"):
        calls[verb]()
    tier.heal()
    stats = inner.stats()
    assert stats["blocks"] == 6
    assert stats["leases"] == (verb not in ("release", "release_owner"))
    assert stats["reservations"] == (verb != "abort")
    inner.release_owner("reader")
    inner.release_owner("writer")


def test_a_hang_ends_when_healed_or_at_its_deadline(tier: FaultyTier) -> None:
    tier.inject(Fault("acquire", Kind.HANG))
    endless = tier.acquire(KEYS, "reader")
    bounded = tier.acquire(KEYS, "reader", time.monotonic() + 0.02)
    assert bounded.wait(10).statuses == (Status.TIMEOUT,) * 6
    with pytest.raises(TierTimeout):
        endless.wait(0.02)
    tier.heal()
    done = endless.wait(10)
    assert len(done.handles) == 6
    assert {one.ticket for one in tier.poll()} >= {endless, bounded}
    tier.release(done.handles)


def test_a_call_without_a_ticket_hangs_its_caller(tier: FaultyTier) -> None:
    tier.inject(Fault("stats", Kind.HANG))
    through = threading.Event()
    thread = threading.Thread(target=lambda: (tier.stats(), through.set()))
    thread.start()
    assert not through.wait(0.05)
    tier.heal()
    thread.join(10)
    assert through.is_set()


def test_a_lost_completion_has_done_its_work(tier: FaultyTier, inner: HostTier) -> None:
    tier.inject(Fault("remove", Kind.LOST), Fault("acquire", Kind.LOST))
    lease = tier.acquire(KEYS[:2], "reader", time.monotonic() + 0.01)
    ticket = tier.remove(KEYS[3:])
    assert run_length(tier, REFS) == 3
    assert inner.stats()["leases"] == 2
    with pytest.raises(TierTimeout):
        ticket.wait(0.05)
    assert lease.done is None
    tier.heal()
    assert ticket.wait(10).statuses[0] is Status.OK
    tier.release(lease.wait(10).handles)


def test_latency_is_fixed_and_random(tier: FaultyTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("kvtier.testing.faulty.time.sleep", slept.append)
    tier.inject(Fault("contains", Kind.LATENCY, seconds=2.0), Fault("contains", Kind.LATENCY, jitter=1.0, seed=5))
    assert run_length(tier, REFS) == 6
    assert slept[0] == 2.0
    assert 0 < slept[1] < 1
    assert len(slept) == 2


def test_nth_probability_and_seed(tier: FaultyTier) -> None:
    def misses(*plan: Fault) -> list[bool]:
        tier.inject(*plan)
        found = [run_length(tier, REFS) == 0 for _ in range(40)]
        tier.heal()
        return found

    assert misses(Fault("contains", Kind.EIO, nth=3)) == [call == 2 for call in range(40)]
    once = misses(Fault("contains", Kind.EIO, probability=0.5, seed=1))
    assert once == misses(Fault("contains", Kind.EIO, probability=0.5, seed=1))
    assert once != misses(Fault("contains", Kind.EIO, probability=0.5, seed=2))
    assert 5 < sum(once) < 35
    assert not any(misses())


def test_a_kind_strikes_only_where_it_makes_sense(tier: FaultyTier) -> None:
    tier.inject(Fault("*", Kind.CORRUPT, nth=2))
    assert run_length(tier, REFS) == 6
    assert statuses(tier) == [CORRUPT] * 6  # acquire is the first call that it can befall, read the second
    assert tier.injected == {("read", Kind.CORRUPT): 1}


def test_nonsense_is_refused(inner: HostTier) -> None:
    for arguments in (
        {"verb": "erase", "kind": Kind.EIO},
        {"verb": "commit", "kind": Kind.CORRUPT},
        {"verb": "read", "kind": Kind.EIO, "probability": 2.0},
        {"verb": "read", "kind": Kind.EIO, "nth": 0},
        {"verb": "read", "kind": Kind.EIO, "first_item": -1},
    ):
        with pytest.raises(ConfigError):
            Fault(**arguments)
    with contextlib.closing(FaultyTier(inner)) as tier, pytest.raises(ConfigError, match="damage"):
        tier.inject(Fault("read", Kind.ROT))
