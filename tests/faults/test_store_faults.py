"""A failing tier below host: every fault is a miss or a counted drop, never an exception and never a leak."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvtier.cpu import HostTier
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.keys import namespace_index
from kvtier.store import TieredStore
from kvtier.tiers import BlockRef, Full, Handle, Owner, Reservation, Status, Ticket

BLOCK = 4096
NS = namespace_index(hashlib.sha256(b"store faults").digest())


class FaultyTier(HostTier):
    """A real tier in memory whose verbs can be made to fail."""

    def __init__(self) -> None:
        super().__init__(64 * BLOCK, name="faulty")
        self.fault = ""

    def _raise_if(self, *faults: str) -> None:
        if self.fault in faults:
            raise TierUnavailable(f"injected: {self.fault}")

    def acquire(self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None) -> Ticket:
        self._raise_if("acquire", "gone")
        return super().acquire(keys, owner, deadline)

    def contains(self, keys: Sequence[bytes], deadline: float | None = None) -> Ticket:
        self._raise_if("gone")
        return super().contains(keys, deadline)

    def reserve(
        self, refs: Sequence[BlockRef], sizes: Sequence[int], fmts: Sequence[str], owner: Owner
    ) -> list[Reservation]:
        self._raise_if("gone")
        if self.fault == "full":
            return [Full("injected")] * len(refs)
        return super().reserve(refs, sizes, fmts, owner)

    def write(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        self._raise_if("write-raises")
        if self.fault == "write-dies":
            raise OSError("injected")
        if self.fault == "enospc":
            return Ticket().finish([Status.FULL] * len(items))
        return super().write(items, deadline)

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        self._raise_if("read-raises")
        if self.fault == "read-second":
            done = super().read(items, deadline).wait()
            return Ticket().finish([Status.OK, *[Status.CORRUPT] * (len(items) - 1)], done.handles)
        return super().read(items, deadline)


@pytest.fixture
def below() -> FaultyTier:
    return FaultyTier()


@pytest.fixture
def store(below: FaultyTier) -> Iterator[TieredStore]:
    store = TieredStore(HostTier(16 * BLOCK), [below])
    with contextlib.closing(store):
        yield store
        below.fault = ""
        store.flush()
        stats = store.stats()
        assert all(stats[tier][what] == 0 for tier in ("host", "faulty") for what in ("leases", "reservations"))


def chain(length: int) -> list[tuple[BlockRef, memoryview]]:
    keys = [hashlib.sha256(bytes([at])).digest()[:16] for at in range(length)]
    parents = [None, *keys]
    return [
        (BlockRef(key, NS, at, parents[at], exact=True), memoryview(key * (BLOCK // 16))) for at, key in enumerate(keys)
    ]


def fetched(store: TieredStore, items: Sequence[tuple[BlockRef, memoryview]]) -> int:
    """How many leading blocks arrive in host with the right bytes."""
    lease = store.acquire([ref.key for ref, _ in items], "test").result()
    good = store.fetch(lease, 0, len(lease.blocks)).result()
    for (_, handle), (_, data) in zip(lease.blocks[:good], items, strict=False):
        assert np.frombuffer(store.host.buffer(handle), np.uint8, BLOCK).tobytes() == data.tobytes()
    store.release(lease)
    return good


@pytest.mark.parametrize("fault", ["full", "enospc", "gone", "write-raises", "write-dies"])
def test_what_the_tier_does_not_take_stays_in_host(store: TieredStore, below: FaultyTier, fault: str) -> None:
    below.fault = fault
    items = chain(4)
    assert store.put(items).result().stored == 4
    store._writeback.drain()
    assert fetched(store, items) == 4
    below.fault = ""
    assert below.stats()["reservations"] == 0
    store.clear("host")
    assert fetched(store, items) == 0
    # Nothing of the failure is left behind: the same blocks are taken now.
    assert store.put(items).result().stored == 4
    store.flush()
    store.clear("host")
    assert fetched(store, items) == 4


@pytest.mark.parametrize(("fault", "good"), [("read-raises", 0), ("read-second", 1), ("acquire", 0), ("gone", 0)])
def test_what_the_tier_does_not_give_is_a_miss(store: TieredStore, below: FaultyTier, fault: str, good: int) -> None:
    items = chain(4)
    store.put(items).result()
    store.flush()
    store.clear("host")
    below.fault = fault
    assert fetched(store, items) == good
    below.fault = ""
    assert fetched(store, items) == 4


def test_a_full_writeback_queue_drops_and_counts() -> None:
    below = FaultyTier()
    store = TieredStore(HostTier(16 * BLOCK), [below], writeback_bytes=2 * BLOCK)
    with contextlib.closing(store):
        store.put(chain(8)).result()
        store.flush()
        # The leading blocks that fit go down all the same.
        assert store.metrics.value("dropped_blocks_total", tier="faulty", reason="queue_full") == 6
        assert store.stats()["faulty"]["blocks"] == 2
        assert store.stats()["host"]["leases"] == 0


def test_a_lossy_block_ends_the_run(store: TieredStore) -> None:
    items = chain(4)
    lossy = [(ref._replace(exact=ref.depth < 2), data) for ref, data in items]
    store.put(lossy).result()
    assert fetched(store, items) == 2


def test_puts_of_one_key_at_once_write_it_once(store: TieredStore) -> None:
    items = chain(8)
    results = [store.put(items) for _ in range(6)]
    assert sum(future.result().stored for future in results) == 8
    assert sum(future.result().joined for future in results) == 40


def test_a_block_larger_than_the_queue_goes_down_when_nothing_waits() -> None:
    below = FaultyTier()
    with contextlib.closing(TieredStore(HostTier(16 * BLOCK), [below], writeback_bytes=1)) as store:
        store.put(chain(1)).result()
        store.flush()
        assert below.stats()["blocks"] == 1


def test_a_put_that_host_refuses_leaves_no_reservation(store: TieredStore) -> None:
    items = chain(2)
    strided = [(ref, memoryview(bytes(2 * BLOCK))[::2]) for ref, _ in items]
    with contextlib.suppress(Exception):
        store.put(strided).result()
    assert store.host.stats()["reservations"] == 0
    assert store.put(items).result().stored == 2


def test_clear_takes_what_is_on_its_way(store: TieredStore) -> None:
    futures = [store.put(chain(12)[:length]) for length in range(1, 13)]
    store.clear()
    assert all(future.done() for future in futures)
    store.flush()
    assert store.match([ref.key for ref, _ in chain(12)]).tiers == ()
    with pytest.raises(ConfigError, match="nmve"):
        store.clear("nmve")


def test_one_key_twice_in_a_batch(store: TieredStore) -> None:
    (item,) = chain(1)
    assert sum(store.put([item, item]).result()) == 2
    assert fetched(store, [item]) == 1
    assert store.put([item]).result().joined == 1


def test_a_closed_store_is_a_miss() -> None:
    store = TieredStore(HostTier(16 * BLOCK))
    store.close()
    assert store.put(chain(2)).result().dropped == 2
    lease = store.acquire([ref.key for ref, _ in chain(2)], "test").result()
    assert lease.blocks == []
    assert store.fetch(lease, 0, 0).result() == 0
