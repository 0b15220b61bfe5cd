"""Recency rows against a plain-Python model of who should go first."""

import random
from pathlib import Path

import pytest

from kvtier.nvme.index import Index
from kvtier.nvme.recency import Recency
from kvtier.testing.blocks import chain_refs
from kvtier.tiers import BlockRef

_UUID = bytes(range(16))


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index", 64, durable=False)


def _enter(recency: Recency, index: Index, refs: list[BlockRef]) -> list[int]:
    with index.write() as ledger:
        rows = recency.take(ledger, len(refs))
        recency.fill(rows, refs)
    return rows


def _keys(recency: Recency, count: int, spared: tuple[int, ...] = ()) -> list[bytes]:
    return [victim.key for victim in recency.victims(count, spared)]


def test_oldest_first_and_deepest_first_among_equals(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    old, new = chain_refs(4, seed=1), chain_refs(4, seed=2)
    _enter(recency, index, old)
    _enter(recency, index, new)
    assert _keys(recency, 8) == [ref.key for ref in [*old[::-1], *new[::-1]]]
    assert _keys(recency, 3) == [ref.key for ref in old[:0:-1]]


def test_a_block_is_as_recent_as_its_descendants(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    chain, other = chain_refs(5, seed=1), chain_refs(2, seed=2)
    rows = _enter(recency, index, chain)
    _enter(recency, index, other)
    recency.renew(rows[3:4])
    assert _keys(recency, 7) == [chain[4].key, other[1].key, other[0].key] + [ref.key for ref in chain[3::-1]]


def test_what_lost_an_ancestor_goes_at_once(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    old, cut = chain_refs(2, seed=1), chain_refs(5, seed=2)
    _enter(recency, index, old)
    rows = _enter(recency, index, cut)
    recency.forget(rows[1:2])
    recency.retire(rows[1:2])
    assert _keys(recency, 3) == [cut[4].key, cut[3].key, cut[2].key]


def test_spared_rows_and_unknown_parents(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    bare = [BlockRef(ref.key, ref.ns, -1, None, exact=True) for ref in chain_refs(3)]
    rows = _enter(recency, index, bare)
    assert set(_keys(recency, 9, tuple(rows[:2]))) == {bare[2].key}


def test_a_used_victim_is_recognised(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    rows = _enter(recency, index, chain_refs(2))
    victims = recency.victims(2, ())
    recency.renew(rows[:1])
    assert [recency.unused_since(victim) for victim in victims] == [True, False]


def test_rows_outlive_the_process_and_grow(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    assert recency.fresh
    peer = Recency(tmp_path / "r", _UUID)
    for seed in range(3):
        refs = chain_refs(4000, seed=seed)
        rows = _enter(recency, index, refs)
        # The other opening sees rows that were added behind the end of its mapping.
        assert all(peer.matches(row, ref.key) for row, ref in zip(rows, refs, strict=True))
    expected = _keys(recency, 50)
    recency.close()
    reopened = Recency(tmp_path / "r", _UUID)
    assert not reopened.fresh
    assert _keys(reopened, 50) == _keys(peer, 50) == expected


@pytest.mark.parametrize("damage", ["other uuid", "cut", "zeros", "empty"])
def test_an_unsound_file_is_made_anew(tmp_path: Path, index: Index, damage: str) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    _enter(recency, index, chain_refs(10))
    recency.close()
    path = tmp_path / "r"
    size = path.stat().st_size
    if damage == "cut":
        path.open("r+b").truncate(size - 4096)
    if damage == "zeros":
        path.write_bytes(bytes(size))
    if damage == "empty":
        path.write_bytes(b"")
    again = Recency(path, _UUID if damage != "other uuid" else bytes(16))
    assert again.fresh
    assert again.victims(5, ()) == []


def test_random_trees_against_the_model(tmp_path: Path, index: Index) -> None:
    dice = random.Random(5)
    recency = Recency(tmp_path / "r", _UUID)
    stamps: dict[bytes, int] = {}
    refs: dict[bytes, BlockRef] = {}
    rows: dict[bytes, int] = {}
    for clock in range(1, 200):
        if len(refs) < 40 or dice.random() < 0.5:
            parent = dice.choice([None, *refs.values()])
            key = dice.randbytes(16)
            ref = BlockRef(key, 0, parent.depth + 1 if parent else 0, parent.key if parent else None, exact=True)
            rows[key], refs[key], stamps[key] = _enter(recency, index, [ref])[0], ref, clock
        else:
            used = dice.choice(list(refs))
            recency.renew([rows[used]])
            stamps[used] = clock
    for key in dice.sample(list(refs), 10):
        recency.forget([rows[key]])
        recency.retire([rows[key]])
        del refs[key], stamps[key]

    def gone(ref: BlockRef) -> bool:
        return ref.parent is not None and (ref.parent not in refs or gone(refs[ref.parent]))

    def recent(ref: BlockRef) -> int:
        children = [recent(child) for child in refs.values() if child.parent == ref.key]
        return max([stamps[ref.key], *children])

    expected = {key: (0 if gone(ref) else recent(ref), -ref.depth) for key, ref in refs.items()}
    order = [expected[key] for key in _keys(recency, 1000)]
    assert order == sorted(expected.values())


def test_a_row_that_is_retired_twice_is_given_out_once(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    rows = _enter(recency, index, chain_refs(4))
    recency.retire(rows)

    class MeanwhileRetiredAgain:
        """Another thread that met the same stale rows, between the first two steps of `take`."""

        calls = 0

        def get(self, key: bytes) -> None:
            self.calls += 1
            if self.calls == 2:
                recency.retire(rows)

    taken = recency.take(MeanwhileRetiredAgain(), 4)
    assert sorted(taken) == sorted(rows)
