"""Many reads and writes in one call: equal to the file's own content, and errors where the system says so."""

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from patience import until

from kvtier.native import vectored
from kvtier.native.checksum import HEAD_BYTES
from kvtier.native.vectored import ENDED, LATE, BlockRun, FileRun, Landing, addresses, move, read_checksums


@pytest.fixture(params=["compiled", "portable"], autouse=True)
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "portable":
        monkeypatch.setattr(vectored, "_compiled", None)
    elif not vectored.available():
        pytest.skip("the extension was not built")


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def _cut(data: bytearray, dice: random.Random) -> list[memoryview]:
    buffers, at = [], 0
    while at < len(data):
        end = at + dice.randrange(1, 40)
        buffers.append(memoryview(data)[at:end])
        at = end
    return buffers


def test_writes_and_reads_runs(fd: int, tmp_path: Path) -> None:
    dice = random.Random(1)
    pieces = [bytearray(dice.randbytes(count)) for count in (1, 5000, 100_000, 0)]  # more buffers than one call takes
    starts = [7, 100, 10_000, 3]
    runs: list[FileRun] = [(fd, start, _cut(piece, dice)) for start, piece in zip(starts, pieces, strict=True)]
    assert len(runs[2][2]) > os.sysconf("SC_IOV_MAX")
    assert move(runs, writes=True) == [0] * 4
    stored = (tmp_path / "file").read_bytes()
    for start, piece in zip(starts, pieces, strict=True):
        assert stored[start : start + len(piece)] == piece
    copies = [bytearray(len(piece)) for piece in pieces]
    assert (
        move([(fd, start, _cut(copy, dice)) for start, copy in zip(starts, copies, strict=True)], writes=False)
        == [0] * 4
    )
    assert copies == pieces
    assert move([], writes=False) == []


def test_a_run_that_fails_stops_no_other(fd: int) -> None:
    os.pwrite(fd, bytes(range(100)), 0)
    outs = [bytearray(10) for _ in range(4)]
    closed = os.dup(fd)
    os.close(closed)
    places = [(fd, 0), (closed, 0), (fd, 95), (fd, 50)]
    runs: list[FileRun] = [(*place, [memoryview(out)]) for place, out in zip(places, outs, strict=True)]
    assert move(runs, writes=False) == [0, errno.EBADF, ENDED, 0]
    assert [list(outs[0]), list(outs[3])] == [list(range(10)), list(range(50, 60))]


def test_says_what_the_device_says() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        assert move([(full, 0, [memoryview(bytes(10))])], writes=True) == [errno.ENOSPC]
        assert move([(full, 0, [memoryview(bytearray(10))])], writes=False) == [errno.EBADF]
    finally:
        os.close(full)


def test_takes_arrays_and_tells_addresses(fd: int) -> None:
    array = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert move([(fd, 0, [array])], writes=True) == [0]
    assert os.pread(fd, 100, 0) == array.tobytes()
    data = memoryview(bytes(100))
    first, fifth, known = addresses([data, data[5:], array])
    assert (fifth - first, known) == (5, array.ctypes.data)


def test_no_read_into_what_is_read_only(fd: int) -> None:
    os.pwrite(fd, bytes(10), 0)
    with pytest.raises((BufferError, TypeError)):
        move([(fd, 0, [memoryview(bytes(10))])], writes=False)


def test_more_runs_than_the_kernel_takes_at_once(fd: int) -> None:
    dice = random.Random(3)
    data = dice.randbytes(200_000)
    os.pwrite(fd, data, 0)
    starts = [dice.randrange(0, 201_000) for _ in range(300)]
    outs = [bytearray(dice.randrange(1, 900)) for _ in starts]
    runs: list[FileRun] = [(fd, start, [memoryview(out)]) for start, out in zip(starts, outs, strict=True)]
    results = move(runs, writes=False)
    for start, out, result in zip(starts, outs, results, strict=True):
        assert result == (0 if start + len(out) <= len(data) else ENDED)
        assert result == ENDED or out == data[start : start + len(out)]


def _sum(head: bytes, data: bytes) -> bytes:
    return xxhash.xxh3_128(head + data).digest()


@pytest.mark.parametrize("shortest", [1, 200])
def test_checksums_what_it_reads(fd: int, shortest: int) -> None:
    dice = random.Random(5)
    data = dice.randbytes(400_000)
    os.pwrite(fd, data, 0)
    runs: list[BlockRun] = []
    blocks: list[Landing] = []
    expected: list[bytes] = []
    at = 0
    while at < 300_000:  # more runs than the kernel takes at once; a block's parts lie in one to three
        size = dice.randrange(shortest, 3000)
        start = dice.choice([0, size, dice.randrange(size + 1)])
        memory, tail = bytearray(size), bytearray(size - start)
        blocks.append(Landing(dice.randbytes(HEAD_BYTES), memoryview(memory), size, start, memoryview(tail)))
        expected.append(data[at : at + size])
        number = len(blocks) - 1
        parts = [memoryview(memory)[:start], memoryview(tail)]
        cut = dice.randrange(start + 1)
        runs += [(fd, at, [parts[0][:cut]], [number])] if cut else []
        runs += [(fd, at + cut, [parts[0][cut:], parts[1]], [number, number])] if cut < size else []
        at += size
    following = Landing(bytes(HEAD_BYTES), memoryview(bytearray(50_000)), 50_000)
    pieces = [following.data[first : first + 1000] for first in range(0, 50_000, 1000)]
    runs += [(fd, at + 1000 * part, [piece], [len(blocks)]) for part, piece in enumerate(pieces)]
    blocks.append(following)
    expected.append(data[at : at + 50_000])
    dice.shuffle(runs)
    results, checksums = read_checksums(runs, blocks)
    assert results == [0] * len(runs)
    assert [bytes(block.data) for block in blocks] == expected
    assert checksums == [_sum(block.head, content) for block, content in zip(blocks, expected, strict=True)]


def test_checksums_beside_the_page_cache(tmp_path: Path) -> None:
    dice = random.Random(6)
    page, each, count = 4096, 40, 150
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        pytest.skip("no O_DIRECT here")
    memory = memoryview(mmap.mmap(-1, page * each * count))
    data = dice.randbytes(len(memory))
    memory[:] = data
    assert move([(fd, 0, [memory])], writes=True) == [0]
    memory[:] = bytes(len(memory))
    size = page * each
    places = [memory[at * size : (at + 1) * size] for at in range(count)]  # 24 MB: more than fly at a time
    blocks = [Landing(bytes([at]) * HEAD_BYTES, place, size) for at, place in enumerate(places)]
    runs: list[BlockRun] = [(fd, at * size, [place], [at]) for at, place in enumerate(places)]
    results, checksums = read_checksums(runs, blocks)
    assert results == [0] * count
    assert memory == data
    assert checksums == [_sum(block.head, bytes(block.data)) for block in blocks]
    os.close(fd)


def test_a_block_of_a_run_that_fails_has_no_checksum(fd: int) -> None:
    data = random.Random(7).randbytes(5000)
    os.pwrite(fd, data, 0)
    memory = [memoryview(bytearray(1000)) for _ in range(3)]
    blocks = [Landing(bytes(HEAD_BYTES), place, 1000) for place in memory]
    runs: list[BlockRun] = [
        (fd, 0, [memory[0][:500]], [0]),
        (fd, 4800, [memory[1][:500]], [1]),
        (fd, 500, [memory[0][500:], memory[2]], [0, 2]),
        (fd, 500, [memory[1][500:]], [1]),
    ]
    good = [_sum(bytes(HEAD_BYTES), data[:1000]), b"", _sum(bytes(HEAD_BYTES), data[1000:2000])]
    assert read_checksums(runs, blocks) == ([0, ENDED, 0, 0], good)
    assert read_checksums(runs, blocks, time.monotonic()) == ([LATE] * 4, [b""] * 3)
    assert read_checksums(runs, blocks, time.monotonic() + 60) == ([0, ENDED, 0, 0], good)
    assert read_checksums([], blocks) == ([], [b""] * 3)


def test_what_is_late_does_not_move(fd: int) -> None:
    run: FileRun = (fd, 0, [memoryview(bytearray(b"late"))])
    assert move([run, run], writes=True, deadline=time.monotonic()) == [LATE, LATE]
    assert os.fstat(fd).st_size == 0
    assert move([run, run], writes=True, deadline=time.monotonic() + 60) == [0, 0]
    assert os.pread(fd, 10, 0) == b"late"


def test_threads_move_at_once_and_leave_nothing_in_the_kernel(fd: int) -> None:
    data = random.Random(4).randbytes(64 << 10)
    os.pwrite(fd, data, 0)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            outs = [bytearray(1000) for _ in range(20)]
            starts = [1000 * ((at * 7 + number) % 60) for at in range(20)]
            runs: list[FileRun] = [(fd, start, [memoryview(out)]) for start, out in zip(starts, outs, strict=True)]
            good = move(runs, writes=False) == [0] * 20
            if not good or any(out != data[start : start + 1000] for start, out in zip(starts, outs, strict=True)):
                wrong.append(number)

    before = _queues()
    for _ in range(5):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    # A thread's queue ends with it, a little after it is joined.
    until(lambda: _queues() <= before)


def _queues() -> int:
    """Kernel AIO queues of this process: each is a mapping of its own."""
    return Path("/proc/self/maps").read_text().count("/[aio]")


def test_a_child_of_fork_moves_too(fd: int) -> None:
    os.pwrite(fd, b"abcdef", 0)
    outs = [bytearray(2) for _ in range(3)]
    runs: list[FileRun] = [(fd, 2 * at, [memoryview(out)]) for at, out in enumerate(outs)]
    assert move(runs, writes=False) == [0, 0, 0]  # the parent has a queue, which is not the child's
    child = os.fork()
    if not child:
        for out in outs:
            out[:] = b"--"
        os._exit(0 if move(runs, writes=False) == [0, 0, 0] and b"".join(outs) == b"abcdef" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
