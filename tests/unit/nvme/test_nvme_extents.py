"""The free map against a set of pages."""

import random
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvtier.errors import CorruptObject
from kvtier.nvme.extents import Extent, FreeMap, merged, pages_for


def _pages(extents: tuple[Extent, ...] | list[Extent]) -> set[int]:
    return {page for extent in extents for page in range(extent.page, extent.end)}


@pytest.fixture
def free(tmp_path: Path) -> Iterator[FreeMap]:
    with lmdb.open(str(tmp_path), max_dbs=1) as env:
        db = env.open_db(b"free")
        with env.begin(write=True) as txn:
            yield FreeMap(txn, db)


def test_one_run_is_preferred_and_gives_more_than_the_least(free: FreeMap) -> None:
    free.add([Extent(0, 5), Extent(10, 30)])
    assert free.take(12, 20) == [Extent(10, 20)]
    assert free.runs() == [Extent(0, 5), Extent(30, 10)]


def test_several_runs_where_no_single_one_is_enough(free: FreeMap) -> None:
    free.add([Extent(0, 3), Extent(10, 2), Extent(20, 4), Extent(30, 1)])
    assert free.take(8, 100) == [Extent(20, 4), Extent(0, 3), Extent(10, 1)]
    assert free.runs() == [Extent(11, 1), Extent(30, 1)]
    assert free.take(5, 5) == [Extent(11, 1), Extent(30, 1)]
    assert free.take(1, 1) == []


def test_runs_beyond_a_bounded_look_are_found_when_they_are_needed(free: FreeMap) -> None:
    free.add(Extent(2 * at, 1) for at in range(1000))
    assert sum(extent.pages for extent in free.take(700, 700)) == 700
    assert sum(run.pages for run in free.runs()) == 300


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
    held: list[list[Extent]] = []
    available = set(range(total))
    for _ in range(1500):
        if held and dice.random() < 0.5:
            back = held.pop(dice.randrange(len(held)))
            free.add(back)
            available |= _pages(back)
        else:
            least = dice.randint(1, 60)
            most = least + dice.randint(0, 20)
            taken = free.take(least, most)
            count = len(_pages(taken))
            assert count == sum(extent.pages for extent in taken)
            assert min(least, len(available)) <= count <= most
            assert _pages(taken) <= available
            available -= _pages(taken)
            held.append(taken)
        runs = free.runs()
        assert _pages(runs) == available
        assert merged(runs) == runs


def test_pages_for() -> None:
    assert [pages_for(nbytes) for nbytes in (1, 4095, 4096, 4097)] == [1, 1, 1, 2]
