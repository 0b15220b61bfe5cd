"""Segment files that vanish, disks that hang, commits that wait for one another."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import until

from kvtier.errors import LeaseError
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.nvme.holds import NvmeHandle
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import Status

_MIB = 1 << 20
_SIZE = 16384
_OPTIONS = NvmeOptions(segment_bytes=_MIB, min_free_bytes=0, io_threads=2)
_FAULTS = ("leaked_pages", "overlaps", "wrong_sums", "lost_rows", "corrupt", "dead_holds")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def tier(tmp_path: Path, metrics: Metrics) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path / "n", 4 * _MIB, _OPTIONS, metrics=metrics)
    yield tier
    report = tier.check(verify=True)
    assert not any(report[fault] for fault in _FAULTS), report
    tier.close()


def _prepared(tier: NvmeTier) -> None:
    while tier.check()["unprepared_pages"] or tier.check()["preparing_pages"]:
        time.sleep(0.01)


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_a_lost_segment_takes_its_entries_at_the_first_miss(tmp_path: Path, metrics: Metrics, damage: str) -> None:
    first = NvmeTier(tmp_path / "n", 4 * _MIB, _OPTIONS)
    chains = [chain_refs(16, seed=seed) for seed in range(12)]
    for refs in chains:
        put(first, refs, _SIZE)
    first.close()
    segment = tmp_path / "n" / "seg-00001.kv"
    if damage == "removed":
        segment.unlink()
    else:
        os.truncate(segment, 0)
    tier = NvmeTier(tmp_path / "n", 4 * _MIB, _OPTIONS, metrics=metrics)
    with tier._index.read() as ledger:
        lost = {
            key
            for key, record in ledger.records()
            if any(256 < part.end and part.page < 512 for part in record.extents)
        }
        blocks = ledger.blocks
    assert lost
    statuses = [status for refs in chains for status, _ in load(tier, [ref.key for ref in refs])]
    assert Status.CORRUPT not in statuses
    assert tier.stats()["blocks"] == blocks - len(lost)
    assert metrics.value("evicted_blocks_total", tier="nvme", reason="segment_lost") == len(lost)
    for refs in chains:
        there = [ref for ref in refs if ref.key not in lost]
        assert all(load(tier, [ref.key]) == [(Status.OK, bytes(content(ref, _SIZE)))] for ref in there)
        put(tier, refs, _SIZE)
        assert [data for _, data in load(tier, [ref.key for ref in refs])] == [content(ref, _SIZE) for ref in refs]
    report = tier.check(verify=True)
    assert not any(report[fault] for fault in _FAULTS), report
    tier.close()


class _HungDisk:
    """Reads or writes that do not return before `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        real = getattr(os, call)

        def hung(*arguments: object) -> object:
            self.begun.release()
            assert self.go.wait(30)
            return real(*arguments)

        monkeypatch.setattr("kvtier.native.vectored._compiled", None)
        monkeypatch.setattr(os, call, hung)


def test_a_hung_disk_blocks_no_look_up_and_no_deadline(
    tier: NvmeTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = chain_refs(40)
    put(tier, refs, _SIZE)
    _prepared(tier)
    keys = [ref.key for ref in refs]
    handles = tier.acquire(keys, "reader").wait(30).handles
    buffers = [memoryview(bytearray(_SIZE)) for _ in handles]
    items = list(zip(handles, buffers, strict=True))
    with monkeypatch.context() as patched:
        disk = _HungDisk(patched, "preadv")
        stuck = [tier.read(items[at : at + 1]) for at in range(2)]  # both workers
        for _ in stuck:
            assert disk.begun.acquire(timeout=30)
        late = tier.read(items[2:], time.monotonic() + 0.05)
        assert late.wait(30).statuses == (Status.TIMEOUT,) * 38
        assert tier.contains(keys).wait(30).statuses == (Status.OK,) * 40
        tier.release(tier.acquire(keys, "other").wait(30).handles)
        assert all(ticket.done is None for ticket in stuck)
        reserved = tier.reserve(chain_refs(1, seed=5), [_SIZE], ["raw"], "writer")
        tier.abort([handle for handle in reserved if isinstance(handle, NvmeHandle)])
        disk.go.set()
        assert [ticket.wait(30).statuses for ticket in stuck] == [(Status.OK,)] * 2
    assert [bytes(buffer) for buffer in buffers[:2]] == [bytes(content(ref, _SIZE)) for ref in refs[:2]]
    tier.release(handles)


def test_writes_that_did_not_begin_in_time_can_be_written_later(
    tier: NvmeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = chain_refs(6)
    _prepared(tier)
    reserved = tier.reserve(refs, [_SIZE] * 6, ["raw"] * 6, "writer")
    handles = [handle for handle in reserved if isinstance(handle, NvmeHandle)]
    items = [(handle, content(handle.ref, _SIZE)) for handle in handles]
    with monkeypatch.context() as patched:
        disk = _HungDisk(patched, "pwritev")
        stuck = [tier.write(items[at : at + 1]) for at in range(2)]
        for _ in stuck:
            assert disk.begun.acquire(timeout=30)
        assert tier.write(items[2:], time.monotonic() + 0.05).wait(30).statuses == (Status.TIMEOUT,) * 4
        disk.go.set()
        assert [ticket.wait(30).statuses for ticket in stuck] == [(Status.OK,)] * 2
    assert tier.write(items[2:]).wait(30).statuses == (Status.OK,) * 4
    tier.commit(handles)
    assert run_length(tier, refs) == 6


def test_a_deadline_in_the_midst_of_a_share_costs_nothing(tier: NvmeTier, metrics: Metrics) -> None:
    # Every second block of a chain: no two of them move in one run.
    refs = chain_refs(12)
    _prepared(tier)
    reserved = tier.reserve(refs, [_SIZE] * 12, ["raw"] * 12, "writer")
    handles = [handle for handle in reserved if isinstance(handle, NvmeHandle)]
    items = [(handle, content(handle.ref, _SIZE)) for handle in handles]

    def patched(begun: int) -> pytest.MonkeyPatch:
        patch = pytest.MonkeyPatch()
        patch.setattr("kvtier.native.vectored._compiled", None)
        left = iter([1.0] * begun)
        patch.setattr("kvtier.native.vectored._seconds", lambda _: next(left, 0.0))
        return patch

    patch = patched(2)
    late = tier.write(items[::2], time.monotonic() + 60).wait(30).statuses
    patch.undo()
    assert late == (Status.OK,) * 2 + (Status.TIMEOUT,) * 4
    with pytest.raises(LeaseError, match="never completely written"):
        tier.commit(handles)
    assert tier.write([*items[4::2], *items[1::2]]).wait(30).statuses == (Status.OK,) * 10
    tier.commit(handles)
    leased = tier.acquire([ref.key for ref in refs], "reader").wait(30).handles
    reads = [(handle, memoryview(bytearray(_SIZE))) for handle in leased[::2]]
    patch = patched(3)
    late = tier.read(reads, time.monotonic() + 60).wait(30).statuses
    patch.undo()
    assert late == (Status.OK,) * 3 + (Status.TIMEOUT,) * 3
    assert tier.read(reads).wait(30).statuses == (Status.OK,) * 6
    assert [bytes(data) for _, data in reads] == [bytes(content(ref, _SIZE)) for ref in refs[::2]]
    tier.release(leased)
    assert metrics.value("errors_total", tier="nvme", operation="read") == 0


def test_durable_commits_that_wait_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = NvmeTier(tmp_path / "n", 4 * _MIB, NvmeOptions(min_free_bytes=0, durable=True))
    _prepared(tier)
    chains = [chain_refs(2, seed=seed) for seed in range(6)]
    held = []
    for refs in chains:
        reserved = tier.reserve(refs, [_SIZE] * 2, ["raw"] * 2, "writer")
        handles = [handle for handle in reserved if isinstance(handle, NvmeHandle)]
        tier.write([(handle, content(handle.ref, _SIZE)) for handle in handles]).wait(30)
        held.append(handles)
    disk = _HungDisk(monkeypatch, "fdatasync")
    threads = [threading.Thread(target=tier.commit, args=(handles,)) for handles in held]
    threads[0].start()
    assert disk.begun.acquire(timeout=30)
    for thread in threads[1:]:
        thread.start()
    while len(tier._writer._group._queue) < 5:
        time.sleep(0.001)
    syncs = []
    monkeypatch.setattr(tier._segments, "sync", lambda: syncs.append(None))
    disk.go.set()
    for thread in threads:
        thread.join()
    assert len(syncs) == 1  # the five that waited
    assert all(run_length(tier, refs) == 2 for refs in chains)
    monkeypatch.undo()
    tier.close()


def test_a_failing_sync_drops_the_commit_and_keeps_the_rest(
    tmp_path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = NvmeTier(tmp_path / "n", 4 * _MIB, NvmeOptions(min_free_bytes=0, durable=True), metrics=metrics)
    kept, lost = chain_refs(3, seed=1), chain_refs(3, seed=2)
    put(tier, kept, _SIZE)

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", broken)
        put(tier, lost, _SIZE)
    assert (run_length(tier, kept), run_length(tier, lost)) == (3, 0)
    assert metrics.value("dropped_blocks_total", tier="nvme", reason="commit_failed") == 3
    put(tier, lost, _SIZE)
    assert run_length(tier, lost) == 3
    assert tier.stats()["bytes"] == 6 * _SIZE
    tier.close()


def test_a_lease_from_before_a_segment_was_lost_costs_nothing_that_was_written_since(
    tmp_path: Path, metrics: Metrics
) -> None:
    tier = NvmeTier(tmp_path / "n", _MIB, _OPTIONS, metrics=metrics)
    lost, new = chain_refs(8, seed=1), chain_refs(8, seed=2)
    put(tier, lost, _SIZE)
    leased = [handle for ref in lost for handle in tier.acquire([ref.key], "reader").wait().handles]
    os.truncate(tmp_path / "n" / "seg-00000.kv", 0)
    first, *others = [(handle, memoryview(bytearray(_SIZE))) for handle in leased]
    assert tier.read([first]).wait(30).statuses == (Status.MISS,)
    put(tier, new, _SIZE)
    scans = []
    tier._space.drop_between, drop = lambda *pages: scans.append(pages) or drop(*pages), tier._space.drop_between
    assert set(tier.read(others).wait(30).statuses) == {Status.MISS}
    assert scans == []
    assert run_length(tier, new) == 8
    tier.release(leased)
    tier.close()


def test_one_bad_sector_costs_one_block(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = chain_refs(16, seed=1)
    put(tier, refs, _SIZE)
    handles = tier.acquire([ref.key for ref in refs], "reader").wait().handles
    bad = handles[-1].extents[0].page * 4096
    real = os.preadv

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(buffer.nbytes for buffer in buffers):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr("kvtier.native.vectored._compiled", None)
    monkeypatch.setattr(os, "preadv", read)
    buffers = [memoryview(bytearray(_SIZE)) for _ in handles]
    statuses = tier.read(list(zip(handles, buffers, strict=True))).wait(30).statuses
    assert statuses == (Status.OK,) * 15 + (Status.MISS,)
    assert [bytes(buffer) for buffer in buffers[:15]] == [bytes(content(ref, _SIZE)) for ref in refs[:15]]
    tier.release(handles)
    assert run_length(tier, refs) == 15


def test_who_finds_nothing_to_synchronise_waits_for_who_is_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = NvmeTier(tmp_path / "n", 4 * _MIB, NvmeOptions(min_free_bytes=0, durable=True))
    _prepared(tier)
    put(tier, chain_refs(2, seed=1), _SIZE)
    tier._segments.sync()
    tier._segments._dirty.add(0)
    disk = _HungDisk(monkeypatch, "fdatasync")
    syncing = [threading.Thread(target=tier._segments.sync) for _ in range(2)]
    syncing[0].start()
    assert disk.begun.acquire(timeout=30)
    syncing[1].start()
    syncing[1].join(0.2)
    assert syncing[1].is_alive()
    disk.go.set()
    for thread in syncing:
        thread.join(30)
        assert not thread.is_alive()
    monkeypatch.undo()
    tier.close()


def test_bytes_are_due_for_a_sync_once_they_are_there(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    _prepared(tier)
    tier._segments.sync()
    due = []
    real = os.pwritev

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        tier._segments.sync()
        done = real(fd, buffers, offset)
        due.append(set(tier._segments._dirty))
        return done

    monkeypatch.setattr("kvtier.native.vectored._compiled", None)
    monkeypatch.setattr(os, "pwritev", write)
    refs = chain_refs(2, seed=1)
    reserved = tier.reserve(refs, [_SIZE] * 2, ["raw"] * 2, "writer")
    tier.write([(handle, content(handle.ref, _SIZE)) for handle in reserved]).wait(30)
    assert due
    assert tier._segments._dirty == {0}
    monkeypatch.undo()
    tier.commit(reserved)


def test_a_child_of_fork_keeps_no_lock_alive(tmp_path: Path) -> None:
    """The parent dies; its child lives on, with all that it inherited. What the parent held is reclaimed."""
    program = """if True:
        import os, sys, time
        from pathlib import Path
        from kvtier.errors import TierUnavailable
        from kvtier.nvme import NvmeOptions, NvmeTier
        from kvtier.testing.blocks import chain_refs, put
        path, options = Path(sys.argv[1]), NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0)
        tier = NvmeTier(path, 4 << 20, options)
        put(tier, chain_refs(4), 16384)
        tier.reserve(chain_refs(8, seed=2), [16384] * 8, ["raw"] * 8, "writer")
        if os.fork() == 0:
            try:
                NvmeTier(path, 4 << 20, options)
            except TierUnavailable as error:
                print(os.getpid(), error, flush=True)
            tier.close()
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "n")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, said = parent.stdout.readline().split(maxsplit=1)
    try:
        assert "spawned, not forked" in said
        other = NvmeTier(tmp_path / "n", 4 * _MIB, _OPTIONS)
        assert other.check()["dead_holds"] == 0
        assert other.stats()["bytes"] > 4 * _SIZE  # the parent lives and holds what it reserved
        parent.kill()
        parent.wait()
        assert other.check()["dead_holds"] > 0
        other._space.reclaim()
        assert other.stats()["bytes"] == 4 * _SIZE
        other.close()
    finally:
        parent.kill()
        os.kill(int(child), 9)
        parent.communicate()


def test_a_process_that_dies_in_the_midst_of_a_look_up_does_not_make_the_index_grow(tmp_path: Path) -> None:
    """Its snapshot would keep every page that is freed from being used again."""
    program = """if True:
        import os, signal, sys
        from pathlib import Path
        from kvtier.nvme import NvmeOptions, NvmeTier
        tier = NvmeTier(Path(sys.argv[1]), 4 << 20, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0))
        with tier._index.read():
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with contextlib.closing(NvmeTier(tmp_path / "n", 4 * _MIB, _OPTIONS)) as tier:
        put(tier, chain_refs(24), _SIZE)
        died = subprocess.run([sys.executable, "-c", program, str(tmp_path / "n")], check=False)
        assert died.returncode == -signal.SIGKILL
        until(lambda: "no active readers" in tier._index._env.readers())
        for seed in range(100):
            put(tier, chain_refs(24, seed=seed), 4096)
        before = tier.stats()["index_bytes"]
        for seed in range(300):
            put(tier, chain_refs(24, seed=seed), 4096)
        assert tier.stats()["index_bytes"] <= 2 * before
