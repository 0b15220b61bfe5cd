"""Whatever a disk does, a page is right or reported missing, in bounded time, and its place is left alone."""

import time
from collections.abc import Iterator

import pytest
from kvtier_sglang.geometry import geometry_of
from kvtier_sglang.pages import PageStore

from kvtier.cpu import HostTier
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import StoreOptions, TieredStore
from kvtier.testing import Fault, FaultyTier, Kind
from tests.faults.fault_world import flip_on_disk
from tests.sglang_world import FakePool, FakeRank, hashes, slots

PAGES = 12
LIMIT = 1.5
NAMES = hashes("chain", PAGES)


class World:
    """Twelve pages on a disk that fails as it is told to, and nowhere else."""

    def __init__(self, path, capacity: int = 4 << 20) -> None:
        self.pool = FakePool("page_first", pages=PAGES)
        for page in range(PAGES):
            self.pool.fill(page, page)
        self.bits = [self.pool.bits(page) for page in range(PAGES)]
        options = NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0)
        metrics = Metrics()
        self.nvme = NvmeTier(path / "kv", capacity, options, metrics=metrics)
        self.disk = FaultyTier(self.nvme, damage=flip_on_disk)
        rules = StoreOptions(writeback_bytes=32 << 10, load_deadline=LIMIT)
        host = HostTier(128 << 10, metrics=metrics)
        store = TieredStore(host, [self.disk], metrics=metrics, options=rules)
        self.pages = PageStore(store, geometry_of(self.pool, FakeRank()))

    def stored(self) -> None:
        assert self.pages.save(NAMES, slots(range(PAGES))) == [True] * PAGES
        self.pages.store.flush()
        self.pages.store.clear("host")
        self.pool.buffer.zero_()

    def load(self) -> int:
        """How many leading pages arrive: those are right, the places of all others untouched."""
        self.pool.buffer.zero_()
        arrived = self.pages.load(NAMES, slots(range(PAGES)))
        good = arrived.index(False) if False in arrived else PAGES
        assert arrived == [at < good for at in range(PAGES)]
        assert [self.pool.bits(page) for page in range(good)] == self.bits[:good]
        assert not any(any(self.pool.bits(page)) for page in range(good, PAGES))
        return good


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.disk.heal()
    world.pages.close()


def test_without_a_fault_all_pages_arrive(world):
    world.stored()
    assert world.load() == PAGES


def test_a_damaged_page_is_missing_and_so_are_those_after_it(world):
    world.stored()
    flip_on_disk(world.nvme, world.pages.geometry.keys([bytes.fromhex(NAMES[5])])[0])
    assert world.load() == 5
    assert world.pages.store.metrics.value("corrupt_blocks_total", tier="nvme") == 1
    # It is gone, and is stored anew.
    assert world.pages.present(NAMES) == 5
    for page in range(PAGES):
        world.pool.fill(page, page)
    assert all(world.pages.save(NAMES, slots(range(PAGES))))
    assert world.load() == PAGES


@pytest.mark.parametrize("kind", [Kind.UNAVAILABLE, Kind.EIO, Kind.CORRUPT])
def test_reads_that_fail_are_missing_pages(world, kind):
    world.stored()
    world.disk.inject(Fault("read", kind))
    assert world.load() == 0
    world.disk.heal()


def test_a_disk_that_is_gone_is_no_page_and_no_error(world):
    world.stored()
    world.disk.inject(Fault("*", Kind.UNAVAILABLE))
    assert world.pages.present(NAMES) == 0
    assert world.load() == 0
    # Host takes what it can; nothing is promised of the rest, and nothing raises.
    for page in range(PAGES):
        world.pool.fill(page, page)
    saved = world.pages.save(NAMES, slots(range(PAGES)))
    world.disk.heal()
    assert saved[0]


def test_a_full_disk_refuses_pages_quietly(world):
    world.disk.inject(Fault("reserve", Kind.ENOSPC))
    saved = world.pages.save(NAMES, slots(range(PAGES)))
    assert all(saved), "host has room for twelve"
    world.pages.store.flush()
    assert world.disk.injected[("reserve", Kind.ENOSPC)] > 0
    world.pages.store.clear("host")
    assert world.pages.present(NAMES) == 0
    assert world.load() == 0
    world.disk.heal()
    for page in range(PAGES):
        world.pool.fill(page, page)
    world.stored()
    assert world.load() == PAGES


def test_a_disk_smaller_than_what_is_stored_keeps_what_fits(tmp_path):
    world = World(tmp_path, capacity=1 << 20)
    many = hashes("many", 400)
    for start in range(0, len(many), PAGES):
        names = many[start : start + PAGES]
        assert all(world.pages.save(names, slots(range(len(names)))))
    world.pages.store.flush()
    assert 0 < world.nvme.stats()["bytes"] <= 1 << 20
    assert 0 < sum(world.pages.present([name]) for name in many) < 400
    world.pages.close()


@pytest.mark.parametrize("verb", ["read", "acquire"])
def test_a_disk_that_hangs_costs_one_deadline_and_writes_to_no_page_later(world, verb):
    world.stored()
    world.disk.inject(Fault(verb, Kind.HANG))
    start = time.monotonic()
    assert world.load() == 0
    assert time.monotonic() - start < 10 * LIMIT
    world.disk.heal()
    # What hung goes on now, into kvtier's memory; SGLang has given the pages to somebody else.
    world.pages.store.settle()
    time.sleep(0.05)
    assert not world.pool.buffer.any()


def test_a_disk_that_takes_nothing_holds_up_no_batch_for_ever(world):
    world.disk.inject(Fault("write", Kind.HANG))
    many = [hashes(chain, PAGES) for chain in range(8)]
    start = time.monotonic()
    saved = [all(world.pages.save(names, slots(range(PAGES)))) for names in many]
    assert time.monotonic() - start < 10 * LIMIT
    assert not all(saved), "what nobody takes is not promised"
    assert world.pages.store.metrics.value("dropped_blocks_total", tier="host", reason="lower_tiers_stuck") > 0
    world.disk.heal()
    world.pages.store.settle()
    for page in range(PAGES):
        world.pool.fill(page, page)
    world.stored()
    assert world.load() == PAGES
