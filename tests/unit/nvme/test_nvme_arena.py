"""The arena against a set of pages."""

import random

from kvtier.nvme.arena import Arena
from kvtier.nvme.extents import MAX_FRAGMENTS, Extent


def _pages(extents: tuple[Extent, ...] | list[Extent]) -> set[int]:
    return {page for extent in extents for page in range(extent.page, extent.end)}


def test_a_batch_is_one_contiguous_run_where_there_is_one() -> None:
    arena = Arena()
    arena.add([Extent(0, 5), Extent(10, 30)])
    assert arena.carve_run([4, 4, 4]) == [(Extent(10, 4),), (Extent(14, 4),), (Extent(18, 4),)]
    assert arena.carve_run([19]) == []
    assert arena.idle == 23


def test_a_batch_is_split_before_a_record_is() -> None:
    arena = Arena()
    arena.add([Extent(0, 5), Extent(10, 6)])
    assert arena.carve_run([5, 5]) == []
    assert arena.carve([5, 5]) == [(Extent(0, 5),), (Extent(10, 5),)]


def test_a_record_is_split_where_space_is_scattered() -> None:
    arena = Arena()
    arena.add([Extent(0, 3), Extent(10, 2), Extent(20, 4), Extent(30, 1)])
    assert arena.carve([9, 2]) == [(Extent(20, 4), Extent(0, 3), Extent(10, 2))]
    assert arena.carve([1]) == [(Extent(30, 1),)]
    assert arena.idle == 0


def test_draining_gives_the_shortest_runs_up_first() -> None:
    arena = Arena()
    arena.add([Extent(0, 10), Extent(20, 2), Extent(30, 5)])
    assert arena.drain(8) == [Extent(20, 2), Extent(30, 5), Extent(0, 2)]
    assert arena.drain() == [Extent(2, 8)]


def test_random_use_loses_and_invents_no_page() -> None:
    dice = random.Random(3)
    arena = Arena()
    arena.add([Extent(0, 400)])
    held: list[tuple[Extent, ...]] = []
    available = set(range(400))
    for _ in range(3000):
        if held and dice.random() < 0.5:
            back = held.pop(dice.randrange(len(held)))
            arena.add(back)
            available |= _pages(back)
        else:
            sizes = [dice.randint(1, 12) for _ in range(dice.randint(1, 5))]
            taken = (arena.carve_run(sizes) if dice.random() < 0.5 else []) or arena.carve(sizes)
            for size, extents in zip(sizes, taken, strict=False):
                assert len(_pages(extents)) == sum(extent.pages for extent in extents) == size
                assert len(extents) <= MAX_FRAGMENTS
                assert _pages(extents) <= available
                available -= _pages(extents)
                held.append(extents)
        assert arena.idle == len(available)
    assert _pages(arena.drain()) == available
