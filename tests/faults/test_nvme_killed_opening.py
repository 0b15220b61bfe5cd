"""Opening an NVMe directory, killed at every instant at which it changes something: who opens it next finds it all."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.nvme.checking import FAULTS
from kvtier.nvme.inspection import compact, look
from kvtier.nvme.ledger import DATABASES
from kvtier.testing.blocks import chain_refs, load, put, run_length
from kvtier.tiers import Handle, Status

_CAPACITY = 1 << 20
_OPTIONS = NvmeOptions(segment_bytes=_CAPACITY, min_free_bytes=0)
_KEPT = 100
# Every attempt is a child that ends, as by a signal, before its nth change; names what it would have done next.
_KILLED = """if True:
    import os, shutil, sys
    from pathlib import Path
    import kvtier.nvme.opening, kvtier.nvme.rebuilding
    from kvtier.nvme import NvmeOptions, NvmeTier
    from kvtier.nvme.index import Index
    from kvtier.nvme.inspection import compact
    from kvtier.nvme.ledger import Ledger
    from kvtier.nvme.recency import Recency

    left = 0

    def deadly(owner, name):
        real = getattr(owner, name)
        def step(*args, **kwargs):
            global left
            left -= 1
            if left < 0:
                print(name, flush=True)
                os._exit(9)
            return real(*args, **kwargs)
        setattr(owner, name, step)

    for owner, names in (
        (Path, ("mkdir", "unlink", "replace")), (os, ("fsync", "ftruncate", "posix_fallocate")), (shutil, ("rmtree",)),
        (Ledger, ("save",)), (Index, ("flush", "compact_into")), (Recency, ("__init__", "fill", "finish")),
    ):
        for name in names:
            deadly(owner, name)

    path, what = Path(sys.argv[1]), sys.argv[2]
    for line in sys.stdin:
        if os.fork() == 0:
            left = int(line)
            if what == "compact":
                compact(path)
            else:
                NvmeTier(path, 1 << 20, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.wait()[1])
        print("ended" if code == 0 else "killed" if code == 9 else f"failed {code}", flush=True)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "n"
    with contextlib.closing(NvmeTier(path, _CAPACITY, _OPTIONS)) as tier:
        put(tier, chain_refs(_KEPT), 4096)
        put(tier, chain_refs(20, seed=1), 4096)
        tier.remove([ref.key for ref in chain_refs(20, seed=1)]).wait(30)
    return path


def _alter(path: Path, name: str) -> None:
    with lmdb.open(str(path / "index"), max_dbs=len(DATABASES)) as env:
        db = env.open_db(name.encode(), create=False)
        with env.begin(db=db, write=True) as txn:
            key, data = next(iter(txn.cursor()))
            txn.put(key, data[:-1] + bytes([data[-1] ^ 1]))


def _found_damaged(path: Path) -> None:
    _alter(path, "meta")
    meta = path / "META.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"damaged": True}))


def _stopped(path: Path, *, durable: bool) -> None:
    meta = path / "META.json"
    stopped = {"clean": False, "durable": durable, "boot_id": "another"}
    meta.write_text(json.dumps(json.loads(meta.read_text()) | stopped))


def _after_a_power_loss(path: Path) -> None:
    _stopped(path, durable=True)
    # Rows as they were on the disk: of another time.
    rows = bytearray((path / "recency.bin").read_bytes())
    rows[4096:] = bytes(len(rows) - 4096)
    (path / "recency.bin").write_bytes(rows)


_DAMAGES: dict[str, Callable[[Path], None]] = {
    "altered": lambda path: _alter(path, "free"),
    "found damaged": _found_damaged,
    "no rows": lambda path: (path / "recency.bin").unlink(),
    "power loss": _after_a_power_loss,
    "compact": lambda path: None,
    "starts empty": lambda path: _stopped(path, durable=False),
}


def _assert_all_there(path: Path, kept: int) -> None:
    refs = chain_refs(_KEPT)
    with contextlib.closing(NvmeTier(path, _CAPACITY, _OPTIONS)) as tier:
        assert not (path / "index" / "fresh").exists()
        report = tier.check(verify=True)
        assert {fault: report[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0)
        assert (report["blocks"], run_length(tier, refs)) == (kept, kept)
        assert all(status is Status.OK for status, _ in load(tier, [ref.key for ref in refs[:kept]]))
        for seed in range(2, 5):  # and all of it can give way
            assert all(isinstance(one, Handle) for one in put(tier, chain_refs(_KEPT, seed=seed), 4096))
        assert run_length(tier, refs) == 0
    assert sum(file.stat().st_size for file in path.glob("seg-*.kv")) == _CAPACITY


@pytest.mark.parametrize("damage", _DAMAGES)
def test_killed_at_every_change(made: Path, tmp_path: Path, damage: str) -> None:
    seen: list[str] = []
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "n"), damage]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None
        while "ended" not in seen:
            shutil.rmtree(tmp_path / "n", ignore_errors=True)
            shutil.copytree(made, tmp_path / "n")
            _DAMAGES[damage](tmp_path / "n")
            print(len(seen), file=killer.stdin, flush=True)
            seen.append(killer.stdout.readline().strip())
            if seen[-1] != "ended":
                assert killer.stdout.readline() == "killed\n"
            _assert_all_there(tmp_path / "n", 0 if damage == "starts empty" else _KEPT)
        killer.stdin.close()
    assert {"altered": "replace", "found damaged": "replace", "compact": "compact_into"}.get(damage, "finish") in seen


def test_who_looks_keeps_nobody_from_what_was_rebuilt(made: Path, tmp_path: Path) -> None:
    """The file that somebody looks at has another count of transactions than the one that takes its place."""
    path = tmp_path / "n"
    shutil.copytree(made, path)
    with look(path) as looked:
        code = f"""if True:
            import os
            from pathlib import Path
            from kvtier.nvme.inspection import compact
            real = Path.replace
            def killed(self, target):
                real(self, target)
                if self.name == "data.mdb":
                    os._exit(9)
            Path.replace = killed
            compact(Path({str(path)!r}))
        """
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
        work = f"""if True:
            import contextlib
            from pathlib import Path
            from kvtier.nvme import NvmeOptions, NvmeTier
            from kvtier.testing.blocks import chain_refs, put, run_length
            for seed in range(5, 9):
                options = NvmeOptions(segment_bytes={_CAPACITY}, min_free_bytes=0)
                with contextlib.closing(NvmeTier(Path({str(path)!r}), {_CAPACITY}, options)) as tier:
                    put(tier, chain_refs(10, seed=seed), 4096)
                    assert run_length(tier, chain_refs({_KEPT})) == {_KEPT}
                    assert all(run_length(tier, chain_refs(10, seed=old)) == 10 for old in range(5, seed + 1))
        """
        ended = subprocess.run([sys.executable, "-c", work], check=False, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert sum(1 for _ in looked.listed()) == _KEPT
    compact(path)
    with contextlib.closing(NvmeTier(path, _CAPACITY, _OPTIONS)) as tier:
        assert tier.stats()["blocks"] == _KEPT + 40
