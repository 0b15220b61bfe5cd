"""`kvtier inspect` on directories that are sound, damaged, in use, and none at all."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.keys import namespace_digest
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.nvme.extents import Extent
from kvtier.nvme.index import Index
from kvtier.nvme.inspection import maintain
from kvtier.nvme.seals import seal
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import Status

_SIZE = 16384
_CAPACITY = 4 << 20
_OPTIONS = NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed directory: two chains of 8 blocks in two namespaces."""
    tier = NvmeTier(tmp_path / "n", _CAPACITY, _OPTIONS)
    for salt in ("one", "two"):
        put(tier, chain_refs(8, salt=salt), _SIZE)
    tier.close()
    return tmp_path / "n"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def command(*arguments: str, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["inspect", *map(str, arguments), "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        assert isinstance(found, dict)
        return found

    return command


def _digest(salt: str) -> str:
    return namespace_digest(chain_refs(1, salt=salt)[0].ns).hex()


def _files(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock.mdb"}


def test_a_sound_directory(path: Path, run: Any) -> None:
    before = _files(path)
    report = run(path, "--verify")
    assert report.pop("sound") is True
    assert report.pop("directory") == str(path)
    assert report == {
        "blocks": 16,
        "orphaned": 0,
        "total_pages": 1024,
        "used_pages": 64,
        "free_pages": 1024 - 64 - report["unprepared_pages"],
        "reserved_pages": 0,
        "preparing_pages": 0,
        "unprepared_pages": report["unprepared_pages"],
        "dead_holds": 0,
        "damaged_entries": 0,
        "leaked_pages": 0,
        "overlaps": 0,
        "wrong_sums": 0,
        "lost_rows": 0,
        "verified": 16,
        "corrupt": 0,
    }
    assert _files(path) == before


def test_sizes(path: Path, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stats = run(path)
    assert stats == run(path, "--stats")
    assert (stats["blocks"], stats["used_bytes"], stats["capacity_bytes"]) == (16, 16 * _SIZE, _CAPACITY)
    assert (stats["clean"], stats["writers"], stats["segment_bytes"]) == (True, 0, 1 << 20)
    assert stats["index_bytes"] == (path / "index" / "data.mdb").stat().st_size
    assert main(["inspect", str(path)]) == 0
    assert f"capacity_bytes  {_CAPACITY}" in capsys.readouterr().out


def test_every_block_is_listed(path: Path, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    listed = {block["key"]: block for block in run(path, "--list")["list"]}
    expected = {
        ref.key.hex(): {
            "key": ref.key.hex(),
            "namespace": _digest(salt)[:16],
            "depth": ref.depth,
            "format": "raw",
            "bytes": _SIZE,
            "exact": True,
        }
        for salt in ("one", "two")
        for ref in chain_refs(8, salt=salt)
    }
    assert listed == expected
    assert main(["inspect", str(path), "--list"]) == 0
    assert sum(line.count("\t") == 5 for line in capsys.readouterr().out.splitlines()) == 16


def test_damage_is_found_and_repaired(path: Path, run: Any) -> None:
    with (path / "seg-00000.kv").open("r+b") as file:
        for page in (2, 3, 9):
            file.seek(page * 4096 + 5)
            file.write(b"damage")
    report = run(path, "--verify", code=1)
    assert (report["sound"], report["corrupt"], report["verified"]) == (False, 2, 14)
    repaired = run(path, "--repair", "--verify")
    assert (repaired["dropped_corrupt"], repaired["corrupt"], repaired["blocks"]) == (2, 0, 14)
    assert repaired["sound"] is True
    tier = NvmeTier(path, _CAPACITY, _OPTIONS)
    kept = [ref for salt in ("one", "two") for ref in chain_refs(8, salt=salt)]
    found = [load(tier, [ref.key])[0] for ref in kept]
    assert [status for status, _ in found].count(Status.OK) == 14
    assert all(
        data == content(ref, _SIZE) for ref, (status, data) in zip(kept, found, strict=True) if status is Status.OK
    )
    tier.close()


def _tamper(path: Path, fault: str) -> None:
    """What no kill can cause: an index that contradicts itself."""
    index = Index(path / "index", None, durable=True)
    key, other = (chain_refs(8, salt="one")[at].key for at in (3, 5))
    with index.write() as ledger:
        record, second = ledger.get(key), ledger.get(other)
        assert record is not None
        assert second is not None
        if fault == "leaked":
            ledger.free.replace([Extent(run.page, run.pages - 7) for run in ledger.free.runs()][:1])
        if fault == "overlap":
            ledger.move(key, record._replace(extents=second.extents))
        if fault == "sums":
            ledger.state = ledger.state._replace(used=ledger.state.used + 1)
        if fault == "row":
            ledger.move(key, record._replace(row=second.row))
    index.close()


def test_an_altered_record_is_found_and_repaired(path: Path, run: Any) -> None:
    index = Index(path / "index", None, durable=True)
    key = chain_refs(8, salt="one")[3].key
    with index.write() as ledger:
        record = ledger.get(key)
        assert record is not None
        data = seal(key, record._replace(ns=77).pack())
        ledger.txn.put(key, data[:-1] + bytes([data[-1] ^ 1]), db=ledger._dbs["blk"])
    index.close()
    report = run(path, "--verify", code=1)
    assert (report["damaged_entries"], report["blocks"], report["corrupt"]) == (1, 15, 0)
    row = run(path, "--repair", "--verify")
    assert (row["dropped_damaged"], row["reclaimed_pages"], row["blocks"], row["sound"]) == (1, 4, 15, True)
    assert "rebuilt" not in row


def test_keys_out_of_order_are_found_and_repaired(path: Path, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    key = max(ref.key for salt in ("one", "two") for ref in chain_refs(8, salt=salt))
    data_file = path / "index" / "data.mdb"
    data_file.write_bytes(data_file.read_bytes().replace(key, b"\0" + key[1:]))
    assert main(["inspect", str(path), "--verify"]) == 1
    assert "out of order; what is whole of it is kept when it is opened next" in capsys.readouterr().err
    row = run(path, "--repair", "--verify")
    assert "out of order" in row["rebuilt"]
    assert (row["blocks"], row["sound"]) == (16 - row["dropped_damaged"], True)
    assert row["dropped_damaged"] in (1, 2)  # where another record names the block as its parent
    assert "rebuilt" not in run(path, "--repair")


@pytest.mark.parametrize(
    ("fault", "count", "blocks"),
    [("leaked", "leaked_pages", 16), ("overlap", "overlaps", 15), ("sums", "wrong_sums", 16), ("row", "lost_rows", 16)],
)
def test_an_index_that_contradicts_itself_is_repaired(
    path: Path, run: Any, fault: str, count: str, blocks: int
) -> None:
    _tamper(path, fault)
    assert run(path, "--verify", code=1)[count] > 0
    run(path, "--repair")
    report = run(path, "--verify")
    assert (report["sound"], report["blocks"]) == (True, blocks)
    tier = NvmeTier(path, _CAPACITY, _OPTIONS)
    for seed in range(40):
        put(tier, chain_refs(16, seed=seed, salt="one"), _SIZE)
    assert not tier.check(verify=True)["corrupt"]
    assert tier.stats()["blocks"] > 200
    tier.close()


def test_what_a_killed_process_held_is_no_fault_and_reclaimed_by_repair(path: Path, run: Any) -> None:
    program = """if True:
        import os, sys
        from pathlib import Path
        from kvtier.nvme import NvmeOptions, NvmeTier
        from kvtier.testing.blocks import chain_refs
        tier = NvmeTier(Path(sys.argv[1]), 4 << 20, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0))
        tier.reserve(chain_refs(8, seed=3), [16384] * 8, ["raw"] * 8, "child")
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    report = run(path, "--verify")
    assert report["sound"]
    assert report["reserved_pages"] >= 32
    assert report["dead_holds"] > 0
    assert run(path)["clean"] is False
    assert run(path, "--repair", "--verify")["reserved_pages"] == 0
    assert run(path)["clean"] is True


def test_a_namespace_is_cleared(path: Path, run: Any) -> None:
    assert run(path, "--clear", "--namespace", _digest("one")[:8])["cleared"] == 8
    tier = NvmeTier(path, _CAPACITY, _OPTIONS)
    assert (run_length(tier, chain_refs(8, salt="one")), run_length(tier, chain_refs(8, salt="two"))) == (0, 8)
    tier.close()
    assert run(path, "--clear", "--verify") | {"cleared": 8, "blocks": 0, "sound": True} == run(path, "--verify") | {
        "cleared": 8
    }


def test_compaction_keeps_every_block(path: Path, run: Any) -> None:
    tier = NvmeTier(path, _CAPACITY, _OPTIONS)
    for seed in range(40):
        put(tier, chain_refs(16, seed=seed), 4096)
    tier.clear(chain_refs(1)[0].ns)
    put(tier, chain_refs(8, seed=77), _SIZE)
    tier.close()
    left = path / "index" / "fresh"  # by one that was killed
    left.mkdir()
    (left / "data.mdb").write_bytes(b"half of it")
    report = run(path, "--compact", "--verify")
    assert not left.exists()
    assert report["index_bytes"] < report["index_bytes_before"]
    assert report["index_bytes"] == (path / "index" / "data.mdb").stat().st_size
    assert (report["sound"], report["blocks"]) == (True, 24)
    tier = NvmeTier(path, _CAPACITY, _OPTIONS)
    assert run_length(tier, chain_refs(8, seed=77)) == 8
    tier.close()


class TestInUse:
    @pytest.fixture(autouse=True)
    def _process(self, path: Path) -> Any:
        program = """if True:
            import sys
            from pathlib import Path
            from kvtier.nvme import NvmeOptions, NvmeTier
            from kvtier.testing.blocks import chain_refs, put
            tier = NvmeTier(Path(sys.argv[1]), 4 << 20, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0))
            put(tier, chain_refs(8, seed=3), 16384)
            print("ready", flush=True)
            sys.stdin.readline()
            put(tier, chain_refs(8, seed=4), 16384)
            report = tier.check(verify=True)
            tier.close()
            print(report["blocks"], report["leaked_pages"], report["overlaps"], report["corrupt"])
        """
        self._other = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._other.stdout is not None
        assert self._other.stdout.readline() == "ready\n"
        yield
        self._other.kill()
        self._other.communicate()

    def test_looking_and_repairing_are_safe_and_compaction_refuses(
        self, path: Path, run: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(path)["writers"] == 1
        assert run(path, "--verify")["blocks"] == 24
        run(path, "--repair")
        assert run(path, "--clear", "--namespace", _digest("two"))["cleared"] == 8
        assert main(["inspect", str(path), "--compact"]) == 1
        assert "open in 1 other processes: close them" in capsys.readouterr().err
        out, _ = self._other.communicate("go on\n", timeout=30)
        assert out.split() == ["24", "0", "0", "0"]
        assert run(path, "--verify")["sound"]


class TestRefusals:
    def _refused(self, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
        assert main(["inspect", *arguments]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        return captured.err

    def test_no_directory(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "is no directory" in self._refused(capsys, str(tmp_path / "none"))
        assert "no META.json" in self._refused(capsys, str(tmp_path), "--repair")
        assert list(tmp_path.iterdir()) == []
        # Of a cache service the directories are the tenants', one below what is configured.
        (tmp_path / "team-a").mkdir()
        (tmp_path / "team-a" / "META.json").write_text("{}")
        assert "name one of those in it: team-a" in self._refused(capsys, str(tmp_path), "--repair")

    def test_a_newer_version(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        meta = json.loads((path / "META.json").read_text())
        (path / "META.json").write_text(json.dumps(meta | {"version": 99}))
        for option in ("--verify", "--repair", "--compact"):
            assert "format version 99, this release reads" in self._refused(capsys, str(path), option)

    def test_a_namespace_that_is_none(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "names 0 namespaces" in self._refused(capsys, str(path), "--clear", "--namespace", "xy")
        assert "without --clear" in self._refused(capsys, str(path), "--namespace", "xy")
        assert main(["inspect", str(path), "--verify"]) == 0

    def test_an_index_that_cannot_be_trusted(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        os.truncate(path / "index" / "data.mdb", 3 * 4096)
        before = _files(path)
        assert "has damaged pages; what is whole" in self._refused(capsys, str(path), "--verify", code=1)
        meta = path / "META.json"
        sound = meta.read_text()
        meta.write_text(json.dumps(json.loads(sound) | {"clean": False, "boot_id": "another"}))
        assert "starts empty when it is opened next" in self._refused(capsys, str(path), "--verify", code=1)
        meta.write_text(sound)
        assert _files(path) == before
        with maintain(path):
            pass
        assert main(["inspect", str(path), "--verify"]) == 0

    def test_repair_says_when_there_was_nothing_to_save(self, path: Path, run: Any) -> None:
        os.truncate(path / "index" / "data.mdb", 3 * 4096)
        row = run(path, "--repair", "--stats")
        assert "has damaged pages" in row["started_empty"]
        assert row["blocks"] == 0
        assert "started_empty" not in run(path, "--repair")
