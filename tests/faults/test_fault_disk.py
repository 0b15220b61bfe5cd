"""The NVMe tier on real kernels that say no: full and read-only file systems, limits, lost and shared directories."""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_world import BLOCK, NVME_OPTIONS, World
from patience import until

from kvtier.errors import KVTierError, TierUnavailable
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import BlockRef, Handle, Status

_MIB = 1 << 20
_PRELUDE = """
import sys
from pathlib import Path
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.testing.blocks import chain_refs, content, load, put
from kvtier.tiers import BlockRef, Handle, Status
path, options = Path(sys.argv[1]), NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0)
"""
_FILL = (
    _PRELUDE
    + """
import resource
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    options = NvmeOptions(segment_bytes=8 << 20, min_free_bytes=0)
metrics = Metrics()
tier = NvmeTier(path, 32 << 20, options, metrics=metrics)
taken = refused = 0
for seed in range(12):
    refs = chain_refs(16, seed=seed)
    results = put(tier, refs, 65536)
    taken += sum(isinstance(one, Handle) for one in results)
    for ref, (status, data) in zip(refs, load(tier, [ref.key for ref in refs])):
        assert status is not Status.OK or data == content(ref, 65536)
        refused += status is not Status.OK
report = tier.check(verify=True)
assert not report["corrupt"] and not report["leaked_pages"], report
stats = tier.stats()
assert stats["blocks"] > 0 and stats["reservations"] == stats["leases"] == 0, stats
tier.close()
print(taken, refused)
"""
)


def child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@contextlib.contextmanager
def mounted(where: Path, options: str) -> Iterator[Path]:
    """A small file system of its own; skips where it cannot be mounted."""
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)]
    mount = subprocess.run(command, capture_output=True, text=True, check=False)
    if mount.returncode:
        pytest.skip(f"needs the right to mount: {mount.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NvmeTier]:
    with contextlib.closing(NvmeTier(tmp_path / "n", 4 * _MIB, NVME_OPTIONS, metrics=Metrics())) as tier:
        yield tier


# ---- no room, no right


def test_a_full_file_system_refuses_blocks_and_nothing_else(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=6m") as disk:
        # In a process of its own: memory that a full disk cannot back kills (SIGBUS) instead of failing.
        ended = child(_FILL, disk / "n")
        assert ended.returncode == 0, ended.stderr[-2000:]
        assert "Traceback" not in ended.stderr


_OPEN = (
    _PRELUDE
    + """
from kvtier.errors import KVTierError
try:
    tier = NvmeTier(path, 4 << 20, options)
except KVTierError as error:
    print(error)
else:
    assert all(status is Status.OK for status, _ in load(tier, [ref.key for ref in chain_refs(64)]))
    tier.close()
    print("opened")
"""
)
_READ = (
    _PRELUDE
    + """
from threading import Barrier, Thread
tier = NvmeTier(path, 1 << 20, options)
put(tier, chain_refs(64), 4096)
tier.flush()
try:
    with open(path.parent / "ballast", "wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)) == 4096:
            pass
except OSError:
    pass
together = Barrier(200)  # more than have their places on one page of LMDB's table

def look():
    with tier._index.read() as ledger:
        together.wait()
        assert ledger.blocks == 64

threads = [Thread(target=look) for _ in range(200)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
)


@pytest.mark.parametrize("damage", ["another index", "no lock file"])
def test_a_full_disk_kills_nobody_who_opens_a_directory(tmp_path: Path, damage: str) -> None:
    with mounted(tmp_path / "disk", "size=8m") as disk:
        with contextlib.closing(NvmeTier(disk / "n", 4 * _MIB, NVME_OPTIONS)) as tier:
            put(tier, chain_refs(64), 4096)
        if damage == "another index":
            meta = disk / "n" / "META.json"
            meta.write_text(meta.read_text().replace('"damaged": false', '"damaged": true'))
        else:
            (disk / "n" / "index" / "lock.mdb").unlink()
        said = []
        free = os.statvfs(disk).f_bavail * 4096
        for left in (0, 4, 24, 72, 400):
            (disk / "ballast").write_bytes(bytes(free - left * 1024))
            ended = child(_OPEN, disk / "n")
            (disk / "ballast").unlink()
            assert ended.returncode == 0, (left, ended.returncode, ended.stderr[-2000:])
            said.append(ended.stdout)
        assert said[-1] == "opened\n"
        assert "space" in said[0]


def test_a_disk_that_fills_kills_no_reader(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=8m") as disk:
        ended = child(_READ, disk / "n")
        assert ended.returncode == 0, (ended.returncode, ended.stderr[-2000:])


def test_a_file_size_limit_refuses_blocks_and_nothing_else(tmp_path: Path) -> None:
    ended = child(_FILL, tmp_path / "n", 3 * _MIB)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr
    assert max(file.stat().st_size for file in (tmp_path / "n").rglob("*") if file.is_file()) <= 3 * _MIB


def test_a_directory_that_became_read_only_is_refused_in_one_line(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=16m") as disk:
        with contextlib.closing(NvmeTier(disk / "n", 4 * _MIB, NVME_OPTIONS)) as tier:
            put(tier, chain_refs(4), BLOCK)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(TierUnavailable) as caught:
            NvmeTier(disk / "n", 4 * _MIB, NVME_OPTIONS)
        assert "\n" not in str(caught.value)
        assert str(disk) in str(caught.value)
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        with contextlib.closing(NvmeTier(disk / "n", 4 * _MIB, NVME_OPTIONS)) as tier:
            assert run_length(tier, chain_refs(4)) == 4


# ---- the device fails


def test_one_bad_page_costs_one_block_and_its_descendants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refs, preadv = chain_refs(8), os.preadv
    with contextlib.closing(World(tmp_path)) as world:
        world.put(refs)
        world.down()
        (bad,) = world.nvme.acquire([refs[5].key], "test").wait(30).handles
        offset = bad.page * 4096
        world.nvme.release([bad])

        def broken(fd: int, buffers: list[memoryview], at: int) -> int:
            if at <= offset < at + sum(buffer.nbytes for buffer in buffers):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return preadv(fd, buffers, at)

        monkeypatch.setattr("kvtier.native.vectored._compiled", None)
        monkeypatch.setattr(os, "preadv", broken)
        # Adjacent pages move in one call, so all that lie in it may be lost with it, never more and never wrong.
        assert world.fetched(refs) <= 5
        assert world.total("kvtier_errors_total", "nvme") >= 1
        monkeypatch.setattr(os, "preadv", preadv)
        world.put(refs)
        world.down()
        assert world.fetched(refs) == 8
        world.check()


@pytest.mark.parametrize("when", ["idle", "reserved", "leased"])
def test_a_directory_that_vanishes_is_a_miss_and_can_be_made_anew(tmp_path: Path, when: str) -> None:
    refs, path = chain_refs(4), tmp_path / "n"
    with contextlib.closing(NvmeTier(path, 4 * _MIB, NVME_OPTIONS)) as tier:
        put(tier, refs, BLOCK)
        held = tier.acquire([ref.key for ref in refs], "t").wait(30).handles if when == "leased" else ()
        slots = tier.reserve(chain_refs(2, seed=5), [BLOCK] * 2, ["raw"] * 2, "t") if when == "reserved" else []
        shutil.rmtree(path)
        for seed in range(6):
            with contextlib.suppress(KVTierError):
                put(tier, chain_refs(64, seed=10 + seed), BLOCK)
            for ref, (status, data) in zip(refs, load(tier, [ref.key for ref in refs]), strict=True):
                assert status is not Status.OK or data == content(ref, BLOCK)
        tier.release(held)
        tier.abort([slot for slot in slots if isinstance(slot, Handle)])
        stats = tier.stats()
        assert (stats["leases"], stats["reservations"]) == (0, 0)
    with contextlib.closing(NvmeTier(path, 4 * _MIB, NVME_OPTIONS)) as tier:
        put(tier, refs, BLOCK)
        assert run_length(tier, refs) == 4


def test_any_byte_flipped_anywhere_is_a_miss_or_another_start(tmp_path: Path) -> None:
    """Random bytes of every file of a closed directory: it opens, empty or not, or says in one line why it does not."""
    refs = chain_refs(16)
    with contextlib.closing(NvmeTier(tmp_path / "n", 2 * _MIB, NVME_OPTIONS)) as tier:
        put(tier, refs, BLOCK)
    shutil.copytree(tmp_path / "n", tmp_path / "sound")
    dice = random.Random(3)
    indexes = ["index/data.mdb"] * 4 + ["index/lock.mdb"]
    names = ["META.json", "recency.bin", "seg-00000.kv", "seg-00000.kv", "seg-00000.kv", *indexes]
    for name in names:
        shutil.rmtree(tmp_path / "n")
        shutil.copytree(tmp_path / "sound", tmp_path / "n")
        with (tmp_path / "n" / name).open("r+b") as file:
            size = file.seek(0, 2)
            for _ in range(8):
                file.seek(dice.randrange(min(size, 16 * BLOCK)))
                file.write(dice.randbytes(1))
        # Where META.json no longer says what this directory is, it is refused, and the message says what to do.
        refused = contextlib.suppress(TierUnavailable) if name == "META.json" else contextlib.nullcontext()
        with refused, contextlib.closing(NvmeTier(tmp_path / "n", 2 * _MIB, NVME_OPTIONS)) as tier:
            for ref, (status, data) in zip(refs, load(tier, [ref.key for ref in refs]), strict=True):
                assert status is not Status.OK or data == content(ref, BLOCK)


# ---- several processes


_WRITER = (
    _PRELUDE
    + """
tier = NvmeTier(path, 4 << 20, options)
print("ready", flush=True)
seed = int(sys.argv[2])
for line in sys.stdin:
    for _ in range(int(line)):
        refs = chain_refs(8, seed=seed)
        put(tier, refs, 8192)
        for ref, (status, data) in zip(refs, load(tier, [ref.key for ref in refs])):
            assert status is not Status.OK or data == content(ref, 8192)
        seed += 1
    print(seed, tier.stats()["bytes"], flush=True)
tier.close()
"""
)


@contextlib.contextmanager
def writer(path: Path, seed: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _WRITER, str(path), str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], chains: int) -> tuple[int, int]:
    """Have a writer put so many chains; the next seed and the bytes that it sees occupied."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{chains}\n")
    process.stdin.flush()
    seed, nbytes = process.stdout.readline().split()
    return int(seed), int(nbytes)


def put_whole(tier: NvmeTier, refs: list[BlockRef]) -> bool:
    """Whether all of a chain is there. Pages that another process is preparing are refused for the moment."""
    put(tier, refs, BLOCK)
    return run_length(tier, refs) == len(refs)


def test_processes_on_one_directory_share_one_budget_and_their_blocks(tier: NvmeTier, tmp_path: Path) -> None:
    with writer(tmp_path / "n", 1000) as one, writer(tmp_path / "n", 2000) as two:
        for _ in range(2):
            # 3 x 240 blocks into room for 512: nobody's own limit would ever be reached, the common one is.
            for process in (one, two):
                _, nbytes = ask(process, 30)
                assert nbytes <= 4 * _MIB
            for seed in range(30):
                put(tier, chain_refs(8, seed=seed), BLOCK)
            assert tier.stats()["bytes"] <= 4 * _MIB
            assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "n").glob("seg-*")) <= 4 * _MIB
        newest, _ = ask(one, 1)
        refs = chain_refs(8, seed=newest - 1)
        # What one process has just put, another one finds.
        assert load(tier, [ref.key for ref in refs]) == [(Status.OK, bytes(content(ref, BLOCK))) for ref in refs]
        one.send_signal(signal.SIGKILL)
        one.wait(30)
        # One dies, the others go on; one that comes anew finds the blocks.
        ask(two, 5)
        until(lambda: put_whole(tier, refs))
    with writer(tmp_path / "n", 3000) as late:
        ask(late, 1)
        assert run_length(tier, chain_refs(8, seed=3000)) == 8
    report = tier.check(verify=True)
    assert (report["corrupt"], report["overlaps"], report["wrong_sums"]) == (0, 0, 0)


def test_the_index_reopened_under_load_keeps_old_blocks(tmp_path: Path) -> None:
    """One process opens and closes the directory again and again while another writes."""
    with writer(tmp_path / "n", 1000) as other:
        for turn in range(4):
            with contextlib.closing(NvmeTier(tmp_path / "n", 4 * _MIB, NVME_OPTIONS)) as tier:
                until(lambda tier=tier, turn=turn: put_whole(tier, chain_refs(8, seed=turn)))
                seed, _ = ask(other, 2)
                assert run_length(tier, chain_refs(8, seed=seed - 1)) == 8
                if turn:
                    assert run_length(tier, chain_refs(8, seed=turn - 1)) == 8


# ---- restarts


def test_a_directory_of_another_run_is_found_again_and_counted(tmp_path: Path) -> None:
    options = NvmeOptions(segment_bytes=_MIB, min_free_bytes=0)
    with contextlib.closing(World(tmp_path)) as world:
        for seed in range(4):
            world.put(chain_refs(16, seed=seed))
        world.store.flush()
        before = world.nvme.stats()["bytes"]
    with contextlib.closing(NvmeTier(tmp_path / "nvme", 512 * BLOCK, options)) as tier:
        assert tier.stats()["bytes"] == before == 64 * BLOCK
        for seed in range(4):
            assert run_length(tier, chain_refs(16, seed=seed)) == 16
