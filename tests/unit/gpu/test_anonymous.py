"""Anonymous memory: pages are there once they were touched, what is in them stays, and nobody touches what is gone."""

import ctypes
import mmap
import threading
import weakref

import numpy as np
import pytest

from kvtier.gpu import anonymous as module
from kvtier.gpu.anonymous import anonymous, touch

_MIB = 1 << 20


def _resident(memory: mmap.mmap) -> int:
    """Pages of the mapping that are in memory."""
    array = np.frombuffer(memory, np.uint8)
    pages = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    args = (ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(len(memory)), ctypes.c_void_p(pages.ctypes.data))
    assert libc.mincore(*args) == 0
    return int((pages & 1).sum())


def _small(memory: mmap.mmap) -> mmap.mmap:
    """In pages of the usual size, so that they can be counted."""
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


@pytest.fixture(autouse=True)
def _populates() -> None:
    memory = _small(anonymous(_MIB))
    touch(memory, _MIB).join()
    if not _resident(memory):
        pytest.skip("this kernel makes no pages ahead of their use (Linux >= 5.14 does)")


def test_memory_that_nobody_touched_takes_no_pages() -> None:
    assert _resident(_small(anonymous(8 * _MIB))) == 0


@pytest.mark.parametrize("nbytes", [_MIB, 3 * _MIB, 40 * _MIB, 64 * _MIB])
def test_the_leading_bytes_are_there_and_no_others(nbytes: int) -> None:
    memory = _small(anonymous(40 * _MIB))
    touch(memory, nbytes).join()
    assert _resident(memory) == min(nbytes, 40 * _MIB) // mmap.PAGESIZE


def test_what_is_in_the_memory_stays() -> None:
    memory = anonymous(4 * _MIB + 100)
    memory[_MIB : _MIB + 5] = b"block"
    touch(memory, len(memory)).join()
    assert memory[_MIB : _MIB + 5] == b"block"
    assert memory[:_MIB] == bytes(_MIB)


def test_memory_that_nobody_has_any_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, let_go = [], threading.Event()
    memory = anonymous(4 * _MIB)
    gone = weakref.ref(memory)

    class Libc:
        def madvise(self, address: int, nbytes: int, _advice: int) -> int:
            calls.append(nbytes)
            assert let_go.wait(10)
            return 0

    monkeypatch.setattr(module, "_libc", Libc())
    monkeypatch.setattr(module, "_CHUNK_BYTES", _MIB)
    thread = touch(memory, 4 * _MIB)
    del memory
    let_go.set()
    thread.join()
    assert calls == [_MIB]
    assert gone() is None
