"""What an index is rebuilt from: entries with whole seals, names that one of two entries tells, pages that are left."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import CorruptObject, FormatMismatch
from kvtier.keys import namespace_index
from kvtier.nvme.checking import free_runs, overlapping, survey
from kvtier.nvme.directory import Directory
from kvtier.nvme.extents import PAGE, Extent
from kvtier.nvme.index import Index
from kvtier.nvme.ledger import Record, State
from kvtier.nvme.rebuilding import Rebuilt, rebuild_index
from kvtier.nvme.seals import SEAL_BYTES, seal, unseal, unsealed
from kvtier.policies import WriteMeter


def _record(page: int, *, fmt: int = 0, ns: int = 0) -> Record:
    return Record((Extent(page, 2),), 8192, fmt, True, 3, ns, page, None, bytes(16))


def _key(at: int) -> bytes:
    return at.to_bytes(16, "big")


def test_a_seal_binds_every_bit_of_a_value_and_its_key() -> None:
    key, value = random.Random(1).randbytes(16), random.Random(2).randbytes(54)
    data = seal(key, value)
    assert (unseal(key, data), len(data)) == (value, len(value) + SEAL_BYTES)
    for bit in range(8 * len(data)):
        altered = (int.from_bytes(data, "big") ^ 1 << bit).to_bytes(len(data), "big")
        assert unseal(key, altered) is None
    for bit in range(8 * len(key)):
        assert unseal((int.from_bytes(key, "big") ^ 1 << bit).to_bytes(16, "big"), data) is None
    assert unseal(key, b"") is None
    with pytest.raises(CorruptObject, match=key.hex()):
        unsealed(key, data[:-1])


def test_free_runs_are_what_no_extent_has() -> None:
    dice = random.Random(3)
    for _ in range(200):
        prepared = dice.randrange(60)
        extents = [(dice.randrange(60), dice.randrange(1, 12)) for _ in range(dice.randrange(8))]
        tables = [np.array(part, np.uint32).reshape(-1, 2) for part in (extents[:3], extents[3:])]
        owned = {page + at for page, pages in extents for at in range(pages)}
        runs = free_runs(tables, prepared)
        assert [page + at for page, pages in runs for at in range(pages)] == sorted(set(range(prepared)) - owned)
        assert all(one.end < two.page for one, two in pairwise(runs))


def test_overlapping_are_those_that_share_a_page(tmp_path: Path) -> None:
    dice, index, prepared = random.Random(4), Index(tmp_path, 64, durable=False), 400
    for _ in range(60):
        with index.write() as ledger:
            for key, record in list(ledger.records()):
                ledger.drop(key, record)
            ledger.state = State(500, prepared)
            for at in range(20):
                pages = [dice.randrange(1, 5) for _ in range(dice.randrange(1, 4))]
                extents = tuple(Extent(dice.randrange(prepared), count) for count in pages)
                ledger.insert(_key(at), _record(0)._replace(extents=extents, nbytes=sum(pages) * PAGE))
            records = dict(ledger.records())
            owners = Counter(page for record in records.values() for part in record.extents for page in _pages(part))
            free = next(page for page in range(prepared) if page not in owners)
            held = next(page for page in owners if page < prepared)
            ledger.hold([Extent(free, 1)], bytes(16))
            ledger.hold([Extent(held, 1)], bytes(16), preparing=True)
            owners += Counter([held])
            bad = {
                key
                for key, record in records.items()
                if any(owners[page] > 1 or page >= prepared for part in record.extents for page in _pages(part))
            }
            assert {key for key, _ in overlapping(ledger, survey(ledger))} == bad
            ledger.unhold(Extent(free, 1), bytes(16))
            ledger.unhold(Extent(held, 1), bytes(16))
    index.close()


def _pages(extent: Extent) -> range:
    return range(extent.page, extent.end)


@pytest.mark.parametrize("back", [False, True])
def test_one_of_two_entries_is_enough_for_a_name(tmp_path: Path, back: bool) -> None:
    index = Index(tmp_path, 64, durable=False)
    digests = [bytes([at]) * 32 for at in range(3)]
    with index.write() as ledger:
        numbers = [ledger.namespace(namespace_index(digest)) for digest in digests]
        formats = [ledger.format(fmt) for fmt in ("raw", "fp8")]
        db = ledger._dbs["names"]
        for key, data in list(ledger.txn.cursor(db)):
            if key.startswith(b"#") == back:
                ledger.txn.put(key, data[:-1] + bytes([data[-1] ^ 1]), db=db)
    assert (sorted(numbers), formats) == ([0, 1, 2], [0, 1])
    index.close()
    index = Index(tmp_path, 64, durable=False)
    with index.write() as ledger:
        for digest, number in zip(digests, numbers, strict=True):
            assert ledger.ref(_key(1), _record(0, ns=number)).ns == namespace_index(digest)
            assert ledger.numbers([namespace_index(digest)]) == {number: namespace_index(digest)}
            assert ledger.namespace(namespace_index(digest)) == number
        assert [ledger.fmt(_record(0, fmt=number)) for number in formats] == ["raw", "fp8"]
        # No number that a record may refer to is given to another name.
        assert ledger.format("int8") == 2
        assert ledger.namespace(namespace_index(b"x" * 32)) == 3
    index.close()


def test_a_record_has_no_room_for_more_formats(tmp_path: Path) -> None:
    index = Index(tmp_path, 64, durable=False)
    with index.write() as ledger:
        assert [ledger.format(f"f{at}") for at in range(256)] == list(range(256))
        with pytest.raises(FormatMismatch, match="knows 256 others"):
            ledger.format("one more")


def test_no_page_number_is_taken_for_a_name(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "n", PAGE)
    index = Index(directory.path / "index", 64, durable=False)
    begins_like_a_name = int.from_bytes(b"#n\0\0", "big")  # 2.2 TiB from the start
    with index.write() as ledger:
        ledger.format("raw")
        ledger.namespace(namespace_index(b"y" * 32))
        ledger.state = State(2**30, begins_like_a_name + 8)
        ledger.insert(_key(1), _record(begins_like_a_name - 2))
        ledger.release([Extent(begins_like_a_name, 4)])
        ledger.hold([Extent(begins_like_a_name + 5, 2)], bytes(16))
    index.close()
    assert rebuild_index(directory) == Rebuilt(1, 0)
    index = Index(directory.path / "index", None, durable=False)
    with index.read() as ledger:
        assert dict(ledger.records()) == {_key(1): _record(begins_like_a_name - 2)}
        assert ledger.free.runs() == [Extent(0, begins_like_a_name - 2), Extent(begins_like_a_name, 8)]
    index.close()
    directory.drop()


def test_an_index_has_room_for_its_records_whatever_became_of_the_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.nvme.index._SLACK", 1 << 18)
    directory = Directory(tmp_path / "n", PAGE)
    index = Index(directory.path / "index", 40_000, durable=False)
    with index.write() as ledger:
        ledger.format("raw")
        ledger.namespace(namespace_index(b"y" * 32))
        ledger.state = State(40_000, 40_000)
        for at in range(9000):
            ledger.insert(_key(at), _record(3 * at))
    index.close()
    assert rebuild_index(directory) == Rebuilt(9000, 0)
    directory.drop()


def test_records_that_share_pages_are_not_kept(tmp_path: Path) -> None:
    """A page that was not written is as it was before, seals and all: its records may lie where others lie by now."""
    directory = Directory(tmp_path / "n", PAGE)
    index = Index(directory.path / "index", 64, durable=False)
    with index.write() as ledger:
        ledger.format("raw")
        ledger.namespace(namespace_index(b"y" * 32))
        ledger.state = State(64, 64)
        for at, page in enumerate((0, 2, 5, 6, 10, 10, 12)):
            ledger.insert(_key(at), _record(page))
    index.close()
    assert rebuild_index(directory) == Rebuilt(3, 4)
    index = Index(directory.path / "index", None, durable=False)
    with index.read() as ledger:
        assert [record.page for _, record in ledger.records()] == [0, 2, 12]
        assert ledger.state == State(64, 64, 6)
        assert ledger.free.runs() == [Extent(4, 8), Extent(14, 50)]
    index.close()
    directory.drop()


@pytest.mark.parametrize("sums", ["whole", "altered"])
def test_an_index_is_rebuilt_from_its_whole_records(tmp_path: Path, sums: str) -> None:
    directory = Directory(tmp_path / "n", PAGE)
    index = Index(directory.path / "index", 40_000, durable=False)
    dice = random.Random(7)
    broken = set(dice.sample(range(9000), 30))
    with index.write() as ledger:
        ledger.format("raw")
        ledger.namespace(namespace_index(b"y" * 32))
        ledger.state = State(40_000, 30_000)
        ledger.meter = WriteMeter(3.0, 1.0, 2.0)
        for at in range(9000):
            record = _record(3 * at, fmt=at == 77)  # a format that has no name
            data = seal(_key(at), record.pack())
            ledger.txn.put(_key(at), data[:-1] + bytes([data[-1] ^ (at in broken)]), db=ledger._blk)
    if sums == "altered":
        with index.write() as ledger:
            ledger.txn.put(b"state", bytes(44), db=ledger._dbs["meta"])
    index.close()
    with (directory.path / "seg-00000.kv").open("wb") as file:
        file.truncate(30_000 * PAGE)
    assert rebuild_index(directory) == Rebuilt(9000 - len(broken | {77}), len(broken | {77}))
    assert [entry.name for entry in (directory.path / "index").iterdir()] == ["data.mdb"]
    index = Index(directory.path / "index", None, durable=False)
    with index.read() as ledger:
        ledger.require_whole()
        kept = set(range(9000)) - broken - {77}
        assert dict(ledger.records()) == {_key(at): _record(3 * at) for at in kept}
        total = 40_000 if sums == "whole" else 30_000
        assert ledger.state == State(total, 30_000, 2 * len(kept))
        assert ledger.meter == WriteMeter(3.0, 1.0, 2.0)
        assert sum(run.pages for run in ledger.free.runs()) == ledger.state.free
    index.close()
    directory.drop()
