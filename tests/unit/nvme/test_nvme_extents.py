"""The free map against a set of pages."""

import random
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvtier.errors import CorruptObject
from kvtier.nvme.extents import MAX_FRAGMENTS, Extent, FreeMap, merged, pages_for


def _pages(extents: tuple[Extent, ...] | list[Extent]) -> set[int]:
    return {page for extent in extents for page in range(extent.page, extent.end)}


@pytest.fixture
def free(tmp_path: Path) -> Iterator[FreeMap]:
    with lmdb.open(str(tmp_path), max_dbs=1) as env:
        db = env.open_db(b"free")
        with env.begin(write=True) as txn:
            yield FreeMap(txn, db)


def test_a_batch_is_one_contiguous_run_where_there_is_one(free: FreeMap) -> None:
    free.add([Extent(0, 5), Extent(10, 30)])
    taken = free.take([4, 4, 4])
    assert taken == [(Extent(10, 4),), (Extent(14, 4),), (Extent(18, 4),)]
    assert free.runs() == [Extent(0, 5), Extent(22, 18)]


def test_a_batch_is_split_before_a_record_is(free: FreeMap) -> None:
    free.add([Extent(0, 5), Extent(10, 6)])
    assert free.take([5, 5]) == [(Extent(10, 5),), (Extent(0, 5),)]


def test_a_record_is_split_where_space_is_scattered(free: FreeMap) -> None:
    free.add([Extent(0, 3), Extent(10, 2), Extent(20, 4), Extent(30, 1)])
    assert free.take([9]) == [(Extent(20, 4), Extent(0, 3), Extent(10, 2))]
    assert free.take([2]) == []
    assert free.take([1]) == [(Extent(30, 1),)]


def test_freeing_twice_is_noticed(free: FreeMap) -> None:
    free.add([Extent(4, 4)])
    for twice in (Extent(4, 4), Extent(7, 3), Extent(2, 3)):
        with pytest.raises(CorruptObject, match="freed twice"):
            free.add([twice])


def test_cut_forgets_the_end(free: FreeMap) -> None:
    free.add([Extent(0, 2), Extent(5, 10), Extent(20, 3)])
    free.cut(8)
    assert free.runs() == [Extent(0, 2), Extent(5, 3)]


def test_random_use_loses_and_invents_no_page(free: FreeMap) -> None:
    dice = random.Random(3)
    total = 400
    free.add([Extent(0, total)])
    held: list[tuple[Extent, ...]] = []
    available = set(range(total))
    for _ in range(1500):
        if held and dice.random() < 0.5:
            back = held.pop(dice.randrange(len(held)))
            free.add(back)
            available |= _pages(back)
        else:
            sizes = [dice.randint(1, 12) for _ in range(dice.randint(1, 5))]
            taken = free.take(sizes)
            for size, extents in zip(sizes, taken, strict=False):
                assert len(_pages(extents)) == sum(extent.pages for extent in extents) == size
                assert len(extents) <= MAX_FRAGMENTS
                assert _pages(extents) <= available
                available -= _pages(extents)
                held.append(extents)
            if len(taken) < len(sizes):
                largest = sorted((run.pages for run in free.runs()), reverse=True)[:MAX_FRAGMENTS]
                assert sum(largest) < sizes[len(taken)]
        runs = free.runs()
        assert _pages(runs) == available
        assert merged(runs) == runs


def test_pages_for() -> None:
    assert [pages_for(nbytes) for nbytes in (1, 4095, 4096, 4097)] == [1, 1, 1, 2]
