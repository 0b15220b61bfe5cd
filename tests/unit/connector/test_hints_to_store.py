"""Hints on their way from a request to the store."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
from connector_world import BLOCK_BYTES, NAMESPACE, SIZE, Request, answer, finish, load, save, settle, step

from kvtier.connector import TierScheduler
from kvtier.cpu import HostTier, StagingRegion
from kvtier.hints import NO_HINT, Hint, RequestHints
from kvtier.hooks import Match, StepSpan, TransferResults
from kvtier.keys import store_keys
from kvtier.store import TieredStore
from kvtier.tiers import BlockRef, Owner, Reservation


class Host(HostTier):
    """Remembers the hints that reached it."""

    def __init__(self) -> None:
        super().__init__(64 * BLOCK_BYTES)
        self.seen: dict[bytes, Hint] = {}

    def reserve(
        self,
        refs: Sequence[BlockRef],
        sizes: Sequence[int],
        fmts: Sequence[str],
        owner: Owner,
        hints: Sequence[Hint] | None = None,
    ) -> list[Reservation]:
        self.seen |= {ref.key: hint for ref, hint in zip(refs, hints or (), strict=bool(hints))}
        return super().reserve(refs, sizes, fmts, owner, hints)

    def hint(self, keys: Sequence[bytes], hints: Sequence[Hint]) -> None:
        self.seen |= dict(zip(keys, hints, strict=True))
        super().hint(keys, hints)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def store(host: Host) -> Iterator[TieredStore]:
    with contextlib.closing(TieredStore(host)) as store:
        yield store


@pytest.fixture
def half(store: TieredStore) -> Iterator[TierScheduler]:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 8)) as staging:
        half = TierScheduler(store, NAMESPACE, SIZE, staging)
        yield half
        settle(half)


HINTS = RequestHints(priority=4.0, ttl=60.0, dead_from_depth=2, session="s")
TOKENS = list(range(13))
KEYS = store_keys(Request("keys", TOKENS).chain, NAMESPACE.mask())


def test_what_is_saved_carries_its_hint_by_depth(half: TierScheduler, store: TieredStore, host: Host) -> None:
    save(half, store, Request("r", TOKENS, hints=HINTS), [1, 2, 3, 4])
    assert [host.seen[key] for key in KEYS] == [HINTS.at(depth) for depth in range(3)]
    assert [host.seen[key].reuse for key in KEYS] == ["unknown", "unknown", "none"]


def test_what_is_found_takes_the_hints_of_its_finder(half: TierScheduler, store: TieredStore, host: Host) -> None:
    save(half, store, Request("first", TOKENS), [1, 2, 3, 4])
    assert set(host.seen.values()) <= {NO_HINT}
    second = Request("second", [*TOKENS[:12], 77], hints=HINTS)
    assert answer(half, second) == Match(12)
    load(half, second, 12)
    store.flush()
    assert [host.seen[key] for key in KEYS] == [HINTS.at(depth) for depth in range(3)]


def test_a_session_ends_when_the_last_blocks_of_its_last_turn_are_stored(
    half: TierScheduler, store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[str, int]] = []
    monkeypatch.setattr(store, "end_session", lambda name: ended.append((name, store.stats()["host"]["blocks"])))
    last = RequestHints(session="s", end_of_session=True)
    request = Request("last", TOKENS, hints=last)
    half.allocated(request, [1, 2, 3, 4], 0)
    half.finished("last", "preempt")
    half.allocated(request, [1, 2, 3, 4], 0)
    plan = step(half, StepSpan(request, (1, 2, 3, 4), 0, 13, exact=True), written=[1, 2, 3, 4])
    half.finished("last", "stop")
    assert ended == []
    finish(half, plan)
    store.flush()
    half.completed(TransferResults())
    assert ended == [("s", 3)]
    # A turn that is followed by others ends nothing.
    save(half, store, Request("turn", TOKENS, hints=HINTS), [1, 2, 3, 4])
    assert len(ended) == 1


def test_an_aborted_last_turn_ends_its_session_too(
    half: TierScheduler, store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(store, "end_session", ended.append)
    request = Request("last", TOKENS, hints=RequestHints(session="s", end_of_session=True))
    half.allocated(request, [1, 2, 3, 4], 0)
    half.finished("last", "abort")
    assert ended == ["s"]
