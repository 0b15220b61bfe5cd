"""Bytes of the NVMe index that change while nobody looks: at most the one record is lost, and it is counted."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb
import pytest

from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.nvme.checking import FAULTS
from kvtier.nvme.inspection import maintain
from kvtier.nvme.ledger import DATABASES
from kvtier.testing.blocks import chain_refs, content, load
from kvtier.tiers import BlockRef, Handle, Status

_CAPACITY = 1 << 20
_OPTIONS = NvmeOptions(segment_bytes=_CAPACITY, min_free_bytes=0)
_PAGES = 3
_SIZE = _PAGES * 4096
_FIELDS = {
    "page": range(4),
    "nbytes": range(4, 8),
    "format": range(8, 9),
    "flags": range(9, 10),
    "depth": range(10, 14),
    "namespace": range(14, 18),
    "row": range(18, 22),
    "parent": range(22, 38),
    "checksum": range(38, 54),
    "seal": range(54, 58),
}
"""Where the fields of a record lie that is in one piece."""


class World(NamedTuple):
    """A closed directory. whole: a block in one extent; split: one in several; blocks: each with its format and bytes."""

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

    def alter(self, key: bytes, at: int) -> None:
        with self.changed("blk") as txn:
            data = bytearray(txn.get(key))
            data[at] ^= 1 << at % 8
            txn.put(key, bytes(data))


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
    one, two, small = chain_refs(12, salt="one"), chain_refs(6, salt="two", exact=False), chain_refs(202, seed=2)
    with contextlib.closing(NvmeTier(path, _CAPACITY, _OPTIONS)) as tier:
        blocks = _put(tier, one, 4096) | _put(tier, two, 4096, "int8") | _put(tier, small, 4096)
        pages = {}
        for ref in small:
            (handle,) = tier.acquire([ref.key], "t").wait(30).handles
            pages[handle.page] = ref
            tier.release([handle])
        gone = [pages[page] for page in sorted(pages)][100:200:2]
        tier.remove([ref.key for ref in gone]).wait(30)
        blocks = {ref: what for ref, what in blocks.items() if ref not in gone}
        (last,) = late = chain_refs(1, seed=3, salt="one")
        filler = chain_refs(36, seed=4, salt="one")
        blocks |= _put(tier, filler[: tier.stats()["free_bytes"] // 4096 - 50], 4096)
        blocks |= _put(tier, late, _SIZE)
        (handle,) = tier.acquire([last.key], "t").wait(30).handles
        assert len(handle.extents) == _PAGES
        tier.release([handle])
    return World(path, one[4].key, last.key, blocks)


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    shutil.copytree(made.path, tmp_path / "n")
    return made._replace(path=tmp_path / "n")


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


def _assert_one_is_lost(world: World, lost: bytes, ref: BlockRef) -> None:
    metrics = Metrics()
    with world.opened(metrics) as tier:
        assert _found(tier, world) == _keys(world) - {lost}
        assert metrics.value("evicted_blocks_total", tier="nvme", reason="damaged_entry") == 1
        assert metrics.value("corrupt_blocks_total", tier="nvme") == 1
        # It is stored anew like any other.
        _put(tier, [ref], world.blocks[ref][1], world.blocks[ref][0])
        assert _found(tier, world) == _keys(world)
    with world.opened(metrics) as tier:
        assert _found(tier, world) == _keys(world)
        _assert_sound(tier)


def _assert_repaired(world: World, lost: bytes) -> None:
    with maintain(world.path) as directory:
        assert directory.repair()["dropped_damaged"] == 1
    with world.opened() as tier:
        _assert_sound(tier)
        assert _found(tier, world) == _keys(world) - {lost}


@pytest.mark.parametrize("use", [_assert_one_is_lost, _assert_repaired])
@pytest.mark.parametrize("field", _FIELDS)
def test_x(made: World, tmp_path: Path, field: str, use: Callable[..., None]) -> None:
    for at in _FIELDS[field]:
        shutil.rmtree(tmp_path / "n", ignore_errors=True)
        shutil.copytree(made.path, tmp_path / "n")
        world = made._replace(path=tmp_path / "n")
        world.alter(world.whole, at)
        ref = next(ref for ref in world.blocks if ref.key == world.whole)
        if use is _assert_repaired:
            use(world, world.whole)
        else:
            use(world, world.whole, ref)
