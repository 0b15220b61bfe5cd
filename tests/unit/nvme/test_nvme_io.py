"""Bytes between callers' buffers and segment files, against the files' own content."""

import errno
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvtier.native.checksum import HEAD_BYTES
from kvtier.nvme.batch import Batch, Deadlines
from kvtier.nvme.extents import PAGE, Extent, pages_for
from kvtier.nvme.io import BlockIO, Transfer, transfers
from kvtier.nvme.segments import Late, Segments, aligned_buffer, takes_direct_io
from kvtier.tiers import Status

_FILE_PAGES = 64


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def segments(request: pytest.FixtureRequest, tmp_path: Path) -> Segments:
    if request.param and not takes_direct_io(tmp_path):
        pytest.skip("no O_DIRECT here")
    segments = Segments(tmp_path, _FILE_PAGES, direct=request.param)
    segments.allocate(Extent(0, 4 * _FILE_PAGES))
    return segments


def _buffer(nbytes: int, offset: int) -> np.ndarray:
    return aligned_buffer(pages_for(nbytes + offset) * PAGE + PAGE)[offset : offset + nbytes]


def _transfer(extents: tuple[Extent, ...], nbytes: int, data: np.ndarray) -> Transfer:
    return transfers([extents], [nbytes], [data.data])[0]


def _heads(items: Sequence[Transfer]) -> list[bytes]:
    return [bytes([at]) * HEAD_BYTES for at in range(len(items))]


def _read(blocks: BlockIO, items: Sequence[Transfer]) -> list[OSError | None]:
    """What was wrong with each; the checksum of the others is that of what the memory holds now."""
    heads = _heads(items)
    errors: list[OSError | None] = []
    for item, head, found in zip(items, heads, blocks.read(items, heads), strict=True):
        right = xxhash.xxh3_128(head + bytes(item.data[: item.nbytes])).digest()
        assert isinstance(found, OSError) or found == right
        errors.append(found if isinstance(found, OSError) else None)
    return errors


def _on_disk(directory: Path) -> bytes:
    return b"".join((directory / f"seg-{number:05}.kv").read_bytes() for number in range(4))


def test_takes_direct_io_leaves_nothing_behind(tmp_path: Path) -> None:
    takes_direct_io(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("code", "taken"), [(errno.EINVAL, False), (errno.ENOSPC, True), (errno.EDQUOT, True)])
def test_a_full_disk_is_no_reason_for_buffered_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, taken: bool
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", refuse)
    assert takes_direct_io(tmp_path) is taken
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("offset", [0, 1, 512])
@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 77])
def test_any_length_and_alignment(segments: Segments, tmp_path: Path, nbytes: int, offset: int) -> None:
    blocks = BlockIO(segments, 1, "t")
    source = _buffer(nbytes, offset)
    source[:] = np.frombuffer(random.Random(nbytes).randbytes(nbytes), np.uint8)
    extents = (Extent(_FILE_PAGES - 1, pages_for(nbytes)),)  # crosses into the next file
    assert blocks.write([_transfer(extents, nbytes, source)]) == [None]
    stored = _on_disk(tmp_path)[(_FILE_PAGES - 1) * PAGE :][: pages_for(nbytes) * PAGE]
    assert stored == source.tobytes() + bytes(len(stored) - nbytes)
    target = _buffer(nbytes, 4096 - offset)
    assert _read(blocks, [_transfer(extents, nbytes, target)]) == [None]
    assert target.tobytes() == source.tobytes()


def test_random_scattered_batches(segments: Segments) -> None:
    dice = random.Random(1)
    blocks = BlockIO(segments, 2, "t")
    for _ in range(20):
        pages = list(range(4 * _FILE_PAGES))
        items: list[Transfer] = []
        while len(pages) > 24:
            extents = []
            for _ in range(dice.randint(1, 3)):
                count = dice.randint(1, 5)
                extents.append(Extent(pages[0], count))
                del pages[: count + dice.randint(0, 1)]
            nbytes = sum(extent.pages for extent in extents) * PAGE - dice.choice([0, 1, 100, PAGE - 1])
            data = _buffer(nbytes, dice.choice([0, 0, 64]))
            data[:] = np.frombuffer(dice.randbytes(nbytes), np.uint8)
            items.append(_transfer(tuple(extents), nbytes, data))
        dice.shuffle(items)
        assert not any(blocks.write(items))
        copies = [_transfer(item.extents, item.nbytes, _buffer(item.nbytes, dice.choice([0, 8]))) for item in items]
        shares = blocks.shares(copies)
        assert sorted(at for share in shares for at in share) == list(range(len(copies)))
        for share in shares:
            assert not any(_read(blocks, [copies[at] for at in share]))
        assert [copy.data.tobytes() for copy in copies] == [item.data.tobytes() for item in items]


def test_a_contiguous_run_is_one_call(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr("kvtier.native.vectored._compiled", None)
    monkeypatch.setattr(os, "preadv", counting)
    items = [_transfer((Extent(4 * at, 4),), 4 * PAGE, _buffer(4 * PAGE, 0)) for at in range(16)]
    assert not any(_read(BlockIO(segments, 1, "t"), items))
    assert calls == [16]


def test_short_transfers_go_on(segments: Segments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr("kvtier.native.vectored._compiled", None)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:PAGE]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: pwritev(fd, [buffers[0][:PAGE]], offset))
    source, target = _buffer(5 * PAGE, 0), _buffer(5 * PAGE, 0)
    source[:] = np.arange(5 * PAGE) % 251
    blocks = BlockIO(segments, 1, "t")
    assert blocks.write([_transfer((Extent(2, 5),), 5 * PAGE, source)]) == [None]
    assert _read(blocks, [_transfer((Extent(2, 5),), 5 * PAGE, target)]) == [None]
    assert target.tobytes() == source.tobytes() == _on_disk(tmp_path)[2 * PAGE : 7 * PAGE]


def test_an_error_hits_only_what_it_touched(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 8 * PAGE:
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr("kvtier.native.vectored._compiled", None)
    monkeypatch.setattr(os, "preadv", broken)
    items = [_transfer((Extent(8 * at, 1),), PAGE, _buffer(PAGE, 0)) for at in range(3)]
    errors = _read(BlockIO(segments, 1, "t"), items)
    assert [error is None for error in errors] == [True, False, True]


@pytest.mark.parametrize("offset", [0, 8], ids=["aligned", "bounced"])
def test_what_is_late_does_not_move(segments: Segments, tmp_path: Path, offset: int) -> None:
    blocks = BlockIO(segments, 1, "t")
    items = [_transfer((Extent(8 * at, 2),), 2 * PAGE - at, _buffer(2 * PAGE - at, offset)) for at in range(3)]
    before = _on_disk(tmp_path)
    for item in items:
        item.data[:] = b"\x05" * item.nbytes
    assert [type(error) for error in blocks.write(items, time.monotonic())] == [Late] * 3
    assert [type(found) for found in blocks.read(items, _heads(items), time.monotonic())] == [Late] * 3
    assert _on_disk(tmp_path) == before
    assert all(bytes(item.data) == b"\x05" * item.nbytes for item in items)
    assert blocks.write(items, time.monotonic() + 60) == [None] * 3


def test_what_began_in_time_is_read(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [_transfer((Extent(8 * at, 1),), PAGE, _buffer(PAGE, 0)) for at in range(3)]
    two = _transfer((Extent(4, 1), Extent(30, 1)), 2 * PAGE, _buffer(2 * PAGE, 0))
    left = iter([2.0, 1.0])
    monkeypatch.setattr("kvtier.native.vectored._compiled", None)
    monkeypatch.setattr("kvtier.native.vectored._seconds", lambda _: next(left, 0.0))
    found = BlockIO(segments, 1, "t").read([*items, two], _heads([*items, two]), time.monotonic() + 60)
    assert [type(one) for one in found] == [bytes, Late, Late, Late]


def test_a_share_that_needs_much_bounce_memory_moves_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = Segments(tmp_path, 4096, direct=takes_direct_io(tmp_path))
    segments.allocate(Extent(0, 4096))
    blocks = BlockIO(segments, 1, "t")
    largest: list[int] = []
    bounce = blocks._bounce
    monkeypatch.setattr(blocks, "_bounce", lambda nbytes: largest.append(nbytes) or bounce(nbytes))
    sources = [_buffer(300 * PAGE + 5, 8) for _ in range(8)]
    for at, source in enumerate(sources):
        source[:] = at + 1
    items = [_transfer((Extent(400 * at, 301),), 300 * PAGE + 5, source) for at, source in enumerate(sources)]
    assert blocks.write(items) == [None] * 8
    copies = [
        item._replace(data=copy.data, address=copy.ctypes.data) for item in items for copy in [_buffer(item.nbytes, 16)]
    ]
    assert _read(blocks, copies) == [None] * 8
    assert all(bytes(copy.data) == bytes(item.data) for copy, item in zip(copies, items, strict=True))
    assert max(largest) <= 4 << 20 if segments.direct else max(largest) <= 8 * PAGE


def test_a_file_that_ends_early_is_an_error(segments: Segments, tmp_path: Path) -> None:
    os.truncate(tmp_path / "seg-00000.kv", PAGE)
    error = _read(BlockIO(segments, 1, "t"), [_transfer((Extent(0, 2),), 2 * PAGE, _buffer(2 * PAGE, 0))])[0]
    assert error is not None
    assert "ends at byte 4096" in str(error)


def test_cut_gives_space_back(segments: Segments, tmp_path: Path) -> None:
    segments.cut(_FILE_PAGES + 3)
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {
        "seg-00000.kv": _FILE_PAGES * PAGE,
        "seg-00001.kv": 3 * PAGE,
    }


def test_what_was_done_long_before_its_deadline_is_forgotten(segments: Segments) -> None:
    blocks, deadlines = BlockIO(segments, 1, "t"), Deadlines("t")

    def batch(ended: list[Status]) -> Batch:
        items = [_transfer((Extent(0, 1),), 1, _buffer(1, 0))]
        return Batch(blocks, items, None, lambda _: [Status.OK], ended.extend, Status.MISS)

    late: list[Status] = []
    kept = batch(late)
    kept._left, kept._waiting = 1, {0}
    deadlines.watch(kept, time.monotonic() + 0.5)
    for _ in range(1000):
        deadlines.watch(batch([]), time.monotonic() + 1e6)
    assert len(deadlines._heap) < 100
    until = time.monotonic() + 10
    while not late and time.monotonic() < until:
        time.sleep(0.005)
    deadlines.close()
    assert late == [Status.TIMEOUT]
