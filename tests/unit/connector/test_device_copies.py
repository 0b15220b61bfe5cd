"""What the store is told of blocks that the device holds too."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
from connector_world import BLOCK_BYTES, NAMESPACE, SIZE, Request, answer, load, save, settle, step

from kvtier.connector import TierScheduler
from kvtier.connector.duplicates import DeviceCopies
from kvtier.cpu import HostTier, StagingRegion
from kvtier.hooks import Match
from kvtier.keys import store_keys
from kvtier.store import TieredStore


class Listener(TieredStore):
    """A store that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(HostTier(64 * BLOCK_BYTES))
        self.above: set[bytes] = set()
        self.calls = 0

    def duplicate(self, keys: Sequence[bytes], *, above: bool) -> None:
        self.calls += 1
        assert self.above.isdisjoint(keys) if above else self.above.issuperset(keys)
        self.above = self.above | set(keys) if above else self.above - set(keys)
        super().duplicate(keys, above=above)


@pytest.fixture
def store() -> Iterator[Listener]:
    with contextlib.closing(Listener()) as store:
        yield store


def test_a_copy_counts_once_it_is_stored_and_until_it_is_overwritten(store: Listener) -> None:
    copies = DeviceCopies(store)
    copies.filled([1, 2], [b"a", b"b"])
    copies.flush()
    assert store.calls == 0
    copies.stored([1, 2], [b"a", b"b"])
    copies.flush()
    assert store.above == {b"a", b"b"}
    copies.overwritten({2, 9})
    copies.flush()
    assert store.above == {b"a"}


def test_what_was_overwritten_before_it_was_stored_never_counted(store: Listener) -> None:
    copies = DeviceCopies(store)
    copies.filled([1], [b"a"])
    copies.filled([1], [b"b"])
    copies.stored([1], [b"a"])
    copies.flush()
    assert store.calls == 0


def test_the_last_of_several_copies_counts(store: Listener) -> None:
    copies = DeviceCopies(store)
    copies.filled([1, 2], [b"a", b"a"])
    copies.stored([1, 2], [b"a", b"a"])
    copies.stored([1], [b"a"])
    copies.overwritten({1})
    copies.flush()
    assert store.above == {b"a"}
    copies.overwritten({2})
    copies.filled([3], [b"a"])
    copies.stored([3], [b"a"])
    copies.overwritten({3})
    copies.flush()
    assert store.above == set()


def test_blocks_that_the_device_holds_too_leave_host_first(store: Listener) -> None:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 8)) as staging:
        half = TierScheduler(store, NAMESPACE, SIZE, staging)
        older, newer = Request("older", list(range(13))), Request("newer", list(range(50, 63)))
        save(half, store, older, [1, 2, 3, 4])
        save(half, store, newer, [5, 6, 7, 8])
        older_keys, newer_keys = (store_keys(request.chain, NAMESPACE.mask()) for request in (older, newer))
        step(half, written=[1, 2, 3, 4])
        assert store.host.coldest(6) == [*reversed(newer_keys), *reversed(older_keys)]
        step(half, written=[5, 6, 7, 8])
        assert store.host.coldest(6) == [*reversed(older_keys), *reversed(newer_keys)]
        settle(half)


def test_saved_and_loaded_blocks_are_known_to_the_store(store: Listener) -> None:
    with contextlib.closing(StagingRegion(BLOCK_BYTES, 8)) as staging:
        half = TierScheduler(store, NAMESPACE, SIZE, staging)
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
