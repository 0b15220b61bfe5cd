"""Every trap that the doctor knows, set and found; and the same check in a sound place."""

import contextlib
import json
import os
import resource
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier import formats
from kvtier.doctor import Finding, Level, ModelFacts, Subject, disk, examine, findings, hashing, limits, machine, speed
from kvtier.doctor.examine import CHECKS
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.testing import Fault, FaultyTier, Kind
from kvtier.testing.blocks import chain_refs, put

Build = Callable[..., Subject]
Worst = Callable[[str, Subject], Finding]
OK, WARNING, PROBLEM = Level.OK, Level.WARNING, Level.PROBLEM


def test_a_sound_place_has_no_problem_and_nothing_is_left_behind(subject: Build, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    levels = {finding.check: finding.level for finding in examine(subject())}
    assert PROBLEM not in levels.values()
    assert set(levels) == set(CHECKS)
    assert sorted(tmp_path.rglob("*")) == before


def test_sizes_are_read_at_a_glance() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 3 * 2**29: "1.5 GiB", 5 * 2**40: "5 TiB", 2**60: "1048576 TiB"}
    assert {size: findings.shown_size(size) for size in sizes} == sizes


# ---- names


def test_names_that_depend_on_the_process(
    subject: Build, worst: Worst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worst("hashing", subject()).level is OK
    code = "print(hash('text'))"
    monkeypatch.setattr(hashing, "_CODE", code)
    assert "PYTHONHASHSEED=0" in worst("hashing", subject()).what
    monkeypatch.setattr(hashing, "_CODE", "raise SystemExit('no numpy here')")
    assert "no numpy here" in worst("hashing", subject()).what


# ---- sizes


@pytest.mark.parametrize(
    ("check", "settings", "level", "says"),
    [
        ("capacity", {}, OK, "host takes 4,096 blocks"),
        ("capacity", {"host": {"capacity": 16383}}, PROBLEM, "less than one block of 16 KiB"),
        ("capacity", {"host": {"capacity": 1 << 20}}, WARNING, "less than one request of the full context"),
        ("capacity", {"nvme": {"capacity": 32 << 20}}, WARNING, "no larger than host"),
        ("capacity", {"host": None, "nvme": None}, WARNING, "tiering is off"),
        ("capacity", {"nvme": {"format": "int8"}}, OK, "host takes 4,096 blocks in format raw"),
        ("encoding", {}, OK, "bit by bit"),
        ("encoding", {"nvme": {"format": "bitsplit"}}, OK, "bit by bit"),
        ("encoding", {"nvme": {"format": "int8"}}, PROBLEM, "lossy format in nvme: requests do not reuse"),
        ("encoding", {"nvme": {"format": "int8"}, "lossy": True}, WARNING, "outputs may differ"),
        ("encoding", {"host": {"format": "bitsplit"}}, PROBLEM, "host cannot keep blocks in bitsplit"),
        ("encoding", {"host": {"format": "int9"}}, PROBLEM, "int9"),
        ("policy", {"host": {"policy": "s3fifo"}}, OK, "evicts by s3fifo"),
        ("policy", {"host": {"policy": "arcc"}}, PROBLEM, "did you mean 'arc'?"),
        ("memory", {}, OK, "available"),
        ("memory", {"host": {"capacity": 1 << 50}}, PROBLEM, "1024 TiB"),
    ],
)
def test_capacities(subject: Build, worst: Worst, check: str, settings: dict, level: Level, says: str) -> None:
    finding = worst(check, subject(**settings))
    assert finding.level is level
    assert says in finding.what


def test_blocks_are_counted_in_the_format_of_their_tier(subject: Build, facts: ModelFacts) -> None:
    whole = formats.get("int8").size(facts.layout)
    assert whole is not None
    assert whole < facts.block_bytes
    expected = (256 << 20) // (-(-whole // 4096) * 4096)
    *_, nvme = examine(subject(nvme={"format": "int8"}), ["capacity"])
    assert nvme.what.startswith(f"nvme takes {expected:,} blocks in format int8")
    *_, nvme = examine(subject(nvme={"format": "bitsplit"}), ["capacity"])
    assert nvme.what.startswith("nvme takes 16,384 blocks in format bitsplit")


def test_more_than_is_free_now(subject: Build, worst: Worst, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:  32768 kB\n")
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    finding = worst("memory", subject())
    assert (finding.level, "32 MiB are available now" in finding.what) == (WARNING, True)
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/memory.max").write_text(str(32 << 20))
    monkeypatch.setattr(machine, "_SYS", tmp_path)
    assert "has 32 MiB" in worst("memory", subject()).what


def test_layout_and_dtype(subject: Build, worst: Worst, facts: ModelFacts) -> None:
    finding = worst("layout", subject())
    assert (finding.level, finding.what) == (OK, "1 KiB of KV per token, 16 KiB per block of 16 tokens")
    (group,) = facts.layout.groups
    odd = facts._replace(layout=type(facts.layout)(1, (group,)))
    assert "wastes 75%" in worst("layout", subject(model=odd)).what
    wide = facts._replace(own_dtype="int8")
    assert "its KV is kept as float16" in worst("dtype", subject(model=wide)).what
    assert worst("dtype", subject()).level is OK
    assert "not here" in worst("dtype", subject(model=None)).what
    assert list(examine(subject(model=None), ["layout"])) == []


# ---- limits


@contextlib.contextmanager
def limited(which: int, value: int) -> Iterator[None]:
    """The real limit of this process, for a while."""
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def test_limits(subject: Build, worst: Worst, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst("limits", subject()).level is OK
    many = subject(nvme={"capacity": "64GiB", "segment_size": "1MiB"})
    with limited(resource.RLIMIT_NOFILE, 4096):
        assert "up to 65600 files" in worst("limits", many).what
    with limited(resource.RLIMIT_FSIZE, 1 << 20):
        assert "ulimit -f is 1 MiB" in worst("limits", subject()).what
    with limited(resource.RLIMIT_AS, 32 << 30):
        assert "ulimit -v is 32 GiB" in worst("limits", subject(host={"capacity": "40GiB"})).what
    monkeypatch.setattr(limits, "nvidia_driver", lambda: True)
    with limited(resource.RLIMIT_MEMLOCK, 4096):
        finding = worst("limits", subject())
    assert (finding.level, "pinning may be refused" in finding.what) == (WARNING, True)


def test_an_index_that_cannot_be_mapped(subject: Build, worst: Worst) -> None:
    assert worst("index_map", subject()).level is OK
    with limited(resource.RLIMIT_AS, 40 << 30):
        assert "cannot be mapped" in worst("index_map", subject(nvme={"capacity": "1TiB"})).what


# ---- the directory


def test_a_path_that_is_no_directory_of_ours(subject: Build, worst: Worst, tmp_path: Path) -> None:
    assert "is new" in worst("directory", subject()).what
    assert not (tmp_path / "nvme").exists()
    (tmp_path / "file").write_text("")
    assert "is a file" in worst("directory", subject(nvme={"path": str(tmp_path / "file")})).what
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    assert "cat.jpg" in worst("directory", subject(nvme={"path": str(tmp_path / "photos")})).what
    assert [entry.name for entry in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    assert "no NVMe tier" in worst("directory", subject(nvme=None)).what


def test_a_directory_of_an_earlier_run(subject: Build, worst: Worst, tmp_path: Path) -> None:
    path = tmp_path / "nvme"
    with contextlib.closing(NvmeTier(path, 4 << 20, NvmeOptions(min_free_bytes=0))) as tier:
        put(tier, chain_refs(4), 4096)
    meta = path / "META.json"
    sound = json.loads(meta.read_text())
    files = sorted(path.rglob("*"))
    assert "holds blocks of an earlier run" in worst("directory", subject()).what
    for changed, level, says in (
        ({"version": 99}, PROBLEM, "format version 99"),
        ({"clean": False, "boot_id": "another"}, WARNING, "starts empty"),
        ({"clean": False, "boot_id": "another", "durable": True}, OK, "earlier run"),
        ({"damaged": True}, WARNING, "its index was found damaged"),
    ):
        meta.write_text(json.dumps(sound | changed))
        finding = worst("directory", subject())
        assert finding.level is level
        assert says in finding.what
    for text, says in (
        ("{", "cannot be read"),
        ("{}", "version None"),
        (json.dumps(sound | {"uuid": "x"}), "is damaged"),
    ):
        meta.write_text(text)
        finding = worst("directory", subject())
        assert (finding.level, says in finding.what, bool(finding.remedy)) == (PROBLEM, True, True)
    # Nothing was opened, repaired or thrown away.
    assert sorted(path.rglob("*")) == files


@contextlib.contextmanager
def mounted(where: Path, size: str) -> Iterator[Path]:
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]
    mount = subprocess.run(command, capture_output=True, text=True, check=False)
    if mount.returncode:
        pytest.skip(f"needs the right to mount: {mount.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_file_system_in_memory_without_space_and_read_only(subject: Build, worst: Worst, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "2m") as place:
        there = subject(nvme={"path": str(place / "a" / "b")})
        finding = worst("filesystem", there)
        assert (finding.level, f"{place} is tmpfs" in finding.what) == (WARNING, True)
        assert "can grow to 2 MiB" in worst("space", there).what
        assert "could not be checked" in worst("speed", there).what
        assert list(place.iterdir()) == []
        (place / "filler").write_bytes(bytes(3 << 19))
        assert "cannot be opened" in worst("space", there).what
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert "cannot be written: Read-only file system" in worst("directory", there).what


@pytest.mark.parametrize(
    ("kind", "level"),
    [("ext4", OK), ("xfs", OK), ("overlay", WARNING), ("fuse.sshfs", WARNING), ("nfs4", PROBLEM), ("9p", PROBLEM)],
)
def test_file_systems(
    subject: Build, worst: Worst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, level: Level
) -> None:
    mounts = tmp_path / "mountinfo"
    odd = str(tmp_path / "nvme dir").replace(" ", "\\040")
    mounts.write_text(
        f"22 1 8:1 / / rw,relatime shared:1 - btrfs /dev/a rw\n23 22 8:2 / {odd} rw shared:2 - {kind} x:/y rw\n"
    )
    monkeypatch.setattr(disk, "_MOUNTS", mounts)
    assert worst("filesystem", subject(nvme={"path": str(tmp_path / "nvme dir" / "below")})).level is level
    assert disk.mount_of(tmp_path) == (Path("/"), "btrfs")


def test_room_that_the_tier_has_taken_already_counts(
    subject: Build, worst: Worst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "disk_free", lambda where: 100 << 20)
    assert "can grow to 100 MiB" in worst("space", subject()).what
    assert "can grow to 90 MiB" in worst("space", subject(nvme={"min_free": "10MiB"})).what
    (tmp_path / "nvme").mkdir()
    with (tmp_path / "nvme" / "seg-00000.kv").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 156 << 20)
    assert worst("space", subject()).level is OK


def test_no_direct_io(subject: Build, worst: Worst, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst("direct_io", subject()).level in (OK, WARNING)
    monkeypatch.setattr(disk, "takes_direct_io", lambda place: False)
    assert "no direct I/O" in worst("direct_io", subject()).what


# ---- the machine


@pytest.mark.parametrize(("text", "level"), [("always [never]", WARNING), ("[advise] never", OK), ("", WARNING)])
def test_hugepages(
    subject: Build, worst: Worst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, level: Level
) -> None:
    monkeypatch.setattr(machine, "_SYS", tmp_path)
    switch = tmp_path / "kernel/mm/transparent_hugepage/shmem_enabled"
    switch.parent.mkdir(parents=True)
    if text:
        switch.write_text(text)
    assert worst("hugepages", subject()).level is level


def test_threads_against_a_quota(subject: Build, worst: Worst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SYS", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert worst("threads", subject()).level is OK
    monkeypatch.setenv("OMP_NUM_THREADS", "512")
    assert "512 compute threads" in worst("threads", subject()).what
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpu.max").write_text("50000 100000")
    assert machine.usable_cores() == 0.5
    assert worst("threads", subject()).remedy == "set OMP_NUM_THREADS=1"


def test_clock_page_size_and_memfd(
    subject: Build, worst: Worst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worst("memfd", subject()).level is OK
    assert worst("page_size", subject()).level is OK
    monkeypatch.setattr(machine, "_SYS", tmp_path)
    assert worst("clock", subject()).level is OK
    source = tmp_path / "devices/system/clocksource/clocksource0/current_clocksource"
    source.parent.mkdir(parents=True)
    source.write_text("hpet\n")
    assert "hpet" in worst("clock", subject()).what

    def refused(name: str, flags: int = 0) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert "Operation not permitted" in worst("memfd", subject()).what


def test_processor(subject: Build, worst: Worst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx2 avx512f sse\n")
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    monkeypatch.setattr(machine.native, "available", lambda: False)
    finding = worst("cpu", subject())
    assert (finding.level, "with avx2, avx512f;" in finding.what) == (WARNING, True)
    monkeypatch.setattr(machine.native, "available", lambda: True)
    assert worst("cpu", subject()).level is OK
    (tmp_path / "cpuinfo").unlink()
    assert "could not be checked" in worst("cpu", subject()).what


def test_gpu(subject: Build, worst: Worst, monkeypatch: pytest.MonkeyPatch) -> None:
    def machine_with(*, driver: bool, works: bool, packages: set[str]) -> None:
        monkeypatch.setattr(machine, "nvidia_driver", lambda: driver)
        monkeypatch.setattr(machine, "_cuda_works", lambda: works)
        monkeypatch.setattr(machine, "find_spec", lambda name: SimpleNamespace() if name in packages else None)

    machine_with(driver=False, works=False, packages=set())
    assert worst("gpu", subject()).level is OK
    assert worst("gpu", subject(model=None, rate=None)).level is OK
    machine_with(driver=True, works=False, packages=set())
    assert "torch cannot use it" in worst("gpu", subject()).what
    machine_with(driver=True, works=True, packages={"triton"})
    finding = worst("gpu", subject())
    assert (finding.level, finding.what) == (WARNING, "CUDA works, cupy is missing")
    machine_with(driver=True, works=True, packages={"triton", "cupy"})
    assert worst("gpu", subject()).level is OK


# ---- speed


def test_a_tier_is_faster_or_slower_than_computing_again(subject: Build, worst: Worst, tmp_path: Path) -> None:
    slow_model = list(examine(subject(rate=1.0), ["speed"]))
    assert [finding.level for finding in slow_model] == [OK, OK]
    assert ["host" in slow_model[0].what, "nvme" in slow_model[1].what] == [True, True]
    # A machine that computes 10^12 tokens a second need not load anything.
    fast_model = list(examine(subject(rate=1e12), ["speed"]))
    assert [finding.level for finding in fast_model] == [PROBLEM, PROBLEM]
    assert "computing again is faster" in fast_model[1].what
    assert "is not known" in worst("speed", subject(rate=None)).what
    assert not (tmp_path / "nvme").exists()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault("reserve", Kind.ENOSPC), "did not take a sample"),
        (Fault("write", Kind.EIO, first_item=3), "did not take a sample"),
        (Fault("read", Kind.CORRUPT, nth=4), "lost blocks"),
        (Fault("acquire", Kind.VANISH, nth=2), "lost blocks"),
        (Fault("read", Kind.UNAVAILABLE), "injected failure"),
    ],
    ids=lambda value: f"{value.verb}-{value.kind}" if isinstance(value, Fault) else None,
)
def test_a_tier_that_fails_its_sample(
    subject: Build, worst: Worst, monkeypatch: pytest.MonkeyPatch, fault: Fault, says: str
) -> None:
    def faulty(*arguments: object, **options: object) -> FaultyTier:
        return FaultyTier(NvmeTier(*arguments, **options), [fault])

    monkeypatch.setattr(speed, "NvmeTier", faulty)
    finding = worst("speed", subject(rate=1.0))
    assert finding.level is PROBLEM
    assert says in finding.what


# ---- remote


def test_a_remote_tier_that_is_there(subject: Build, worst: Worst, tmp_path: Path) -> None:
    finding = worst("remote", subject(remote={"url": f"file://{tmp_path}/shared"}))
    assert (finding.level, "answers in" in finding.what) == (OK, True)
    assert "outlive" not in worst("directory", subject(nvme=None, remote={"url": f"file://{tmp_path}"})).what
    assert "outlive" in worst("directory", subject(nvme=None)).what
    assert worst("remote", subject()).level is OK


def test_a_remote_tier_that_nobody_serves(subject: Build, worst: Worst) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: refused
        url = f"valkey://127.0.0.1:{unused.getsockname()[1]}"
        finding = worst("remote", subject(remote={"url": url, "timeout": 0.5}))
    assert (finding.level, url in finding.what, "miss" in finding.remedy) == (PROBLEM, True, True)


def test_a_remote_tier_of_a_kind_that_there_is_not(subject: Build, worst: Worst) -> None:
    finding = worst("remote", subject(remote={"url": "ftp://host/x"}))
    assert (finding.level, "ftp" in finding.what) == (PROBLEM, True)
