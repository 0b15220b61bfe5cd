"""Many reads and writes in one call: equal to the file's own content, and errors where the system says so."""

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from patience import until

from kvtier.native import vectored
from kvtier.native.vectored import ENDED, FileRun, addresses, move


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
