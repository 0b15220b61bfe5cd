"""The NVMe tier beyond the public suite: placement, eviction, faults of the disk."""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvtier.errors import FormatMismatch, LeaseError, TierUnavailable
from kvtier.hints import Hint
from kvtier.metrics import Metrics
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.nvme.holds import NvmeHandle
from kvtier.nvme.index import Index
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import BlockRef, Exists, Full, Handle, Status

_MIB = 1 << 20
_SIZE = 16384
_FAULTS = ("leaked_pages", "overlaps", "wrong_sums", "lost_rows", "corrupt", "dead_holds")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def tier(tmp_path: Path, metrics: Metrics) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path / "n", 2 * _MIB, NvmeOptions(segment_bytes=_MIB, min_free_bytes=0), metrics=metrics)
    yield tier
    if not tier._holds.closed:
        report = tier.check(verify=True)
        assert not any(report[fault] for fault in _FAULTS), report
    tier.close()


def _reserve(tier: NvmeTier, refs: list[BlockRef], nbytes: int = _SIZE) -> list[NvmeHandle]:
    results = tier.reserve(refs, [nbytes] * len(refs), ["raw"] * len(refs), "writer")
    handles = [result for result in results if isinstance(result, NvmeHandle)]
    assert len(handles) == len(refs), results
    return handles


def _write(tier: NvmeTier, handles: list[NvmeHandle]) -> tuple[Status, ...]:
    return tier.write([(handle, content(handle.ref, handle.nbytes)) for handle in handles]).wait(30).statuses


def _fail_with(monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def broken(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("kvtier.native.vectored._compiled", None)
    monkeypatch.setattr(os, call, broken)


# ---- placement


def test_a_chain_lies_in_one_run_over_segments(tier: NvmeTier) -> None:
    handles = _reserve(tier, chain_refs(100))
    pages = [handle.page for handle in handles]
    assert pages == list(range(pages[0], pages[0] + 400, 4))
    assert tier.stats()["reservations"] == 100
    assert _write(tier, handles) == (Status.OK,) * 100
    tier.commit(handles)
    assert tier.stats() | {"index_bytes": 0} == {
        "blocks": 100,
        "bytes": 100 * _SIZE,
        "capacity_bytes": 2 * _MIB,
        "free_bytes": 2 * _MIB - 100 * _SIZE,
        "segments": 2,
        "index_bytes": 0,
        "leases": 0,
        "reservations": 0,
    }


def test_scattered_space_is_used_before_anything_is_evicted(tier: NvmeTier) -> None:
    small = [chain_refs(1, seed=seed)[0] for seed in range(512)]
    put(tier, small, 4096)
    tier.remove([ref.key for ref in small[::2]])
    big = chain_refs(60, seed=1000)
    put(tier, big, 3 * 4096)
    assert tier.stats()["blocks"] == 256 + 60
    assert all(status is Status.OK for status, _ in load(tier, [ref.key for ref in big]))


def test_space_too_scattered_for_a_block_is_made_by_eviction(tier: NvmeTier) -> None:
    small = [chain_refs(1, seed=seed)[0] for seed in range(512)]
    put(tier, small, 4096)
    tier.remove([ref.key for ref in small[::2]])
    big = chain_refs(1, seed=1000)
    put(tier, big, 40 * 4096)
    assert load(tier, [big[0].key]) == [(Status.OK, bytes(content(big[0], 40 * 4096)))]


# ---- eviction


def test_an_orphan_goes_before_what_is_older(tier: NvmeTier) -> None:
    old, cut = chain_refs(30, seed=1), chain_refs(30, seed=2)
    put(tier, old, _SIZE)
    put(tier, cut, _SIZE)
    put(tier, chain_refs(68, seed=3), _SIZE)
    tier.remove([cut[5].key])
    put(tier, chain_refs(20, seed=4), _SIZE)
    assert run_length(tier, old) == 30
    gone = tier.contains([ref.key for ref in cut[11:]]).wait(30).statuses
    assert set(gone) == {Status.MISS}


def test_a_chain_does_not_evict_its_own_ancestors(tier: NvmeTier) -> None:
    chain, other = chain_refs(128, seed=1), chain_refs(64, seed=2)
    put(tier, chain[:64], _SIZE)
    put(tier, other, _SIZE)
    results = put(tier, chain, _SIZE)
    assert all(isinstance(result, Handle | Exists) for result in results)
    assert run_length(tier, chain) == 128
    results = put(tier, chain_refs(200, seed=1), _SIZE)
    assert isinstance(results[128], Full)
    assert run_length(tier, chain) == 128


def test_eviction_is_counted(tier: NvmeTier, metrics: Metrics) -> None:
    for seed in range(4):
        put(tier, chain_refs(64, seed=seed), _SIZE)
    blocks = tier.stats()["blocks"]
    assert metrics.value("evicted_blocks_total", tier="nvme", reason="capacity") == 256 - blocks
    assert metrics.value("occupied_bytes", tier="nvme") == blocks * _SIZE


def test_rows_of_dropped_records_are_reused(tier: NvmeTier) -> None:
    for seed in range(40):
        put(tier, chain_refs(64, seed=seed), _SIZE)
    assert int(tier._recency._header["rows"][0]) <= 128 + 64


# ---- holds


def test_abort_during_a_write_frees_afterwards(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    go, pwritev = threading.Event(), os.pwritev

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert go.wait(30)
        return pwritev(fd, buffers, offset)

    handles = _reserve(tier, chain_refs(2))
    _wait_until_prepared(tier)
    monkeypatch.setattr("kvtier.native.vectored._compiled", None)
    monkeypatch.setattr(os, "pwritev", slow)
    ticket = tier.write([(handle, content(handle.ref, _SIZE)) for handle in handles])
    with pytest.raises(LeaseError, match="never completely written"):
        tier.commit(handles)
    tier.abort(handles)
    assert tier.stats()["bytes"] == 2 * _SIZE
    go.set()
    ticket.wait(30)
    assert tier.stats()["bytes"] == 0


def _wait_until_prepared(tier: NvmeTier) -> None:
    while tier.check()["unprepared_pages"] or tier.check()["preparing_pages"]:
        pass


def test_close_ends_all_holds_and_refuses_the_rest(tier: NvmeTier, tmp_path: Path) -> None:
    refs = chain_refs(4)
    put(tier, refs[:2], _SIZE)
    leased = tier.acquire([ref.key for ref in refs[:2]], "reader").wait(30).handles
    reserved = _reserve(tier, refs[2:])
    tier.remove([refs[0].key])
    tier.close()
    tier.release(leased)
    tier.abort(reserved)
    with pytest.raises(TierUnavailable, match="closed"):
        tier.contains([refs[0].key])
    with pytest.raises(TierUnavailable, match="closed"):
        tier.read([(leased[0], memoryview(bytearray(_SIZE)))])
    again = NvmeTier(tmp_path / "n", 2 * _MIB, NvmeOptions(min_free_bytes=0))
    assert again.stats()["bytes"] == _SIZE
    assert again.check()["reserved_pages"] == 0
    again.close()


def test_bad_arguments_change_nothing(tier: NvmeTier) -> None:
    ref = chain_refs(1)[0]
    for refs, sizes, fmts in (
        ([ref], [0], ["raw"]),
        ([ref], [1], ["f" * 17]),
        ([ref], [1, 2], ["raw"]),
        ([ref._replace(key=b"short")], [1], ["raw"]),
    ):
        with pytest.raises(FormatMismatch):
            tier.reserve(refs, sizes, fmts, "writer")
    handle = _reserve(tier, [ref])[0]
    with pytest.raises(FormatMismatch, match="16384"):
        tier.write([(handle, memoryview(bytes(_SIZE - 1)))])
    tier.abort([handle])
    assert tier.stats()["bytes"] == 0


# ---- the disk fails


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, "no_space_on_device"), (errno.EIO, "io_error")])
def test_a_failed_write_is_full(
    tier: NvmeTier, metrics: Metrics, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    refs = chain_refs(3)
    handles = _reserve(tier, refs)
    with monkeypatch.context() as broken:
        _fail_with(broken, "pwritev", code)
        assert _write(tier, handles) == (Status.FULL,) * 3
    with pytest.raises(LeaseError):
        tier.commit(handles)
    tier.abort(handles)
    assert metrics.value("errors_total", tier="nvme", operation="write") == 3
    assert metrics.value("dropped_blocks_total", tier="nvme", reason=reason) == 3
    put(tier, refs, _SIZE)
    assert run_length(tier, refs) == 3


def test_a_failed_read_is_a_miss_that_heals(tier: NvmeTier, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = chain_refs(3)
    put(tier, refs, _SIZE)
    with monkeypatch.context() as broken:
        _fail_with(broken, "preadv", errno.EIO)
        assert [status for status, _ in load(tier, [ref.key for ref in refs])] == [Status.MISS] * 3
    assert metrics.value("errors_total", tier="nvme", operation="read") == 3
    assert metrics.value("evicted_blocks_total", tier="nvme", reason="read_error") == 3
    assert run_length(tier, refs) == 0  # nobody is promised it again
    put(tier, refs, _SIZE)
    assert [data for _, data in load(tier, [ref.key for ref in refs])] == [content(ref, _SIZE) for ref in refs]


def test_a_read_that_failed_for_want_of_memory_may_be_repeated(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = chain_refs(3)
    put(tier, refs, _SIZE)
    with monkeypatch.context() as broken:
        _fail_with(broken, "preadv", errno.ENOMEM)
        assert [status for status, _ in load(tier, [ref.key for ref in refs])] == [Status.MISS] * 3
    assert [data for _, data in load(tier, [ref.key for ref in refs])] == [content(ref, _SIZE) for ref in refs]


def test_segments_that_cannot_grow_are_full(tmp_path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.nvme.growing._AHEAD_PAGES", 0)
    tier = NvmeTier(tmp_path / "n", 2 * _MIB, NvmeOptions(min_free_bytes=0), metrics=metrics)
    with monkeypatch.context() as broken:
        _fail_with(broken, "posix_fallocate", errno.ENOSPC)
        assert put(tier, chain_refs(2), _SIZE) == [Full("no_space_on_device"), Full("parent_refused")]
    assert metrics.value("dropped_blocks_total", tier="nvme", reason="no_space_on_device") == 1
    assert metrics.value("errors_total", tier="nvme", operation="grow") >= 1
    assert len(_reserve(tier, chain_refs(2))) == 2
    tier.close()


def test_the_floor_stops_growth_but_not_reuse(
    tmp_path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.nvme.growing._AHEAD_PAGES", 0)
    tier = NvmeTier(tmp_path / "n", 8 * _MIB, NvmeOptions(min_free_bytes=_MIB), metrics=metrics)
    put(tier, chain_refs(64, seed=1), _SIZE)
    monkeypatch.setattr("kvtier.nvme.growing.disk_free", lambda where: _MIB)
    put(tier, chain_refs(64, seed=2), _SIZE)
    assert run_length(tier, chain_refs(64, seed=2)) == 64
    assert tier.stats()["blocks"] == 64
    assert sum(file.stat().st_size for file in (tmp_path / "n").glob("seg-*")) == _MIB
    handles = tier.acquire([ref.key for ref in chain_refs(64, seed=2)], "reader").wait(30).handles
    assert put(tier, chain_refs(1, seed=3), _SIZE) == [Full("free_space_floor")]
    assert metrics.value("dropped_blocks_total", tier="nvme", reason="free_space_floor") == 1
    tier.release(handles)
    tier.close()


def test_an_index_without_room_drops_and_leaks_nothing(
    tier: NvmeTier, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = chain_refs(4)
    handles = _reserve(tier, refs)
    _write(tier, handles)
    _wait_until_prepared(tier)
    with monkeypatch.context() as broken:
        broken.setattr(Index, "write", _index_refuses)
        tier.commit(handles)
        # More than the arena holds.
        late = tier.reserve(chain_refs(1, seed=2), [40 * _SIZE], ["raw"], "writer")
        assert late == [Full("index_full")]
    assert metrics.value("dropped_blocks_total", tier="nvme", reason="commit_failed") == 4
    assert run_length(tier, refs) == 0
    put(tier, refs, _SIZE)
    assert tier.stats()["bytes"] == 4 * _SIZE


def _index_refuses(self: Index) -> object:
    with self._translated():
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")


def test_a_block_that_fails_its_checksum_only_once_read(tier: NvmeTier, tmp_path: Path, metrics: Metrics) -> None:
    refs = chain_refs(3)
    handles = _reserve(tier, refs)
    _write(tier, handles)
    tier.commit(handles)
    # Intact bytes of another block: only a checksum bound to the key can tell.
    with (tmp_path / "n" / "seg-00000.kv").open("r+b") as file:
        file.seek(handles[1].page * 4096)
        file.write(content(refs[2], _SIZE))
    assert [status for status, _ in load(tier, [ref.key for ref in refs])] == [Status.OK, Status.CORRUPT, Status.OK]
    assert metrics.value("corrupt_blocks_total", tier="nvme") == 1
    assert run_length(tier, refs) == 1


# ---- the arena


def test_a_batch_costs_one_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = NvmeTier(tmp_path / "n", 24 * _MIB, NvmeOptions(min_free_bytes=0))
    put(tier, chain_refs(4), 4096)
    _wait_until_prepared(tier)
    written: list[None] = []
    write = Index.write

    def counted(index: Index) -> object:
        written.append(None)
        return write(index)

    monkeypatch.setattr(Index, "write", counted)
    arenas = 3 * tier._space._arena_pages // 4  # it is stocked up on the way, too
    for seed in range(1, arenas + 1):
        put(tier, chain_refs(4, seed=seed), 4096)
    assert len(written) == arenas
    tier.close()


def test_what_the_arena_holds_is_not_occupied_and_goes_back(
    tmp_path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.nvme.growing._TIDY_SECONDS", 0.01)
    tier = NvmeTier(tmp_path / "n", 64 * _MIB, NvmeOptions(min_free_bytes=0), metrics=metrics)
    put(tier, chain_refs(4), _SIZE)
    assert tier.stats()["bytes"] == 4 * _SIZE == metrics.value("occupied_bytes", tier="nvme")
    while tier.check()["reserved_pages"]:
        pass
    assert tier.stats()["bytes"] == 4 * _SIZE
    tier.close()


def test_pages_taken_from_a_writer_whose_lock_is_gone_are_not_used(
    tier: NvmeTier, tmp_path: Path, metrics: Metrics
) -> None:
    refs = chain_refs(4)
    handles = _reserve(tier, refs)
    _write(tier, handles)
    tier._space.reclaim_from({tier._opened.directory.writer})  # what others do with a dead writer
    tier.commit(handles)
    assert run_length(tier, refs) == 0
    assert metrics.value("dropped_blocks_total", tier="nvme", reason="commit_failed") == 4
    put(tier, refs, _SIZE)
    assert run_length(tier, refs) == 4


def test_exactness_and_fidelity_decide_what_replaces_what(tier: NvmeTier) -> None:
    lossy = chain_refs(1, exact=False)
    exact = chain_refs(1)
    order = [(lossy, "int4r"), (lossy, "int8"), (lossy, "raw"), (exact, "int4r"), (exact, "int8"), (exact, "raw")]
    for at, (refs, fmt) in enumerate(order):
        for worse_refs, worse in order[:at]:
            assert tier.reserve(worse_refs, [_SIZE], [worse], "w") == [Exists(ready=True)]
        handle = tier.reserve(refs, [_SIZE], [fmt], "w")[0]
        assert isinstance(handle, NvmeHandle), fmt
        assert tier.reserve(refs, [_SIZE], [fmt], "w") == [Exists(ready=False)]
        _write(tier, [handle])
        tier.commit([handle])
        leased = tier.acquire([refs[0].key], "r").wait(30).handles
        assert (leased[0].fmt, leased[0].ref.exact) == (fmt, refs is exact)
        tier.release(leased)
    assert tier.stats()["bytes"] == _SIZE


@pytest.mark.parametrize("first", [0, 1])
def test_the_better_of_two_that_are_committed_together_stays(tier: NvmeTier, first: int) -> None:
    refs = [*chain_refs(1, exact=False), *chain_refs(1)]
    handles = [handle for ref in refs for handle in _reserve(tier, [ref])]
    _write(tier, handles)
    tier.commit([handles[first], handles[1 - first]])
    leased = tier.acquire([refs[0].key], "r", exact=True).wait(30).handles
    assert [handle.page for handle in leased] == [handles[1].page]
    tier.release(leased)
    assert load(tier, [refs[0].key]) == [(Status.OK, content(refs[1], _SIZE))]
    assert (tier.stats()["blocks"], tier.stats()["bytes"]) == (1, _SIZE)


def test_an_owner_that_is_gone_holds_nothing(tier: NvmeTier) -> None:
    refs = chain_refs(6)
    put(tier, refs[:2], _SIZE)
    tier.acquire([ref.key for ref in refs[:2]], "lost").wait(30)
    kept = tier.acquire([refs[0].key], "kept").wait(30).handles
    tier.reserve(refs[2:], [_SIZE] * 4, ["raw"] * 4, "lost")
    tier.release_owner("lost")
    tier.release_owner("nobody")
    stats = tier.stats()
    assert (stats["leases"], stats["reservations"], stats["bytes"]) == (1, 0, 2 * _SIZE)
    tier.release(kept)


def test_hints_order_eviction(tier: NvmeTier) -> None:
    old, dead, late = (chain_refs(32, seed=seed) for seed in range(3))
    put(tier, old, _SIZE)
    handles = tier.reserve(dead, [_SIZE] * 32, ["raw"] * 32, "w", [Hint(reuse="none")] * 32)
    held = [handle for handle in handles if isinstance(handle, NvmeHandle)]
    _write(tier, held)
    tier.commit(held)
    put(tier, late, _SIZE)
    put(tier, chain_refs(40, seed=9), _SIZE)
    assert (run_length(tier, old), run_length(tier, late)) == (32, 32)
    assert run_length(tier, dead) <= 24
    tier.hint([ref.key for ref in late] + [bytes(16)], [Hint(reuse="none")] * 33)
    put(tier, chain_refs(40, seed=10), _SIZE)
    assert run_length(tier, old) == 32
    with pytest.raises(FormatMismatch, match="1 keys, 2 hints"):
        tier.hint([old[0].key], [Hint()] * 2)


# ---- durability


def test_durable_syncs_bytes_before_the_index_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = NvmeTier(tmp_path / "n", 2 * _MIB, NvmeOptions(min_free_bytes=0, durable=True))
    refs, events = chain_refs(2), []
    handles = _reserve(tier, refs)
    _write(tier, handles)
    fdatasync = os.fdatasync

    def watched(fd: int) -> None:
        events.append((str(Path(f"/proc/self/fd/{fd}").readlink()), run_length(tier, refs)))
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", watched)
    tier.commit(handles)
    assert events == [(str(tmp_path / "n" / "seg-00000.kv"), 0)]
    tier.close()


@pytest.mark.parametrize("durable", [False, True])
def test_durable_commits_wait_for_the_page_that_makes_them_count(tmp_path: Path, durable: bool) -> None:
    """LMDB may put that one off to the next commit: a power loss would take the last one back, which was reported."""
    tier = NvmeTier(tmp_path / "n", 2 * _MIB, NvmeOptions(min_free_bytes=0, durable=durable))
    flags = tier._index._env.flags()
    assert (flags["sync"], flags["metasync"]) == (durable, durable)
    tier.close()


def test_flush_that_the_disk_refuses_is_counted_and_not_clean(
    tmp_path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = NvmeTier(tmp_path / "n", 2 * _MIB, NvmeOptions(min_free_bytes=0), metrics=metrics)
    put(tier, chain_refs(2), _SIZE)
    _fail_with(monkeypatch, "fdatasync", errno.EIO)
    tier.flush()
    assert metrics.value("errors_total", tier="nvme", operation="flush") == 1
    tier.close()
    assert '"clean": false' in (tmp_path / "n" / "META.json").read_text()


@pytest.mark.parametrize("refuses", ["open", "pwritev"])
def test_buffered_where_there_is_no_direct_io(
    tmp_path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    real = getattr(os, refuses)

    def einval(first: int | str, *rest: object, **named: object) -> object:
        flags = rest[0] if refuses == "open" else fcntl.fcntl(int(first), fcntl.F_GETFL)
        if int(str(flags)) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(first, *rest, **named)

    monkeypatch.setattr("kvtier.native.vectored._compiled", None)
    monkeypatch.setattr(os, refuses, einval)
    tier = NvmeTier(tmp_path / "n", 2 * _MIB, NvmeOptions(min_free_bytes=0), metrics=metrics)
    refs = chain_refs(5)
    put(tier, refs, 10_000)
    assert [data for _, data in load(tier, [ref.key for ref in refs])] == [content(ref, 10_000) for ref in refs]
    assert metrics.value("fallbacks_total", tier="nvme", what="buffered_io") == 1
    tier.close()


def test_an_infinite_deadline_is_none(tier: NvmeTier) -> None:
    refs = chain_refs(2)
    handles = _reserve(tier, refs)
    data = [(handle, content(handle.ref, _SIZE)) for handle in handles]
    assert set(tier.write(data, float("inf")).wait(30).statuses) == {Status.OK}
    tier.commit(handles)
    leased = tier.acquire([ref.key for ref in refs], "t", float("inf")).wait().handles
    outs = [(handle, memoryview(bytearray(_SIZE))) for handle in leased]
    assert set(tier.read(outs, float("inf")).wait(30).statuses) == {Status.OK}
    tier.release(leased)
    # The thread that ends what is late still lives.
    assert all(thread.is_alive() for thread in threading.enumerate() if "deadlines" in thread.name)
    assert any("deadlines" in thread.name for thread in threading.enumerate())
