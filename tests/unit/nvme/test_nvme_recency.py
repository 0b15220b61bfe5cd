"""Recency rows against a plain-Python model of who should go first."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.hints import Hint
from kvtier.nvme.extents import Extent
from kvtier.nvme.index import Index
from kvtier.nvme.ledger import Record
from kvtier.nvme.recency import Recency
from kvtier.nvme.victims import ROW
from kvtier.testing.blocks import chain_refs
from kvtier.tiers import BlockRef

_UUID = bytes(range(16))
_NOW = 2**62


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index", 1 << 20, durable=False)


def _enter(
    recency: Recency, index: Index, refs: Sequence[BlockRef], hints: Sequence[Hint | None] | None = None
) -> list[int]:
    with index.write() as ledger:
        rows = recency.take(ledger, len(refs))
        for row, ref in zip(rows, refs, strict=True):
            ledger.insert(ref.key, _record(ref, row))
        recency.fill(ledger, rows, refs, hints or [None] * len(refs))
    return rows


def _record(ref: BlockRef, row: int) -> Record:
    return Record((Extent(row, 1),), 4096, 0, ref.exact, ref.depth, 0, row, ref.parent, bytes(16))


def _drop(recency: Recency, index: Index, refs: Sequence[BlockRef]) -> None:
    with index.write() as ledger:
        records = [(ref.key, ledger.get(ref.key)) for ref in refs]
        rows = [record.row for _, record in records if record is not None]
        recency.forget(rows, [key for key, _ in records])
        for key, record in records:
            assert record is not None
            ledger.drop(key, record)
    recency.retire(rows)


def _keys(recency: Recency, count: int, spared: tuple[int, ...] = (), before: int = _NOW) -> list[bytes]:
    return [victim.head for victim in recency.victims(count, spared, before)]


def _heads(refs: Sequence[BlockRef]) -> list[bytes]:
    return [ref.key[:8] for ref in refs]


def test_oldest_first_and_deepest_first_among_equals(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    old, new = chain_refs(4, seed=1), chain_refs(4, seed=2)
    _enter(recency, index, old)
    _enter(recency, index, new)
    assert _keys(recency, 8) == _heads([*old[::-1], *new[::-1]])
    assert _keys(recency, 3) == _heads(old[:0:-1])


def test_a_block_is_as_recent_as_its_descendants(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    chain, other = chain_refs(5, seed=1), chain_refs(2, seed=2)
    rows = _enter(recency, index, chain)
    _enter(recency, index, other)
    recency.renew(rows[3:4])
    assert _keys(recency, 7) == _heads([chain[4], other[1], other[0], *chain[3::-1]])


def test_a_new_child_renews_its_ancestors(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    chain, other = chain_refs(4, seed=1), chain_refs(2, seed=2)
    _enter(recency, index, chain[:3])
    _enter(recency, index, other)
    _enter(recency, index, chain[3:])
    assert _keys(recency, 6) == _heads([*other[::-1], *chain[::-1]])


def test_nothing_used_since_an_instant_goes(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    chain, other = chain_refs(4, seed=1), chain_refs(2, seed=2)
    rows = _enter(recency, index, chain)
    _enter(recency, index, other)
    since = recency.tick()
    recency.touch(rows[2])
    assert _keys(recency, 6, before=since) == _heads([chain[3], *other[::-1]])


def test_what_lost_an_ancestor_goes_at_once(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    old, cut = chain_refs(2, seed=1), chain_refs(5, seed=2)
    _enter(recency, index, old)
    rows = _enter(recency, index, cut)
    _drop(recency, index, cut[1:2])
    victims = recency.victims(3, (), _NOW)
    assert [victim.head for victim in victims] == _heads([cut[4], cut[3], cut[2]])
    assert {victim.top for victim in victims} == {rows[2]}


def test_a_parent_that_was_stored_anew_is_found_again(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    chain, old = chain_refs(3, seed=1), chain_refs(2, seed=2)
    rows = _enter(recency, index, chain)
    _drop(recency, index, chain[:1])
    _enter(recency, index, old)  # takes the row over
    anew = _enter(recency, index, chain[:1])
    assert anew != rows[:1]
    assert _keys(recency, 2) == _heads(chain[:0:-1])
    recency.renew([*anew, *rows[1:]])
    assert _keys(recency, 5) == _heads([*old[::-1], *chain[::-1]])


def test_spared_rows_and_unknown_parents(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    bare = [BlockRef(ref.key, ref.ns, -1, None, exact=True) for ref in chain_refs(3)]
    rows = _enter(recency, index, bare)
    assert set(_keys(recency, 9, tuple(rows[:2]))) == {bare[2].key[:8]}


def test_a_used_victim_is_recognised(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    rows = _enter(recency, index, chain_refs(2))
    victims = recency.victims(2, (), _NOW)
    recency.renew(rows[:1])
    assert [recency.unused_since(victim) for victim in victims] == [True, False]


class TestHints:
    def test_no_reuse_goes_first_unless_a_child_lives(self, tmp_path: Path, index: Index) -> None:
        recency = Recency(tmp_path / "r", _UUID)
        old, dead = chain_refs(2, seed=1), chain_refs(3, seed=2)
        _enter(recency, index, old)
        none = Hint(reuse="none")
        _enter(recency, index, dead, [none, Hint(), none])
        assert _keys(recency, 5) == _heads([dead[2], *old[::-1], dead[1], dead[0]])

    def test_a_hint_given_later(self, tmp_path: Path, index: Index) -> None:
        recency = Recency(tmp_path / "r", _UUID)
        old, chain = chain_refs(2, seed=1), chain_refs(4, seed=2)
        _enter(recency, index, old)
        rows = _enter(recency, index, chain)
        recency.hint(rows[1:], [Hint(reuse="none")] * 3)
        assert _keys(recency, 4) == _heads([*chain[:0:-1], old[1]])

    def test_a_hint_spares_what_others_build_upon(self, tmp_path: Path, index: Index) -> None:
        recency = Recency(tmp_path / "r", _UUID)
        old, chain = chain_refs(2, seed=1), chain_refs(4, seed=2)
        _enter(recency, index, old)
        rows = _enter(recency, index, chain)
        recency.hint(rows[:3], [Hint(reuse="none")] * 3)
        assert _keys(recency, 6) == _heads([*old[::-1], *chain[::-1]])

    def test_what_has_expired_goes_first_and_use_renews_it(
        self, tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = [1_000_000.0]
        monkeypatch.setattr("time.time", lambda: clock[0])
        recency = Recency(tmp_path / "r", _UUID)
        old, used, left = (chain_refs(2, seed=seed) for seed in range(3))
        _enter(recency, index, old)
        rows = _enter(recency, index, used, [Hint(ttl=60)] * 2)
        _enter(recency, index, left, [Hint(ttl=60)] * 2)
        assert _keys(recency, 2) == _heads(old[::-1])
        clock[0] += 50
        recency.renew(rows)
        clock[0] += 20
        assert _keys(recency, 6) == _heads([*left[::-1], *old[::-1], *used[::-1]])

    def test_a_child_without_ttl_keeps_its_parent(
        self, tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = [1_000_000.0]
        monkeypatch.setattr("time.time", lambda: clock[0])
        recency = Recency(tmp_path / "r", _UUID)
        old, chain = chain_refs(1, seed=1), chain_refs(3, seed=2)
        _enter(recency, index, old)
        _enter(recency, index, chain[:2], [Hint(ttl=5)] * 2)
        _enter(recency, index, chain[2:])
        clock[0] += 100
        assert _keys(recency, 4) == _heads([*old, *chain[::-1]])

    def test_a_ttl_that_is_given_later_prolongs_and_never_shortens(
        self, tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = [1_000_000.0]
        monkeypatch.setattr("time.time", lambda: clock[0])
        recency = Recency(tmp_path / "r", _UUID)
        old, chain = chain_refs(2, seed=1), chain_refs(4, seed=2)
        _enter(recency, index, old)
        rows = _enter(recency, index, chain)
        brief = chain_refs(2, seed=3)
        short = _enter(recency, index, brief, [Hint(ttl=5)] * 2)
        # Of a prompt's first blocks, which are everybody's, one request alone may know that it will not come again.
        recency.hint(rows[:2], [Hint(ttl=5)] * 2)
        recency.hint(short, [Hint(ttl=50)] * 2)
        clock[0] += 10
        recency.hint(short, [Hint(ttl=1)] * 2)
        assert _keys(recency, 8) == _heads([*old[::-1], *chain[::-1], *brief[::-1]])
        clock[0] += 100
        assert _keys(recency, 8) == _heads([*brief[::-1], *old[::-1], *chain[::-1]])
        recency.hint(short, [Hint()] * 2)
        assert _keys(recency, 8) == _heads([*old[::-1], *chain[::-1], *brief[::-1]])

    @pytest.mark.parametrize("fineness", [12, 3])
    def test_nothing_goes_before_what_builds_on_it_whatever_hints_say(
        self, tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch, fineness: int
    ) -> None:
        monkeypatch.setattr("kvtier.nvme.recency._FINENESS", fineness)  # 3: ages as coarse as in many rows
        clock = [1_000_000.0]
        monkeypatch.setattr("time.time", lambda: clock[0])
        recency, dice = Recency(tmp_path / "r", _UUID), random.Random(fineness)
        hints = [None, Hint(), Hint(reuse="none"), Hint(ttl=5), Hint(ttl=60), Hint(ttl=600)]
        chains: list[list[tuple[BlockRef, int]]] = []  # every path from a root down: what a request would use
        for _ in range(400):
            what = dice.random()
            if what < 0.3 or not chains:
                above = dice.choice(chains)[: dice.randint(1, 9)] if chains and dice.random() < 0.8 else []
                made, parent = [], above[-1][0] if above else None
                for _ in range(dice.randint(1, 4)):
                    depth, name = (0, None) if parent is None else (parent.depth + 1, parent.key)
                    parent = BlockRef(dice.randbytes(16), 0, depth, name, exact=True)
                    made.append(parent)
                rows = _enter(recency, index, made, [dice.choice(hints)] * len(made))
                chains.append([*above, *zip(made, rows, strict=True)])
            else:
                some = [row for _, row in dice.choice(chains)][dice.choice([0, 0, 1, 2]) :]
                if what < 0.6:
                    recency.renew(some)
                elif what < 0.8:
                    recency.hint(some, [dice.choice(hints[1:])] * len(some))
                else:
                    clock[0] += dice.choice([1, 10, 100])
            parents = {ref.key[:8]: ref.parent for chain in chains for ref, _ in chain}
            left = {head for head, parent in parents.items()}
            for head in _keys(recency, 10_000):
                left.remove(head)
                assert not any(parents[other] is not None and parents[other][:8] == head for other in left)


def test_rows_outlive_the_process_and_grow(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    assert recency.fresh
    recency.finish()
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


@pytest.mark.parametrize("damage", ["unfinished", "other uuid", "cut", "zeros", "empty"])
def test_an_unsound_file_is_made_anew(tmp_path: Path, index: Index, damage: str) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    _enter(recency, index, chain_refs(10))
    if damage != "unfinished":
        recency.finish()
    recency.close()
    path = tmp_path / "r"
    size = path.stat().st_size
    if damage == "cut":
        path.open("r+b").truncate(size - 4096)
    if damage == "zeros":
        path.write_bytes(bytes(size))
    if damage == "empty":
        path.write_bytes(b"")
    before = path.read_bytes()
    looked = Recency(path, _UUID if damage != "other uuid" else bytes(16), writable=False)
    assert (looked.victims(5, (), _NOW), len(looked.strangers(np.zeros(3, np.uint32), np.ones(3, np.uint64)))) == (
        [],
        3,
    )
    assert path.read_bytes() == before
    again = Recency(path, _UUID if damage != "other uuid" else bytes(16))
    assert again.fresh
    assert again.victims(5, (), _NOW) == []


def test_random_trees_against_the_model(tmp_path: Path, index: Index) -> None:
    dice = random.Random(5)
    recency = Recency(tmp_path / "r", _UUID)
    stamps: dict[bytes, int] = {}
    refs: dict[bytes, BlockRef] = {}
    rows: dict[bytes, int] = {}

    def use(key: bytes | None, clock: int) -> None:
        while key is not None:
            stamps[key] = clock
            key = refs[key].parent

    for clock in range(1, 300):
        if len(refs) < 40 or dice.random() < 0.5:
            parent = dice.choice([None, *refs.values()])
            key = dice.randbytes(16)
            refs[key] = BlockRef(key, 0, parent.depth + 1 if parent else 0, parent.key if parent else None, exact=True)
            rows[key] = _enter(recency, index, [refs[key]])[0]
        else:
            key = dice.choice(list(refs))
            recency.renew([rows[key]])
        use(key, clock)
    for key in dice.sample(list(refs), 10):
        _drop(recency, index, [refs[key]])
        del refs[key], stamps[key]

    def gone(ref: BlockRef) -> bool:
        return ref.parent is not None and (ref.parent not in refs or gone(refs[ref.parent]))

    expected = {key[:8]: (0 if gone(ref) else stamps[key], -ref.depth) for key, ref in refs.items()}
    order = [expected[head] for head in _keys(recency, 1000)]
    assert order == sorted(expected.values())


class TestMoreRowsThanAWindow:
    """The hand and the sample, with windows made small so that a thousand rows are many."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("_WINDOW", 64), ("_SAMPLE", 128), ("_LEAPS", 4)):
            monkeypatch.setattr(f"kvtier.nvme.victims.{name}", value)

    def _many(self, recency: Recency, index: Index, chains: int) -> list[list[BlockRef]]:
        made = [chain_refs(16, seed=seed) for seed in range(chains)]
        for refs in made:
            _enter(recency, index, refs)
        return made

    def test_victims_are_old(self, tmp_path: Path, index: Index) -> None:
        recency = Recency(tmp_path / "r", _UUID)
        made = self._many(recency, index, 200)
        dice = random.Random(1)
        recent = set(dice.sample(range(200), 150))
        with index.read() as ledger:
            for chain in recent:
                recency.renew([record.row for ref in made[chain] if (record := ledger.get(ref.key))])
        old = {ref.key[:8] for chain, refs in enumerate(made) if chain not in recent for ref in refs}
        seen: set[bytes] = set()
        for _ in range(60):
            victims = [victim for victim in recency.victims(32, (), _NOW) if victim.stamp]
            assert victims
            assert {victim.head for victim in victims} <= old
            seen |= {victim.head for victim in victims}
        assert len(seen) > 32  # the hand goes on

    def test_everything_can_be_evicted(self, tmp_path: Path, index: Index) -> None:
        recency = Recency(tmp_path / "r", _UUID)
        left = {ref.key[:8]: ref for refs in self._many(recency, index, 60) for ref in refs}
        for _ in range(1000):
            victims = [victim for victim in recency.victims(32, (), _NOW) if victim.stamp]
            if not victims:
                break
            _drop(recency, index, [left.pop(victim.head) for victim in victims])
        assert not left

    def test_spared_and_recent_rows_never_go(self, tmp_path: Path, index: Index) -> None:
        recency = Recency(tmp_path / "r", _UUID)
        made = self._many(recency, index, 60)
        since = recency.tick()
        _enter(recency, index, chain_refs(16, seed=999))
        spared = range(500)
        for _ in range(50):
            for victim in recency.victims(32, spared, since):
                assert victim.row >= 500
                assert victim.stamp < since
        assert len(made) == 60

    def test_stale_rows_are_met(self, tmp_path: Path, index: Index) -> None:
        recency = Recency(tmp_path / "r", _UUID)
        made = self._many(recency, index, 40)
        for refs in made[10:20]:
            _drop(recency, index, refs)
        recency.finish()
        other = Recency(tmp_path / "r", _UUID)  # it knows nothing of what is stale
        met = {victim.row for _ in range(40) for victim in other.victims(8, (), _NOW) if not victim.stamp}
        assert met == set(range(160, 320))


def test_rows_of_another_process_are_reused_without_eviction(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    refs = chain_refs(64)
    _enter(recency, index, refs)
    _drop(recency, index, refs)
    other = Recency(tmp_path / "r", _UUID)
    for seed in range(1, 40):
        _enter(other, index, chain_refs(1, seed=seed))
    assert int(other._header["rows"][0]) < 64 + 39


def test_a_row_that_is_retired_twice_is_given_out_once(tmp_path: Path, index: Index) -> None:
    recency = Recency(tmp_path / "r", _UUID)
    rows = _enter(recency, index, chain_refs(4))
    recency.retire(rows)

    class MeanwhileRetiredAgain:
        """Another thread that met the same stale rows, between the first two steps of `take`."""

        calls = 0

        def at_row(self, head: bytes, row: int) -> None:
            self.calls += 1
            if self.calls == 2:
                recency.retire(rows)

    taken = recency.take(MeanwhileRetiredAgain(), 4)  # type: ignore[arg-type]
    assert sorted(taken) == sorted(rows)


def test_a_row_is_32_bytes() -> None:
    assert ROW.itemsize == 32
