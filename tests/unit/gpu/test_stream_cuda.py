"""The CUDA side without a GPU: the driver's calls against a library with its signatures, and the glue around them."""

import contextlib
import ctypes
import itertools
import shutil
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec

import numpy as np
import pytest
import torch
from stream_world import holds, memory, repeat

from kvtier.errors import TierUnavailable
from kvtier.gpu import BlockMove, CopyEngine, Direction
from kvtier.gpu.copies.mover import BOUNCE_BLOCKS
from kvtier.gpu.streams import HostStreams, Runs, address_of, cuda, cupy_streams, make_streams, torch_streams
from kvtier.gpu.streams.driver import Driver, open_driver
from kvtier.gpu.streams.launch import Launcher, Way, choose
from kvtier.gpu.streams.pinning import PinnedMemory

# Signatures and structures as in cuda.h. What it is told it keeps for the test to read.
FAKE_CUDA = r"""
#include <string.h>
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct CUstream_st *CUstream;
typedef struct { int type; int id; } CUmemLocation;
typedef struct {
  int srcAccessOrder; CUmemLocation srcLocHint; CUmemLocation dstLocHint; unsigned int flags;
} CUmemcpyAttributes;
int calls = 0, batches = 0, last_flags = -1;
size_t refuse_at = (size_t)-1;
CUstream last_stream;

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream stream) {
  last_stream = stream;
  if ((size_t)calls == refuse_at) return 700;
  calls++;
  memmove((void *)dst, (void *)src, n);
  return 0;
}
__attribute__((unused)) static CUresult batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
    CUmemcpyAttributes *attrs, size_t *idxs, size_t numAttrs, CUstream stream, size_t *failed) {
  if (numAttrs != 1 || idxs[0] != 0 || attrs[0].srcAccessOrder != 1 || attrs[0].flags != 0 || !stream) return 1;
  batches++;
  last_stream = stream;
  for (size_t i = 0; i < count; i++) {
    if (i == refuse_at) { if (failed) *failed = i; return 700; }
    memmove((void *)dsts[i], (void *)srcs[i], sizes[i]);
  }
  return 0;
}
#ifdef BATCH_V2
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
    CUmemcpyAttributes *attrs, size_t *idxs, size_t numAttrs, CUstream stream) {
  return batch(dsts, srcs, sizes, count, attrs, idxs, numAttrs, stream, 0);
}
#endif
#ifdef BATCH_V1
CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
    CUmemcpyAttributes *attrs, size_t *idxs, size_t numAttrs, size_t *failIdx, CUstream stream) {
  return batch(dsts, srcs, sizes, count, attrs, idxs, numAttrs, stream, failIdx);
}
#endif
CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned int flags) { last_flags = flags; return p && n ? 0 : 1; }
CUresult cuMemHostUnregister(void *p) { return p ? 0 : 1; }
"""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """Makes a libcuda with the batched call of CUDA 13, of 12.8, or without one."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder, numbers = tmp_path_factory.mktemp("cuda"), itertools.count()
    (folder / "cuda.c").write_text(FAKE_CUDA)

    def make(version):
        target = folder / f"libcuda{next(numbers)}.so"
        defines = {"13": ["-DBATCH_V2"], "12.8": ["-DBATCH_V1"], "12.4": []}[version]
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-Wall", "-Werror", *defines, "-o", target, folder / "cuda.c"], check=True
        )
        return ctypes.CDLL(str(target))

    return make


def number(library, name, kind=ctypes.c_int):
    return kind.in_dll(library, name)


def scattered(count, nbytes=64):
    """Runs between the blocks of a pool and scattered host memory; those blocks, what they are to hold, the memory."""
    pool, host = np.zeros((2 * count, nbytes), np.uint8), np.arange(1, count + 1, dtype=np.uint8)
    slab = np.repeat(host, nbytes).reshape(count, nbytes)[::-1].copy()
    device = pool.ctypes.data + np.arange(count) * 2 * nbytes
    hosts = slab.ctypes.data + np.arange(count)[::-1] * nbytes
    return Runs.of(device, hosts.tolist(), nbytes), pool[::2], host, slab


@pytest.mark.parametrize("version", ["13", "12.8"])
def test_a_batch_is_one_call_of_the_driver(fakes, version):
    library = fakes(version)
    driver, (runs, blocks, values, _slab) = Driver(library), scattered(7)
    assert driver.batches
    driver.copy_batch(runs, Direction.TO_DEVICE, 0x1234)
    assert (blocks == values[:, None]).all()
    assert (number(library, "batches").value, number(library, "calls").value) == (1, 0)
    assert number(library, "last_stream", ctypes.c_void_p).value == 0x1234
    blocks[:] = 99
    driver.copy_batch(runs.slice(0, 2), Direction.TO_HOST, 1)
    driver.copy_batch(runs.slice(1, 2), Direction.TO_DEVICE, 1)
    assert (blocks[:, :32] == 99).all()
    assert (blocks[:, 32:] == values[:, None]).all()


def test_an_older_driver_copies_one_by_one(fakes):
    library = fakes("12.4")
    driver, (runs, blocks, values, _slab) = Driver(library), scattered(5)
    assert not driver.batches
    with pytest.raises(TierUnavailable, match=r"12\.8"):
        driver.copy_batch(runs, Direction.TO_DEVICE, 1)
    driver.copy(runs, Direction.TO_DEVICE, 7)
    assert (blocks == values[:, None]).all()
    assert number(library, "calls").value == 5


@pytest.mark.parametrize("version", ["13", "12.8"])
def test_what_the_driver_refuses_is_an_error(fakes, version):
    library = fakes(version)
    driver, (runs, blocks, _values, _slab) = Driver(library), scattered(5)
    number(library, "refuse_at", ctypes.c_size_t).value = 2
    for copy in (driver.copy, driver.copy_batch):
        with pytest.raises(TierUnavailable, match="error 700"):
            copy(runs, Direction.TO_DEVICE, 1)
        assert not blocks[2:].any()


def test_without_a_driver_it_says_so(monkeypatch):
    open_driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError("cannot open shared object file")))
    with pytest.raises(TierUnavailable, match=r"libcuda\.so\.1"):
        open_driver()


# ---- choosing


def _runs(count, nbytes, align=16):
    return Runs.of(np.arange(count) * 2 * nbytes, [align * at * nbytes for at in range(count)], nbytes)


ALL = frozenset(Way)


@pytest.mark.parametrize(
    ("runs", "direction", "ways", "pinned", "expected"),
    [
        (_runs(64, 1 << 20), Direction.TO_DEVICE, ALL, True, Way.BATCH),
        (_runs(64, 1 << 12), Direction.TO_DEVICE, ALL, True, Way.GATHER),
        (_runs(64, 1 << 12), Direction.TO_HOST, ALL, True, Way.BATCH),
        (_runs(64, 1 << 12), Direction.TO_DEVICE, ALL, False, Way.SINGLE),
        (_runs(64, 1 << 12), Direction.TO_DEVICE, frozenset({Way.SINGLE, Way.BATCH}), True, Way.BATCH),
        (_runs(64, 1 << 12), Direction.TO_DEVICE, frozenset({Way.SINGLE}), True, Way.SINGLE),
        (_runs(64, (1 << 12) + 8), Direction.TO_DEVICE, ALL, True, Way.BATCH),
        (_runs(2, 1 << 12), Direction.TO_DEVICE, ALL, True, Way.SINGLE),
    ],
)
def test_the_way_follows_size_number_direction_and_pinning(runs, direction, ways, pinned, expected):
    assert choose(runs, direction, ways, pinned=pinned) is expected


def test_a_launcher_merges_counts_and_can_be_told_the_way():
    launched = []
    ways = {way: lambda runs, direction, stream, way=way: launched.append((way, len(runs), stream)) for way in Way}
    launcher = Launcher(ways)
    launcher(Runs.of([0, 64, 128, 512], [1000, 1064, 1128, 0], 64), Direction.TO_HOST, 5, pinned=True)
    launcher(Runs.of([], [], 64), Direction.TO_HOST, 5, pinned=True)
    launcher(_runs(9, 64), Direction.TO_HOST, 6, pinned=True)
    Launcher(ways, Way.GATHER)(_runs(1, 64), Direction.TO_HOST, 7, pinned=True)
    assert launched == [(Way.SINGLE, 2, 5), (Way.BATCH, 9, 6), (Way.GATHER, 1, 7)]
    # A kernel is never sent where it cannot go.
    Launcher(ways, Way.GATHER)(_runs(8, 64), Direction.TO_HOST, 8, pinned=False)
    Launcher(ways, Way.GATHER)(_runs(8, 72), Direction.TO_HOST, 9, pinned=True)
    assert launched[3:] == [(Way.SINGLE, 8, 8), (Way.SINGLE, 8, 9)]
    assert launcher.launched == {Way.SINGLE: 2, Way.BATCH: 9, Way.GATHER: 0}
    with pytest.raises(TierUnavailable, match="by gather: this machine has batch, single"):
        Launcher({way: ways[way] for way in (Way.SINGLE, Way.BATCH)}, Way.GATHER)


def test_pinned_memory_knows_what_it_covers():
    registered, refused = {}, set()

    def register(address, nbytes, flags):
        if (address, flags) in refused:
            return 801
        registered[address] = (nbytes, flags)
        return 0

    pinned = PinnedMemory(register, lambda address: registered.pop(address) and 0)
    blocks = np.zeros((3, 4096), np.uint8)
    first, second, third = (row.data for row in blocks)
    runs = Runs.of([0, 0], [address_of(first), address_of(second) + 1000], 96)
    assert not pinned.covers(runs)
    assert pinned.pin(first)
    assert not pinned.covers(runs)
    assert pinned.pin(second.toreadonly())
    assert pinned.covers(runs)
    assert not pinned.covers(Runs.of([0], [address_of(second) + 4001], 96))
    assert not pinned.covers(Runs.of([0], [address_of(first) - 1], 96))
    assert registered[address_of(second)] == (4096, 1 | 8)
    pinned.unpin(first)
    assert not pinned.covers(runs)
    # Where read-only pinning is not supported, plain pinning is tried; where that fails too, it is counted.
    refused |= {(address_of(third), 1 | 8)}
    assert pinned.pin(third.toreadonly())
    assert registered[address_of(third)] == (4096, 1)
    pinned.unpin(third)
    refused |= {(address_of(third), 1)}
    assert not pinned.pin(third)
    assert pinned.refused == 1
    pinned.unpin(third)
    assert pinned.covers(Runs.of([], [], 1))


# ---- the glue: torch's and CuPy's calls, each as far as it is needed


class Recorder:
    """Streams and events that remember the order of calls; every copy runs as it is launched."""

    def __init__(self, monkeypatch, library):
        self.calls = calls = []
        handles = itertools.count(0x1000)

        class Stream:
            def __init__(self, device=None, **options):
                self.cuda_stream = self.ptr = next(handles)

            def wait_event(self, event):
                calls.append(("wait", self.cuda_stream, event))

            def query(self):
                return True

        class Event:
            def __init__(self, **options):
                assert options in ({"blocking": True}, {"block": True, "disable_timing": True})
                self.ptr = self

            def record(self, stream):
                calls.append(("record", stream.cuda_stream, self))

            def synchronize(self):
                calls.append(("synchronize", self))

        self.current = Stream()
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "current_stream": lambda device=None: self.current,
            "device": lambda device: contextlib.nullcontext(),
            "set_device": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        empty = torch.empty

        def unpinned(*size, pin_memory=False, **rest):
            return empty(*size, **rest)

        monkeypatch.setattr(torch, "empty", unpinned)
        driver = Driver(library)
        monkeypatch.setattr(cuda, "open_driver", lambda: driver)
        monkeypatch.setattr(cuda.kernels, "available", lambda: False)
        self._fake_cupy(monkeypatch, Stream, Event)

    def _fake_cupy(self, monkeypatch, stream, event):
        def copy(target, source, nbytes, kind, handle):
            self.calls.append(("copy", kind, handle))
            ctypes.memmove(target, source, nbytes)

        current, self.on = [0], []  # the device; with which one what was called

        @contextlib.contextmanager
        def on_device(index):
            current.append(index)
            yield
            current.pop()

        def called(name, handle, event):
            self.on.append((name, current[-1]))
            self.calls.append((name, handle, event))

        runtime = types.SimpleNamespace(
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyAsync=copy,
            eventRecord=lambda event, handle: called("record", handle, event),
            streamWaitEvent=lambda handle, event: called("wait", handle, event),
        )
        module = types.ModuleType("cupy")
        module.__spec__ = ModuleSpec("cupy", None)
        module.is_available = lambda: True
        module.cuda = types.SimpleNamespace(runtime=runtime, Stream=stream, Event=event, Device=on_device)
        monkeypatch.setitem(sys.modules, "cupy", module)
        monkeypatch.setitem(sys.modules, "cupy.cuda", module.cuda)


@pytest.mark.parametrize("make", [torch_streams.TorchStreams, cupy_streams.CupyStreams])
def test_an_engine_on_cuda_streams_copies_waits_and_decodes(fakes, monkeypatch, make):
    library = fakes("13")
    recorder = Recorder(monkeypatch, library)
    streams = make(torch.device("cuda", 0))
    blocks = BOUNCE_BLOCKS + 3
    pool = torch.zeros(blocks, 256, dtype=torch.uint8)
    slab = np.zeros((2 * blocks, 256), np.uint8)
    assert streams.pin(slab.data)
    with contextlib.closing(CopyEngine(pool, streams)) as engine:
        moves = [BlockMove(at, memory(at + 1, 1), repeat) for at in range(blocks)]
        assert engine.submit(moves, Direction.TO_DEVICE).wait(30) == blocks
        assert all(holds(pool[at].numpy(), at + 1) for at in range(blocks))
        assert engine.submit([(at, slab[2 * at].data) for at in range(blocks)], Direction.TO_HOST).wait(30) == blocks
        assert all(holds(slab[2 * at].data, at + 1) for at in range(blocks))
        tickets, gate = engine.submit_layers([[(0, slab[8].data), (4, slab[2].data)]], 4)
        for layer in range(4):
            gate.wait(layer)
        assert tickets[0].wait(30) == 2
        assert holds(pool[0].numpy(), 5)
        assert holds(pool[4].numpy(), 2)
    main = recorder.current.cuda_stream
    # A batch: the submitter's place recorded and waited for on the side; at the end an event that the lane waits for.
    first, second, third = recorder.calls[:3]
    assert (first[0], first[1], second[0]) == ("record", main, "wait")
    assert second[1] != main
    assert first[2] is second[2]
    assert any(call[0] == "synchronize" for call in recorder.calls)
    waited = [call[2] for call in recorder.calls if call[0] == "wait" and call[1] == main]
    recorded = [call[2] for call in recorder.calls if call[0] == "record" and call[1] != main]
    assert len(waited) == 4
    assert all(any(event is known for known in recorded) for event in waited)
    assert number(library, "batches").value == 1  # the pinned save of more than a few blocks
    assert streams.cuda.launcher.launched[Way.BATCH] == blocks
    streams.unpin(slab.data)
    assert third[0] in ("copy", "record", "synchronize")


def test_streams_are_those_of_the_device(monkeypatch, fakes):
    assert isinstance(make_streams(torch.device("cpu")), HostStreams)
    Recorder(monkeypatch, fakes("12.4"))
    assert isinstance(make_streams(torch.device("cuda", 0)), cupy_streams.CupyStreams)
    monkeypatch.setattr(sys.modules["cupy"], "is_available", lambda: False)
    assert isinstance(make_streams(torch.device("cuda", 0)), torch_streams.TorchStreams)


def test_a_cupy_that_cannot_be_imported_leaves_the_copies_to_torch(monkeypatch, fakes, tmp_path, caplog):
    Recorder(monkeypatch, fakes("12.4"))
    monkeypatch.delitem(sys.modules, "cupy")
    (tmp_path / "cupy.py").write_text("raise ImportError('libnvrtc.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(make_streams(torch.device("cuda", 0)), torch_streams.TorchStreams)
    assert "libnvrtc.so.13" in caplog.text


def test_cupy_waits_on_the_stream_of_its_own_device(monkeypatch, fakes):
    recorder = Recorder(monkeypatch, fakes("13"))
    streams = cupy_streams.CupyStreams(torch.device("cuda", 1))
    streams.wait(0, streams.record(0))
    assert [device for call, device in recorder.on if call in ("record", "wait")] == [1, 1]


def test_the_copy_kernel_moves_runs_between_any_addresses():
    pytest.importorskip("triton")
    from kvtier.gpu.streams.gather import runs_launch

    source, target = np.arange(9000, dtype=np.int64), np.zeros(9000, np.int64)
    places = ((0, 100, 10), (500, 4000, 4100), (6000, 2, 2048), (8990, 130, 2))
    table = [
        [target.ctypes.data + 8 * to for _, to, _ in places],
        [source.ctypes.data + 8 * at for at, _, _ in places],
        [words for _, _, words in places],
    ]
    runs_launch(torch.tensor(table), 4100).run()
    expected = np.zeros_like(target)
    for at, to, words in places:
        expected[to : to + words] = source[at : at + words]
    assert np.array_equal(target, expected)
