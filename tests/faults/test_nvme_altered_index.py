"""Bytes of the NVMe index that change while nobody looks: at most the one record is lost, and it is counted."""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb
import pytest

from kvtier.errors import TierUnavailable
from kvtier.events import EventLog
from kvtier.keys import namespace_digest
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.nvme.checking import FAULTS
from kvtier.nvme.inspection import compact, look, maintain
from kvtier.nvme.ledger import DATABASES
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import BlockRef, Handle, Status

_CAPACITY = 1 << 20
_OPTIONS = NvmeOptions(segment_bytes=_CAPACITY, min_free_bytes=0)
_FIELDS = {
    "page": range(4),
    "nbytes": range(4, 8),
    "format": range(8, 9),
    "flags": range(9, 10),
    "depth": range(10, 14),
    "namespace": range(14, 18),
    "row": range(18, 22),
    "parent": range(22, 38, 5),
    "checksum": range(38, 54, 5),
    "seal": range(54, 58),
    "extents": range(54, 74, 3),
}
"""Bytes of each field of a record; of one that lies in several extents, these come before the seal."""


class World(NamedTuple):
    """A closed directory. whole: a block in one extent; split: one in three; blocks: each with its format and bytes."""

    path: Path
    whole: bytes
    split: bytes
    blocks: dict[BlockRef, tuple[str, int]]

    def opened(self, metrics: Metrics | None = None) -> contextlib.closing[NvmeTier]:
        return contextlib.closing(NvmeTier(self.path, _CAPACITY, _OPTIONS, metrics=metrics))

    @contextlib.contextmanager
    def changed(self, name: str) -> Iterator[lmdb.Transaction]:
        """A transaction on one of the index's databases, as no release of kvtier makes it."""
        with lmdb.open(str(self.path / "index"), max_dbs=len(DATABASES)) as env:
            db = env.open_db(name.encode(), create=False)
            with env.begin(db=db, write=True) as txn:
                yield txn

    def entries(self, name: str) -> list[tuple[bytes, bytes]]:
        with self.changed(name) as txn:
            return list(txn.cursor())


def _flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def _put(tier: NvmeTier, refs: Sequence[BlockRef], nbytes: int, fmt: str = "raw") -> dict[BlockRef, tuple[str, int]]:
    handles = tier.reserve(refs, [nbytes] * len(refs), [fmt] * len(refs), "writer")
    assert all(isinstance(handle, Handle) for handle in handles)
    assert set(tier.write([(handle, content(handle.ref, nbytes)) for handle in handles]).wait(30).statuses) == {
        Status.OK
    }
    tier.commit(handles)
    return dict.fromkeys(refs, (fmt, nbytes))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Two namespaces, two formats, more records than one page has room for, and one in several extents."""
    path = tmp_path_factory.mktemp("made") / "n"
    one, two, wide = chain_refs(12, salt="one"), chain_refs(6, salt="two", exact=False), chain_refs(50, seed=2)
    (fill,), (last,) = chain_refs(1, seed=3, salt="one"), chain_refs(1, seed=4, salt="one")
    with contextlib.closing(NvmeTier(path, _CAPACITY, _OPTIONS)) as tier:
        blocks = _put(tier, one, 4096) | _put(tier, two, 4096, "int8") | _put(tier, wide, 4 * 4096)
        blocks |= _put(tier, [fill], tier.stats()["free_bytes"])
        gone = wide[20:40:2]
        tier.remove([ref.key for ref in gone]).wait(30)
        blocks = {ref: what for ref, what in blocks.items() if ref not in gone} | _put(tier, [last], 12 * 4096)
        (handle,) = tier.acquire([last.key], "t").wait(30).handles
        assert len(handle.extents) == 3
    return World(path, one[4].key, last.key, blocks)


def _found(tier: NvmeTier, world: World) -> set[bytes]:
    """Keys of the blocks that are read back; what is found is what was stored, in all that is said of it."""
    found = set()
    for ref, (fmt, nbytes) in world.blocks.items():
        for handle in tier.acquire([ref.key], "look").wait(30).handles:
            assert (handle.ref, handle.fmt, handle.nbytes) == (ref, fmt, nbytes)
            tier.release([handle])
        ((status, data),) = load(tier, [ref.key])
        if status is Status.OK:
            assert data == content(ref, nbytes)
            found.add(ref.key)
    return found


def _keys(world: World) -> set[bytes]:
    return {ref.key for ref in world.blocks}


def _assert_sound(tier: NvmeTier) -> None:
    report = tier.check(verify=True)
    assert {fault: report[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0)


def _restored(made: World, place: Path) -> World:
    """Another copy, in the place of the one before."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(made.path, place)
    return made._replace(path=place)


def _repair(world: World) -> int:
    """Repair it; returns how many blocks that cost."""
    with maintain(world.path) as directory:
        lost = directory.repair()["dropped_damaged"]
    with world.opened() as tier:
        _assert_sound(tier)
    return lost


# ---- records


def _altered(made: World, place: Path, field: str) -> Iterator[tuple[World, BlockRef]]:
    """Copies with one byte of a record altered, and whose it is; of small fields, every bit."""
    key = made.split if field == "extents" else made.whole
    (ref,) = (ref for ref in made.blocks if ref.key == key)
    places = _FIELDS[field]
    bits = [(at, bit) for at in places for bit in (range(8) if len(places) == 1 else (at * 5 % 8,))]
    for at, bit in bits:
        world = _restored(made, place)
        with world.changed("blk") as txn:
            txn.put(key, _flipped(txn.get(key), at, bit))
        yield world, ref


@pytest.mark.parametrize("field", _FIELDS)
def test_an_altered_record_is_one_miss_and_counted(made: World, tmp_path: Path, field: str) -> None:
    for world, ref in _altered(made, tmp_path / "n", field):
        metrics, (fmt, nbytes) = Metrics(), made.blocks[ref]
        with world.opened(metrics) as tier:
            assert _found(tier, world) == _keys(world) - {ref.key}
            assert metrics.value("evicted_blocks_total", tier="nvme", reason="damaged_entry") == 1
            assert metrics.value("corrupt_blocks_total", tier="nvme") == 1
            assert run_length(tier, [ref]) == 0
            # Nobody knows its pages until the index is rebuilt, but there are others.
            assert tier.check()["leaked_pages"] == nbytes // 4096
            _put(tier, [ref], nbytes, fmt)
            assert _found(tier, world) == _keys(world)
        with world.opened(metrics) as tier:
            assert _found(tier, world) == _keys(world)
            _assert_sound(tier)


@pytest.mark.parametrize("field", _FIELDS)
def test_an_altered_record_is_repaired(made: World, tmp_path: Path, field: str) -> None:
    for world, ref in _altered(made, tmp_path / "n", field):
        assert _repair(world) == 1
        with world.opened() as tier:
            assert _found(tier, world) == _keys(world) - {ref.key}
        assert _repair(world) == 0


# ---- keys, and the paths to them


def test_an_altered_key_costs_one_block(made: World, tmp_path: Path) -> None:
    """In the file itself: LMDB finds keys by their order, and knows none of its pages by a checksum."""
    compact(_restored(made, tmp_path / "compact").path)
    packed = made._replace(path=tmp_path / "compact")
    sound = (packed.path / "index" / "data.mdb").read_bytes()
    parents = {ref.parent for ref in made.blocks}
    paths = [key for key in sorted(_keys(made)) if sound.count(key) > 1 + (key in parents)]
    assert paths  # of a branch, which says what its pages begin with
    tried: Counter[tuple[int, int]] = Counter()
    for key in [*paths, made.whole, made.split]:
        for at, bit in ((start + byte, bit) for start in _places(sound, key) for byte, bit in ((0, 7), (0, 1), (9, 3))):
            world, metrics = _restored(packed, tmp_path / "n"), Metrics()
            with (world.path / "index" / "data.mdb").open("r+b") as file:
                file.write(_flipped(sound, at, bit))
            with world.opened(metrics) as tier:
                lost = _keys(world) - _found(tier, world)
            counted = int(metrics.value("evicted_blocks_total", tier="nvme", reason="damaged_entry"))
            # What stands under a key that it was not stored under may be met by nobody but the repair.
            assert counted + _repair(world) == len(lost) <= 1
            with world.opened() as tier:
                assert _found(tier, world) == _keys(world) - lost
            tried[counted, len(lost)] += 1
    # A path; a key out of order, or a parent; a key in order.
    assert set(tried) == {(0, 0), (1, 1), (0, 1)}


def _holds(world: World, name: str, page: bytes) -> set[bytes]:
    """Keys of the database's entries that lie on a page."""
    return {key for key, data in world.entries(name) if key + data in page}


def test_a_damaged_page_costs_what_lies_on_it(made: World, tmp_path: Path) -> None:
    compact(_restored(made, tmp_path / "compact").path)
    packed = made._replace(path=tmp_path / "compact")
    data_file = packed.path / "index" / "data.mdb"
    sound, costs = data_file.read_bytes(), list[int]()
    for start in range(2 * 4096, len(sound), 4096):
        page = sound[start : start + 4096]
        # Without names there are no blocks.
        mine = _keys(made) if _holds(packed, "names", page) else _holds(packed, "blk", page)
        for damaged in (bytes(4096), _flipped(page, 0, 2), _flipped(page, 13, 0), _flipped(page, 17, 3)):
            world, metrics = _restored(packed, tmp_path / "n"), Metrics()
            (world.path / "index" / "data.mdb").write_bytes(sound[:start] + damaged + sound[start + 4096 :])
            with world.opened(metrics) as tier:
                lost = _keys(world) - _found(tier, world)
                assert lost <= mine
                assert metrics.value("evicted_blocks_total", tier="nvme", reason="damaged_entry") == len(lost)
                _assert_sound(tier)
            costs.append(len(lost))
    assert costs.count(0) > len(costs) // 2


def _places(data: bytes, key: bytes) -> list[int]:
    return [at for at in range(len(data)) if data.startswith(key, at)]


# ---- what else the index says


@pytest.fixture(scope="module")
def killed(made: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """What a killed writer leaves: it holds pages."""
    world = _restored(made, tmp_path_factory.mktemp("killed") / "n")
    there = tmp_path_factory.mktemp("there") / "n"
    with world.opened() as tier:
        tier.remove([made.split]).wait(30)
        assert tier.reserve(chain_refs(2, seed=9), [4096] * 2, ["raw"] * 2, "writer")
        tier.flush()
        shutil.copytree(world.path, there)
    blocks = {ref: what for ref, what in made.blocks.items() if ref.key != made.split}
    return world._replace(path=there, blocks=blocks)


@pytest.mark.parametrize("part", ["value", "key"])
@pytest.mark.parametrize("name", DATABASES[1:])
def test_no_other_altered_entry_costs_a_block(killed: World, tmp_path: Path, name: str, part: str) -> None:
    entries = _restored(killed, tmp_path / "n").entries(name)
    assert entries
    for key, data in entries[:6]:
        for at in range(0, len(data if part == "value" else key), 11):
            world = _restored(killed, tmp_path / "n")
            with world.changed(name) as txn:
                txn.delete(key)
                if part == "value":
                    txn.put(key, _flipped(data, at, at % 8))
                else:
                    txn.put(_flipped(key, at, at % 8), data)
            with pytest.raises(TierUnavailable, match="altered"), look(world.path) as looked:
                looked.check(verify=False)
            metrics = Metrics()
            with world.opened(metrics) as tier:
                assert metrics.value("errors_total", tier="nvme", operation="open") == 1
                assert _found(tier, world) == _keys(world)
                _put(tier, chain_refs(2, seed=9, salt="three"), 4096, "fp8")
                assert _found(tier, world) == _keys(world)
            assert _repair(world) == 0


def test_a_namespace_that_nothing_names_is_lost_and_no_other(made: World, tmp_path: Path) -> None:
    world = _restored(made, tmp_path / "n")
    mine = {ref.key for ref in world.blocks if not ref.exact}
    digest = namespace_digest(next(ref.ns for ref in world.blocks if not ref.exact))
    with world.changed("names") as txn:
        for key, data in list(txn.cursor()):
            if digest in key or digest in data:
                txn.put(key, _flipped(data, 2, 2))
    assert _repair(world) == len(mine)
    with world.opened() as tier:
        assert _found(tier, world) == _keys(world) - mine


def test_rows_are_there_after_a_power_loss_that_altered_an_entry(made: World, tmp_path: Path) -> None:
    world = _restored(made, tmp_path / "n")
    meta = world.path / "META.json"
    stopped = {"clean": False, "durable": True, "boot_id": "another"}
    meta.write_text(json.dumps(json.loads(meta.read_text()) | stopped))
    with world.changed("free") as txn:
        key, data = next(iter(txn.cursor()))
        txn.put(key, _flipped(data, 1, 1))
    with world.opened() as tier:
        _assert_sound(tier)
        assert _found(tier, world) == _keys(world)
        for seed in range(40):
            put(tier, chain_refs(16, seed=100 + seed), 4096)
        assert _found(tier, world) == set()


# ---- while it is open


def _alter_open(tier: NvmeTier, name: str, key: bytes, at: int) -> None:
    with tier._index.write() as ledger:
        db = ledger._dbs[name]
        ledger.txn.put(key, _flipped(ledger.txn.get(key, db=db), at, 0), db=db)


@pytest.mark.parametrize("at", [0, 18])
def test_eviction_goes_on_where_a_record_was_altered(made: World, tmp_path: Path, at: int) -> None:
    world, metrics = _restored(made, tmp_path / "n"), Metrics()
    with world.opened(metrics) as tier:
        _alter_open(tier, "blk", world.whole, at)
        for seed in range(40):
            refs = chain_refs(16, seed=100 + seed)
            put(tier, refs, 4096)
            assert load(tier, [ref.key for ref in refs]) == [(Status.OK, bytes(content(ref, 4096))) for ref in refs]
        assert run_length(tier, [ref for ref in world.blocks if ref.key == made.split]) == 0
        assert tier.stats()["bytes"] <= _CAPACITY
    assert _repair(world) + metrics.value("evicted_blocks_total", tier="nvme", reason="damaged_entry") == 1


def test_followers_are_told_of_an_altered_record(made: World, tmp_path: Path) -> None:
    world, events = _restored(made, tmp_path / "n"), EventLog()
    with contextlib.closing(NvmeTier(world.path, _CAPACITY, _OPTIONS, events=events)) as tier:
        (ref,) = (ref for ref in world.blocks if ref.key == world.whole)
        _alter_open(tier, "blk", ref.key, 0)
        assert load(tier, [ref.key]) == [(Status.MISS, b"")]
    (told,) = events.since(0).events
    assert (told.kind, told.ns, told.keys, told.reason) == ("removed", ref.ns, (ref.key,), "damaged")


def test_what_was_altered_beside_the_records_refuses_until_it_is_opened_again(made: World, tmp_path: Path) -> None:
    world = _restored(made, tmp_path / "n")
    with world.opened() as tier:
        with tier._index.read() as ledger:
            page = ledger.free.runs()[0].page.to_bytes(4, "big")
        _alter_open(tier, "free", page, 3)
        with pytest.raises(TierUnavailable, match="keeps what is whole"):
            tier.reserve(chain_refs(1, seed=9), [_CAPACITY // 2], ["raw"], "writer")
        assert _found(tier, world) == _keys(world)
        assert tier.stats()["reservations"] == 0
    metrics = Metrics()
    with world.opened(metrics) as tier:
        assert metrics.value("errors_total", tier="nvme", operation="open") == 1
        assert _found(tier, world) == _keys(world)
        _assert_sound(tier)
