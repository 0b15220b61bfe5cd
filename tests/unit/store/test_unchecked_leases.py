"""Leases whose holder verifies the bytes: nobody else looks at them, and what guards them comes along."""

import pytest
import xxhash
from store_world import BLOCK, content, items, keys, verify

from kvtier.cpu import HostTier
from kvtier.store import TieredStore
from kvtier.tiers import Handle, Status, checksum_heads

CHAIN = keys("unchecked", 4)


@pytest.fixture
def store():
    opened = TieredStore(HostTier(64 * BLOCK), [])
    opened.put(items("unchecked", 4)).result(30)
    yield opened
    opened.close()


def sound(host: HostTier, handle: Handle) -> bool:
    head = checksum_heads([handle])[0]
    return xxhash.xxh3_128_digest(head + bytes(host.buffer(handle)[: handle.nbytes])) == handle.checksum


def test_what_guards_the_bytes_comes_with_the_handle(store):
    lease = store.acquire(CHAIN, "reader", checked=False).result(30)
    assert len(lease) == 4
    assert all(sound(store.host, handle) for _, handle in lease.blocks)
    store.release(lease)
    assert store.host.stats()["leases"] == 0


def test_damage_is_seen_by_who_looks_and_dropped_by_who_acquires(store):
    memory = store.host._slab.region.array
    memory[memory.tobytes().find(content(CHAIN[2])) + 7] ^= 1
    lease = store.acquire(CHAIN, "reader", checked=False).result(30)
    assert [sound(store.host, handle) for _, handle in lease.blocks] == [True, True, False, True]
    assert store.host.stats()["corrupt"] == 0
    store.release(lease)
    checked = store.acquire(CHAIN, "reader").result(30)
    assert len(checked) == 2
    verify(store, checked, 0, 2)
    assert store.host.stats()["corrupt"] == 1


def test_the_deadline_and_the_rest_of_a_run_count_as_for_acquire(store):
    host = store.host
    assert host.lease(CHAIN, "late", 0.0).wait(5).statuses == (Status.TIMEOUT,) * 4
    done = host.lease([*CHAIN[:2], b"absent..........", CHAIN[3]], "reader").wait(5)
    assert done.statuses == (Status.OK, Status.OK, Status.MISS, Status.MISS)
    assert [handle.ref.key for handle in done.handles] == CHAIN[:2]
    host.release(done.handles)


def test_exact_blocks_only_unless_lossy_ones_are_asked_for(store):
    store.put(items("lossy", 3, exact_below=1)).result(30)
    assert len(store.acquire(keys("lossy", 3), "exact", checked=False).result(30)) == 1
    assert len(store.acquire(keys("lossy", 3), "any", checked=False, lossy=True).result(30)) == 3
