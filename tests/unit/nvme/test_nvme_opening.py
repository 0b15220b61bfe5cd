"""Opening, closing and what makes a directory refuse or start empty."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.errors import CapacityError, ConfigError, KVTierError, TierUnavailable
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.nvme.checking import FAULTS
from kvtier.nvme.directory import FORMAT_VERSION, boot_id
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import BlockRef, Handle, Status

_MIB = 1 << 20
_OPTIONS = NvmeOptions(segment_bytes=_MIB, min_free_bytes=0)
_SIZE = 16384


def _open(path: Path, capacity: int = 4 * _MIB, metrics: Metrics | None = None, **options: object) -> NvmeTier:
    return NvmeTier(path, capacity, dataclasses.replace(_OPTIONS, **options), metrics=metrics)


def _meta(path: Path) -> dict[str, object]:
    found = json.loads((path / "META.json").read_text())
    assert isinstance(found, dict)
    return found


def _set_meta(path: Path, **changes: object) -> None:
    (path / "META.json").write_text(json.dumps(_meta(path) | changes))


def _assert_loads(tier: NvmeTier, refs: list[BlockRef]) -> None:
    expected = [(Status.OK, bytes(content(ref, _SIZE))) for ref in refs]
    assert load(tier, [ref.key for ref in refs]) == expected


def _filled(path: Path, *, close: bool = True) -> list[BlockRef]:
    refs = chain_refs(20, seed=1)
    tier = _open(path)
    put(tier, refs, _SIZE)
    if close:
        tier.close()
    else:
        _abandon(tier)
    return refs


def _abandon(tier: NvmeTier) -> None:
    """Let go of everything as a killed process does, without a word in the directory."""
    tier._holds.closed = True
    tier._blocks.close()
    tier._space._closing = True
    tier._space.close()
    tier._index.close()
    tier._segments.close()
    os.close(tier._opened.directory._writer_fd)
    tier._opened.directory._writer_fd = -1
    tier._opened.directory.drop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "nvme"


def test_blocks_outlive_the_tier(path: Path) -> None:
    refs = _filled(path)
    assert _meta(path)["clean"] is True
    with_other_options = _open(path, segment_bytes=2 * _MIB)
    assert _meta(path)["clean"] is False
    _assert_loads(with_other_options, refs)
    assert with_other_options.stats()["blocks"] == 20
    with_other_options.close()
    assert not list((path / "locks").iterdir())


def test_blocks_outlive_a_process_that_did_not_close(path: Path) -> None:
    refs = _filled(path, close=False)
    tier = _open(path)
    _assert_loads(tier, refs)
    assert len(list((path / "locks").iterdir())) == 1
    tier.close()


@pytest.mark.parametrize("capacity", [-1, 0, _MIB - 1, 1 << 45])
def test_impossible_capacities(path: Path, capacity: int) -> None:
    with pytest.raises(CapacityError, match=str(capacity)):
        _open(path, capacity)
    assert not path.exists()


@pytest.mark.parametrize(
    "options", [{"segment_bytes": 4097}, {"segment_bytes": 0}, {"io_threads": 0}, {"min_free_bytes": -1}]
)
def test_impossible_options(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        NvmeOptions(**options)


def _refused(path: Path, error: type[KVTierError], match: str, **options: object) -> None:
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(error, match=match) as caught:
        _open(path, **options)
    assert "\n" not in str(caught.value)
    assert sorted(path.parent.rglob("*")) == before


def test_refusals_leave_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    _refused(file, ConfigError, "is a file")
    _refused(file / "below", TierUnavailable, "cannot be")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    _refused(foreign, ConfigError, r"thesis\.tex")
    _refused(tmp_path / "new", CapacityError, "must stay free", min_free_bytes=1 << 60)


def test_an_unwritable_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    _refused(path, TierUnavailable, "not writable")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (json.dumps({"version": FORMAT_VERSION + 1}), f"version {FORMAT_VERSION + 1}, this release reads"),
        ("[]", "version None"),
        ("{", "cannot be read"),
        (json.dumps({"version": FORMAT_VERSION, "uuid": "x"}), "damaged"),
    ],
)
def test_unreadable_meta(path: Path, text: str, match: str) -> None:
    _filled(path)
    (path / "META.json").write_text(text)
    _refused(path, TierUnavailable, match)


def test_a_new_directory_with_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.nvme.opening.disk_free", lambda where: _MIB - 1)
    with pytest.raises(CapacityError, match="free some space"):
        _open(path)
    assert not path.exists()


def test_a_process_may_change_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refs = _filled(Path("nvme"))
    tier = _open(Path("nvme"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _assert_loads(tier, refs)
    more = chain_refs(100, seed=2)  # in files that nobody opened so far
    put(tier, more, _SIZE)
    _assert_loads(tier, more)
    tier.close()
    assert _meta(tmp_path / "nvme")["clean"] is True
    assert not list((tmp_path / "elsewhere").iterdir())


def test_names_that_are_nobodys_are_left_alone(path: Path) -> None:
    refs = _filled(path)
    for name in ("locks/" + "x" * 32, "seg-old.kv"):
        (path / name).touch()
    tier = _open(path)
    _assert_loads(tier, refs)
    assert tier.stats()["segments"] == len(list(path.glob("seg-0*.kv")))
    tier.close()
    assert _meta(path)["clean"] is True
    assert (path / "seg-old.kv").exists()


def test_one_tier_per_directory_and_process(path: Path, tmp_path: Path) -> None:
    tier = _open(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(TierUnavailable, match="open in this process"):
        _open(tmp_path / "link")
    tier.close()
    _open(path).close()


def test_creation_that_was_interrupted(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "locks").mkdir()
    (path / "LOCK").touch()
    (path / "seg-00000.kv").write_bytes(b"x")
    tier = _open(path)
    assert tier.stats()["blocks"] == 0
    tier.close()


class TestAfterTheMachineStopped:
    def test_starts_empty(self, path: Path) -> None:
        refs = _filled(path, close=False)
        _set_meta(path, boot_id="another boot")
        metrics = Metrics()
        tier = _open(path, metrics=metrics)
        assert run_length(tier, refs) == 0
        assert metrics.value("errors_total", tier="nvme", operation="open") == 1
        put(tier, refs, _SIZE)
        _assert_loads(tier, refs)
        tier.close()

    def test_a_clean_directory_is_kept(self, path: Path) -> None:
        refs = _filled(path)
        _set_meta(path, boot_id="another boot")
        tier = _open(path)
        _assert_loads(tier, refs)
        assert _meta(path)["boot_id"] == boot_id()
        tier.close()

    def test_a_durable_directory_is_kept(self, path: Path) -> None:
        refs = chain_refs(5)
        tier = _open(path, durable=True)
        put(tier, refs, _SIZE)
        _abandon(tier)
        _set_meta(path, boot_id="another boot")
        tier = _open(path)
        _assert_loads(tier, refs)
        _abandon(tier)
        # The last opener was not durable.
        _set_meta(path, boot_id="another boot")
        tier = _open(path, durable=True)
        assert run_length(tier, refs) == 0
        tier.close()

    def test_rows_that_were_not_written_back_are_made_anew(self, path: Path) -> None:
        """Pages of a mapping reach the disk in any order: here that of the header, which counts the rows, did not."""
        tier = _open(path, durable=True)
        header = (path / "recency.bin").read_bytes()[:4096]
        refs = chain_refs(5)
        put(tier, refs, _SIZE)
        _abandon(tier)
        _set_meta(path, boot_id="another boot")
        with (path / "recency.bin").open("r+b") as file:
            file.write(header)
        tier = _open(path, durable=True)
        assert tier.check()["lost_rows"] == 0
        _assert_loads(tier, refs)
        for seed in range(2, 20):
            put(tier, chain_refs(20, seed=seed), _SIZE)
        assert run_length(tier, refs) == 0
        tier.close()


class TestDamagedIndex:
    def _assert_starts_empty(self, path: Path, refs: list[BlockRef]) -> None:
        metrics = Metrics()
        tier = _open(path, metrics=metrics)
        assert run_length(tier, refs) == 0
        assert metrics.value("errors_total", tier="nvme", operation="open") == 1
        put(tier, refs, _SIZE)
        _assert_loads(tier, refs)
        assert tier.check(verify=True)["leaked_pages"] == 0
        tier.close()

    def test_no_index_at_all(self, path: Path) -> None:
        refs = _filled(path)
        (path / "index" / "data.mdb").write_bytes(b"nonsense" * 4096)
        self._assert_starts_empty(path, refs)

    def test_truncated(self, path: Path) -> None:
        refs = _filled(path)
        os.truncate(path / "index" / "data.mdb", 4 * 4096)
        self._assert_starts_empty(path, refs)

    def test_truncated_where_only_some_pages_are_missing(self, path: Path) -> None:
        """Opened in processes of their own: LMDB ended those that met a page of zeros."""
        tier = _open(path, 8 * _MIB)
        for seed in range(24):
            put(tier, chain_refs(64, seed=seed), 4096)
        tier.close()
        data = path / "index" / "data.mdb"
        sound, meta = data.read_bytes(), (path / "META.json").read_bytes()
        program = """if True:
            import sys
            from pathlib import Path
            from kvtier.nvme import NvmeOptions, NvmeTier
            from kvtier.nvme.inspection import compact, look, maintain
            from kvtier.testing.blocks import chain_refs, load, put
            path = Path(sys.argv[1])
            if sys.argv[2] == "maintain":
                with maintain(path) as opened:
                    opened.repair()
                compact(path)
            for _ in range(2):
                tier = NvmeTier(path, 8 << 20, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0))
                load(tier, [ref.key for ref in chain_refs(64, seed=3)])
                put(tier, chain_refs(64, seed=99), 4096)
                assert tier.check(verify=True)["corrupt"] == 0
                tier.close()
            with look(path) as found:
                assert found.check(verify=True)["leaked_pages"] == 0
        """
        for part, how in ((0.6, "open"), (0.8, "open"), (0.8, "maintain")):
            (path / "META.json").write_bytes(meta)
            data.write_bytes(sound)
            os.truncate(data, int(len(sound) // 4096 * part) * 4096)
            subprocess.run([sys.executable, "-c", program, str(path), how], check=True, capture_output=True)

    def test_sums_that_promise_pages_which_are_not_there(self, path: Path) -> None:
        tier = _open(path, _MIB)
        put(tier, chain_refs(64), _SIZE)
        with tier._index.write() as ledger:
            ledger.state = ledger.state._replace(used=ledger.state.used - 40)
            assert not ledger.free.runs()
        with tier._space.lock:
            tier._space._arena.drain()
        results = tier.reserve(chain_refs(1, seed=2), [_SIZE], ["raw"], "test")
        assert [getattr(result, "reason", "") for result in results] == ["index_full"]
        tier.close()
        tier = _open(path, _MIB)
        report = tier.check(verify=True)
        assert {report[fault] for fault in FAULTS} == {0}
        _assert_loads(tier, chain_refs(64))
        assert isinstance(tier.reserve(chain_refs(1, seed=2), [_SIZE], ["raw"], "test")[0], Handle)
        tier.close()

    def test_pages_of_zeros(self, path: Path) -> None:
        refs = _filled(path)
        data = path / "index" / "data.mdb"
        with data.open("r+b") as file:
            file.seek(8192)
            file.write(bytes(data.stat().st_size - 8192))
        self._assert_starts_empty(path, refs)

    def test_found_while_open(self, path: Path) -> None:
        refs = _filled(path)
        tier = _open(path)
        tier.flush()
        data = path / "index" / "data.mdb"
        with data.open("r+b") as file:
            file.seek(8192)
            file.write(bytes(data.stat().st_size - 8192))
        with pytest.raises(TierUnavailable, match="reopen"):
            tier.contains([ref.key for ref in refs])
        tier.close()
        assert _meta(path)["damaged"] is True
        self._assert_starts_empty(path, refs)


def test_lost_recency_is_rebuilt(path: Path) -> None:
    refs = _filled(path)
    (path / "recency.bin").unlink()
    tier = _open(path)
    report = tier.check()
    assert (report["blocks"], report["lost_rows"]) == (20, 0)
    for seed in range(2, 20):
        put(tier, chain_refs(20, seed=seed), _SIZE)
    assert run_length(tier, refs) == 0
    tier.close()


class TestAnotherCapacity:
    def _many(self, tier: NvmeTier) -> list[list[BlockRef]]:
        chains = [chain_refs(16, seed=seed) for seed in range(12)]
        for refs in chains:
            put(tier, refs, _SIZE)
        return chains

    def test_smaller_converges_below_it(self, path: Path) -> None:
        tier = _open(path, 4 * _MIB)
        chains = self._many(tier)
        tier.close()
        tier = _open(path, 2 * _MIB - 8192)
        stats, report = tier.stats(), tier.check(verify=True)
        assert stats["bytes"] <= stats["capacity_bytes"] == 2 * _MIB - 8192
        assert 100 <= report["blocks"] <= 127
        assert not any(report[fault] for fault in ("leaked_pages", "overlaps", "wrong_sums", "lost_rows", "corrupt"))
        assert sum(file.stat().st_size for file in path.glob("seg-*.kv")) <= 2 * _MIB - 8192
        for refs in chains:
            _assert_loads(tier, refs[: run_length(tier, refs)])
        self._many(tier)
        assert tier.stats()["bytes"] <= 2 * _MIB - 8192
        tier.close()

    def test_files_are_shortened_also_if_whoever_made_it_smaller_died_before(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier = _open(path, 4 * _MIB)
        self._many(tier)
        tier.close()
        monkeypatch.setattr("kvtier.nvme.segments.Segments.cut", lambda *_: None)
        _abandon(_open(path, 2 * _MIB))
        monkeypatch.undo()
        assert sum(file.stat().st_size for file in path.glob("seg-*.kv")) > 2 * _MIB
        tier = _open(path, 2 * _MIB)
        assert sum(file.stat().st_size for file in path.glob("seg-*.kv")) <= 2 * _MIB
        assert tier.check(verify=True)["corrupt"] == 0
        tier.close()

    @pytest.mark.parametrize("segment_bytes", [_MIB, 3 * _MIB])
    def test_larger_grows_in_segments_of_the_size_that_is_there(self, path: Path, segment_bytes: int) -> None:
        tier = _open(path, 2 * _MIB)
        self._many(tier)
        tier.close()
        tier = _open(path, 5 * _MIB, segment_bytes=segment_bytes)
        chains = self._many(tier)
        assert [run_length(tier, refs) for refs in chains] == [16] * 12
        assert {file.stat().st_size for file in path.glob("seg-*.kv")} == {_MIB}
        assert tier.check(verify=True)["leaked_pages"] == 0
        tier.close()


@pytest.fixture
def other_process(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that has opened the directory with 2 MiB and obeys: `put SEED`, `acquire SEED`, `close`."""
    program = """if True:
        import sys
        from pathlib import Path
        from kvtier.nvme import NvmeOptions, NvmeTier
        from kvtier.testing.blocks import chain_refs, put
        tier = NvmeTier(Path(sys.argv[1]), 2 << 20, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0))
        print("ready", flush=True)
        for line in sys.stdin:
            verb, seed = line.split()
            refs = chain_refs(16, seed=int(seed))
            if verb == "put":
                put(tier, refs, 16384)
            if verb == "reserve":
                held = tier.reserve(refs, [16384] * 16, ["raw"] * 16, "child")
            print("done", flush=True)
        tier.close()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def _tell(process: "subprocess.Popen[str]", command: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(command + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


class TestTwoProcesses:
    def test_blocks_and_capacity_are_shared(self, path: Path, other_process: "subprocess.Popen[str]") -> None:
        tier = _open(path, 2 * _MIB)
        _tell(other_process, "put 1")
        _assert_loads(tier, chain_refs(16, seed=1))
        for seed in range(2, 12):
            put(tier, chain_refs(16, seed=seed), _SIZE)
            _tell(other_process, f"put {seed + 100}")
            stats = tier.stats()
            assert stats["bytes"] <= stats["capacity_bytes"] == 2 * _MIB
        report = tier.check(verify=True)
        assert not any(report[fault] for fault in ("leaked_pages", "overlaps", "wrong_sums", "lost_rows", "corrupt"))
        _assert_loads(tier, chain_refs(16, seed=111))
        tier.close()
        assert _meta(path)["clean"] is False
        other_process.communicate("", timeout=30)
        assert _meta(path)["clean"] is True

    def test_a_raced_read_is_a_miss(self, path: Path, other_process: "subprocess.Popen[str]") -> None:
        metrics = Metrics()
        tier = _open(path, 2 * _MIB, metrics)
        refs = chain_refs(16, seed=1)
        put(tier, refs, _SIZE)
        handles = tier.acquire([ref.key for ref in refs], "reader").wait(30).handles
        for seed in range(2, 14):
            _tell(other_process, f"put {seed}")
        buffers = [memoryview(bytearray(_SIZE)) for _ in handles]
        done = tier.read(list(zip(handles, buffers, strict=True))).wait(30)
        assert done.statuses == (Status.MISS,) * 16
        assert metrics.value("corrupt_blocks_total", tier="nvme") == 0
        tier.release(handles)
        assert tier.check(verify=True)["corrupt"] == 0
        tier.close()

    def test_what_a_dead_writer_held_is_reclaimed(self, path: Path, other_process: "subprocess.Popen[str]") -> None:
        tier = _open(path, 2 * _MIB)
        for seed in range(8):
            _tell(other_process, f"reserve {seed}")
        assert tier.stats()["bytes"] == 2 * _MIB
        assert tier.check()["dead_holds"] == 0
        refs = chain_refs(16, seed=50)
        assert {getattr(result, "reason", "") for result in put(tier, refs, _SIZE)} == {"no_space", "parent_refused"}
        other_process.kill()
        other_process.wait()
        put(tier, refs, _SIZE)
        _assert_loads(tier, refs)
        assert tier.stats()["bytes"] == 16 * _SIZE
        tier.close()

    def test_less_capacity_than_the_others_is_refused(self, path: Path, other_process: "subprocess.Popen[str]") -> None:
        with pytest.raises(ConfigError, match="is in use with a capacity of 2097152 bytes"):
            _open(path, _MIB)
        tier = _open(path, 3 * _MIB)
        _tell(other_process, "put 1")
        assert tier.stats()["capacity_bytes"] == 3 * _MIB
        tier.close()


def test_a_forked_child_gets_an_error_and_harms_nobody(path: Path) -> None:
    tier = _open(path)
    refs = chain_refs(3)
    put(tier, refs, _SIZE)
    leased = tier.acquire([refs[0].key], "parent").wait(30).handles
    reserved = tier.reserve(chain_refs(1, seed=2), [_SIZE], ["raw"], "parent")
    buffer = memoryview(bytearray(_SIZE))
    verbs: list[Callable[[], object]] = [
        lambda: tier.contains([refs[0].key]),
        # Its threads are not there to end these.
        lambda: tier.read([(leased[0], buffer)]),
        lambda: tier.write([(reserved[0], buffer)]),
        tier.flush,
    ]
    child = os.fork()
    if child == 0:
        refused = 0
        try:
            for verb in verbs:
                try:
                    verb()
                except TierUnavailable:
                    refused += 1
            tier.close()
        finally:
            os._exit(len(verbs) - refused)
    assert os.waitpid(child, 0)[1] == 0
    tier.release(leased)
    tier.abort(reserved)
    assert len(list((path / "locks").iterdir())) == 1
    _assert_loads(tier, refs)
    tier.close()
