"""What the store is told of blocks that the device holds too, and which of them have to be saved again."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
from connector_world import BLOCK_BYTES, NAMESPACE, SIZE, Request, answer, load, save, settle, step, store_run

from kvtier.connector import ConnectorOptions, TierScheduler
from kvtier.connector.duplicates import DeviceCopies, Leaving
from kvtier.connector.parts import Parts
from kvtier.cpu import HostTier, StagingRegion
from kvtier.errors import ConfigError
from kvtier.hooks import Match
from kvtier.keys import store_keys
from kvtier.store import TieredStore
from kvtier.tiers import BlockRef

EXCLUSIVE = ConnectorOptions(copies="exclusive")
REFS = Parts(NAMESPACE).refs(Request("r", list(range(13))).chain, 0, 3, exact=True)
A, B, C = ([ref] for ref in REFS)


class Listener(TieredStore):
    """A store that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(HostTier(64 * BLOCK_BYTES))
        self.above: set[bytes] = set()
        self.calls = 0
        self.asked: list[int] = []

    def duplicate(self, keys: Sequence[bytes], *, above: bool) -> None:
        self.calls += 1
        assert not above or self.above.isdisjoint(keys)
        self.above = self.above | set(keys) if above else self.above - set(keys)
        super().duplicate(keys, above=above)

    def held(self, keys: Sequence[bytes], *, exact: bool) -> list[bool]:
        assert self.above.isdisjoint(keys)  # or host might drop them between the answer and the end of the marks
        self.asked.append(len(keys))
        return super().held(keys, exact=exact)


@pytest.fixture
def store() -> Iterator[Listener]:
    with contextlib.closing(Listener()) as store:
        yield store


@pytest.fixture
def copies(store: Listener) -> DeviceCopies:
    return DeviceCopies(store, 1, exclusive=True)


def names(*refs: list[BlockRef]) -> set[bytes]:
    return {ref.key for own in refs for ref in own}


def test_a_copy_counts_once_it_is_stored_and_until_it_is_overwritten(store: Listener, copies: DeviceCopies) -> None:
    copies.filled([1, 2], A + B)
    assert copies.leaving(set()) == []
    assert store.calls == 0
    copies.stored([1, 2], A + B)
    copies.leaving(set())
    assert store.above == names(A, B)
    assert copies.leaving({2, 9}) == [Leaving(2, tuple(B))]
    assert store.above == names(A)
    assert copies.leaving({2, 9}) == []
    # Whoever has nothing to ask does not ask, and all else is one question.
    assert store.asked == [1]


def test_what_was_overwritten_before_it_was_stored_never_counted(store: Listener, copies: DeviceCopies) -> None:
    copies.filled([1], A)
    copies.filled([1], B)
    copies.stored([1], A)
    assert copies.leaving({1}) == []
    assert store.calls == 0


def test_the_last_of_several_copies_counts(store: Listener, copies: DeviceCopies) -> None:
    copies.filled([1, 2], A + A)
    copies.stored([1, 2], A + A)
    copies.stored([1], A)
    assert copies.leaving({1}) == []
    assert store.above == names(A)
    assert [leaving.block_id for leaving in copies.leaving({2})] == [2]
    copies.filled([3, 4], A + A)
    copies.stored([3, 4], A + A)
    assert len(copies.leaving({3, 4})) == 1
    assert store.above == set()


def test_parents_leave_before_their_children(copies: DeviceCopies) -> None:
    copies.filled([7, 1, 4], C + A + B)
    copies.stored([7, 1, 4], C + A + B)
    assert [leaving.block_id for leaving in copies.leaving({1, 4, 7})] == [1, 4, 7]


def test_what_is_not_exact_is_not_followed(store: Listener, copies: DeviceCopies) -> None:
    lossy = [ref._replace(exact=False) for ref in REFS]
    copies.filled([1, 2, 3], [*A, *lossy[1:]])
    copies.stored([1, 2, 3], [*A, *lossy[1:]])
    assert [leaving.block_id for leaving in copies.leaving({1, 2, 3})] == [1]
    # Nor does a block that held something exact keep its name.
    copies.filled([5], A)
    copies.stored([5], A)
    copies.filled([5], lossy[:1])
    copies.stored([5], lossy[:1])
    assert copies.leaving({5}) == []
    assert store.above == set()


def test_where_tiers_are_inclusive_host_keeps_everything(store: Listener) -> None:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 8)) as staging:
        half = TierScheduler(store, NAMESPACE, SIZE, staging)
        first = Request("first", list(range(13)))
        save(half, store, first, [1, 2, 3, 4])
        store.host.remove(store_keys(first.chain, NAMESPACE.mask())).wait()
        assert step(half, written=[1, 2, 3, 4]).evacuations == {}
        settle(half)
    assert (store.calls, store.asked) == (0, [])


def test_blocks_that_the_device_holds_too_leave_host_first(store: Listener) -> None:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 8)) as staging:
        half = TierScheduler(store, NAMESPACE, SIZE, staging, EXCLUSIVE)
        older, newer = Request("older", list(range(13))), Request("newer", list(range(50, 63)))
        save(half, store, older, [1, 2, 3, 4])
        save(half, store, newer, [5, 6, 7, 8])
        older_keys, newer_keys = (store_keys(request.chain, NAMESPACE.mask()) for request in (older, newer))
        # Host has them all: nothing is copied again.
        assert step(half, written=[1, 2, 3, 4]).evacuations == {}
        assert store.host.coldest(6) == [*reversed(newer_keys), *reversed(older_keys)]
        assert step(half, written=[5, 6, 7, 8]).evacuations == {}
        assert store.host.coldest(6) == [*reversed(older_keys), *reversed(newer_keys)]
        settle(half)


def test_saved_and_loaded_blocks_are_known_to_the_store(store: Listener) -> None:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 8)) as staging:
        half = TierScheduler(store, NAMESPACE, SIZE, staging, EXCLUSIVE)
        first = Request("first", list(range(13)))
        keys = store_keys(first.chain, NAMESPACE.mask())
        save(half, store, first, [5, 6, 7, 8])
        step(half)
        assert store.above == set(keys)
        # The tail of the chain goes first when somebody else needs room.
        step(half, written=[7, 8])
        assert store.above == set(keys[:2])
        step(half, written=[5, 6])
        assert store.above == set()
        second = Request("second", [*range(12), 77])
        assert answer(half, second) == Match(12)
        load(half, second, 12)
        step(half)
        assert store.above == set(keys)
        settle(half)
        # Other engines on this store must not find it marked for ever.
        half.close()
        assert store.above == set()
        assert store_run(store, first) == ("host",) * 3


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="copies='twice': expected one of inclusive, exclusive"):
        ConnectorOptions(copies="twice")  # type: ignore[arg-type]
