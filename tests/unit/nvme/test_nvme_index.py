"""The index where LMDB would die, lie or block."""

import os
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from kvtier.errors import TierFull, TierUnavailable
from kvtier.nvme.extents import Extent
from kvtier.nvme.index import Index
from kvtier.nvme.ledger import Record, State
from kvtier.testing.blocks import chain_refs


def _record(page: int) -> Record:
    return Record((Extent(page, 1),), 4096, 0, True, 3, 0, page, b"p" * 16, b"c" * 16)


def _fill(index: Index, count: int) -> None:
    with index.write() as ledger:
        for at in range(count):
            ledger.insert(at.to_bytes(16, "big"), _record(at))


def test_records_round_trip(tmp_path: Path) -> None:
    index = Index(tmp_path, 64, durable=False)
    ref = chain_refs(2, salt="here")[1]
    extents = (Extent(5, 1), Extent(9, 2), Extent(2**32 - 2, 1))
    for parent, depth, exact in ((None, -1, False), (b"\0" * 16, 7, True)):
        with index.write() as ledger:
            ids = ledger.format("raw"), ledger.namespace(ref.ns)
            record = Record(extents, 16_000, ids[0], exact, depth, ids[1], 77, parent, b"sum" + bytes(13))
            ledger.insert(ref.key, record)
        with index.read() as ledger:
            assert ledger.get(ref.key) == record
            assert ledger.ref(ref.key, record) == (ref.key, ref.ns, depth, parent, exact)
            assert ledger.fmt(record) == "raw"


def test_an_exception_undoes_everything(tmp_path: Path) -> None:
    index = Index(tmp_path, 64, durable=False)

    def fail() -> None:
        with index.write() as ledger:
            ledger.state = State(total=9, prepared=9)
            ledger.insert(bytes(16), _record(0))
            ledger.format("lost")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with index.write() as ledger:
        assert (ledger.state, ledger.blocks) == (State(), 0)
        assert ledger.format("other") == 0


def test_a_full_map_refuses_once_and_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.nvme.index.map_bytes_for", lambda pages: 256 * 1024)
    index = Index(tmp_path, 4096, durable=False)
    with pytest.raises(TierFull, match="enlarged"):
        _fill(index, 3000)
    for _ in range(20):
        try:
            _fill(index, 3000)
            break
        except TierFull:
            continue
    with index.read() as ledger:
        assert ledger.blocks == 3000


def test_a_map_that_another_process_enlarged_is_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.nvme.index.map_bytes_for", lambda pages: 256 * 1024)
    index = Index(tmp_path, 4096, durable=False)
    _fill(index, 10)
    grow = """if True:
        import sys
        from pathlib import Path
        from kvtier.nvme.extents import Extent
        from kvtier.nvme.index import Index
        from kvtier.nvme.ledger import Record
        index = Index(Path(sys.argv[1]), 1 << 16, durable=False)
        with index.write() as ledger:
            for at in range(10, 9000):
                record = Record((Extent(at, 1),), 1, 0, True, 0, 0, at, None, bytes(16))
                ledger.insert(at.to_bytes(16, "big"), record)
        index.close()
    """
    subprocess.run([sys.executable, "-c", grow, str(tmp_path)], check=True)
    with index.read() as ledger:
        assert ledger.blocks == 9000
    _fill(index, 10)


def test_no_use_across_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(tmp_path, 64, durable=False)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(TierUnavailable, match="fork"), index.read():
        pass


def test_the_disk_refusing_is_full_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(tmp_path, 64, durable=False)
    for message in ("mdb_txn_commit: No space left on device", "mdb_put: Input/output error"):
        with pytest.raises(TierFull), index.write():
            raise lmdb.Error(message)
