"""Private objects: there for their owner, and for nobody and nothing else."""

import contextlib
from collections.abc import Iterator

import pytest

from kvtier.cpu import HostTier
from kvtier.keys import namespace_index
from kvtier.store import PrivateObject, TieredStore
from kvtier.tiers import BlockRef

BYTES = 4096
NS = namespace_index(bytes(32))


@pytest.fixture
def store() -> Iterator[TieredStore]:
    with contextlib.closing(TieredStore(HostTier(8 * BYTES), [HostTier(64 * BYTES, name="below")])) as made:
        yield made


def blocks(*values: int) -> list[memoryview]:
    return [memoryview(bytes([value]) * BYTES) for value in values]


def keep(store: TieredStore, *values: int) -> tuple[PrivateObject, ...]:
    return store.private.keep(blocks(*values)).result(10)


def content(store: TieredStore, objects: tuple[PrivateObject, ...]) -> list[int]:
    return [store.host.buffer(handle)[0] for handle, _ in objects]


def fill(store: TieredStore, count: int) -> None:
    refs = [BlockRef(bytes([at]) * 16, NS, 0, None, exact=True) for at in range(count)]
    store.put(list(zip(refs, blocks(*range(count)), strict=True))).result(10)


def test_equal_bytes_are_as_many_objects(store: TieredStore) -> None:
    objects = keep(store, 7, 7)
    assert len({handle.ref.key for handle, _ in objects}) == 2
    assert content(store, objects) == [7, 7]
    assert len({span.offset for span in store.private.spans(objects)}) == 2


def test_no_look_up_finds_them_and_nothing_evicts_demotes_or_clears_them(store: TieredStore) -> None:
    objects = keep(store, 1, 2, 3)
    keys = [handle.ref.key for handle, _ in objects]
    assert store.match(keys).tiers == ()
    assert store.acquire(keys, "anybody").result(10).blocks == []
    fill(store, 200)
    store.flush()
    store.clear()
    assert content(store, objects) == [1, 2, 3]
    assert len(store.private.spans(objects)) == 3
    assert not any(store.stats()["below"][what] for what in ("blocks", "reservations"))


def test_they_end_with_drop_and_only_once(store: TieredStore) -> None:
    objects = keep(store, 1, 2)
    assert store.stats()["host"]["reservations"] == 2
    store.private.drop(objects)
    store.private.drop(objects)
    assert store.stats()["host"]["reservations"] == 0
    assert store.private.spans(objects) == []


def test_all_or_none_where_host_has_no_room(store: TieredStore) -> None:
    held = keep(store, *range(6))
    assert keep(store, 1, 2, 3) == ()
    assert store.stats()["host"]["reservations"] == 6
    store.private.drop(held)
    assert len(keep(store, 1, 2, 3)) == 3


def test_what_was_damaged_is_not_handed_out(store: TieredStore) -> None:
    objects = keep(store, 1, 2, 3)
    store.host.buffer(objects[1].handle)[9] ^= 1
    assert len(store.private.spans(objects)) == 1


def test_a_closed_store_keeps_nothing(store: TieredStore) -> None:
    store.close()
    assert keep(store, 1) == ()
