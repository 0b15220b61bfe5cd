"""The NVMe tier beside fio on the same file in the same rounds, and its index at up to ten million blocks.

`nvme.put`, `nvme.get`: fio with libaio and direct=1, as many requests in flight as the tier has workers; puts end
with a flush, fio's writes with an fsync. A worker has up to 4 MiB in flight. Batches are of 16 blocks, and of 64 where
that is no more than 4 MiB.
`nvme.put.full`: a put into a full tier against one into an empty one.
`index.*`: entries go through `reserve` and `commit`, without bytes and segment files.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from harness import Cost, Report, Result, interleaved, require, timed

from kvtier.keys import namespace_index
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.nvme.extents import PAGE, Extent
from kvtier.nvme.holds import NvmeHandle
from kvtier.nvme.segments import Segments, aligned_buffer
from kvtier.testing.blocks import chain_refs
from kvtier.tiers import BlockRef, Status

__all__ = ["run", "run_index"]

_KIB, _MIB = 1 << 10, 1 << 20
_BATCH, _LARGE_BATCH = 16, 64
_LARGEST_BATCH_BYTES = 4 * _MIB

_SIZES = (64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB)


def run(report: Report, quick: bool, sizes: Sequence[int] = _SIZES) -> None:  # noqa: FBT001  every section is called so
    """The rows of `nvme.*`."""
    with _place(report) as place:
        for size in sizes:
            for batch in (_BATCH, _LARGE_BATCH) if _LARGE_BATCH * size <= _LARGEST_BATCH_BYTES else (_BATCH,):
                for workers in (1, 4):
                    _bandwidth(report, place, size, batch, workers, quick=quick)
        if tuple(sizes) == _SIZES:
            _full(report, place, quick=quick)


def run_index(report: Report, quick: bool) -> None:  # noqa: FBT001
    """The rows of `index.*`."""
    with _place(report) as place:
        for entries in (20_000, 100_000) if quick else (100_000, 1_000_000, 10_000_000):
            _index(report, place, entries)


@contextmanager
def _place(report: Report) -> Iterator[Path]:
    place = report.directory / f"nvme-{os.getpid()}"
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place)


# ---- bytes


def _buffers(size: int, batch: int) -> list[memoryview]:
    """A batch's blocks, side by side in huge pages, as the host tier above has them."""
    memory = aligned_buffer(batch * size).data
    return [memory[start : start + size] for start in range(0, len(memory), size)]


class _Load:
    """A tier of one segment file, filled with chains of blocks of one size."""

    def __init__(self, place: Path, nbytes: int, size: int, batch: int, workers: int) -> None:
        self.nbytes, self.size, self.workers = nbytes, size, workers
        # Room for one batch more, so that nothing is evicted.
        capacity = nbytes + batch * size
        self._options = NvmeOptions(segment_bytes=capacity, io_threads=workers, min_free_bytes=0)
        self.path = place / "tier"
        self.tier = NvmeTier(self.path, capacity, self._options)
        self.file = self.path / "seg-00000.kv"
        self.chains = [chain_refs(batch, seed=seed) for seed in range(nbytes // (batch * size))]
        # One batch more than workers, so that these do not wait for look-ups and commits.
        self._flying = workers + 1
        self._buffers = [_buffers(size, batch) for _ in range(self._flying)]
        for row in self._buffers:
            for at, buffer in enumerate(row):
                np.frombuffer(buffer, np.uint8)[:] = at + 1
        everything = [*self.chains, chain_refs(batch, seed=len(self.chains))]
        while self.tier.check()["unprepared_pages"]:
            self._put(everything)  # asks for more pages to be prepared
            self.tier.clear()
            time.sleep(0.1)

    def _put(self, chains: Sequence[Sequence[BlockRef]]) -> None:
        flying: list[tuple[list[NvmeHandle], object]] = []
        for number, refs in enumerate(chains):
            if len(flying) == self._flying:
                self._land(flying)
            held = self.tier.reserve(refs, [self.size] * len(refs), ["raw"] * len(refs), "bench")
            handles = [handle for handle in held if isinstance(handle, NvmeHandle)]
            require(len(handles) == len(refs), "the tier took less than it has room for")
            buffers = self._buffers[number % self._flying]
            flying.append((handles, self.tier.write(list(zip(handles, buffers, strict=False)))))
        while flying:
            self._land(flying)

    def _land(self, flying: list) -> None:
        handles, ticket = flying.pop(0)
        require(set(ticket.wait().statuses) == {Status.OK}, "a write failed")
        self.tier.commit(handles)

    def put(self) -> Cost:
        """All chains into an empty tier, durable at the end."""
        self.tier.clear()

        def work() -> None:
            self._put(self.chains)
            self.tier.flush()

        return timed(work)

    def get(self, batches: Sequence[Sequence[bytes]]) -> Cost:
        """Every block once, verified."""
        return timed(partial(self._get, batches))

    def _get(self, batches: Sequence[Sequence[bytes]]) -> None:
        flying: list[tuple] = []
        for number, keys in enumerate(batches):
            if len(flying) == self._flying:
                self._take(flying)
            handles = self.tier.acquire(keys, "bench").wait().handles
            require(len(handles) == len(keys), "a block is missing")
            items = list(zip(handles, self._buffers[number % self._flying], strict=False))
            flying.append((handles, self.tier.read(items)))
        while flying:
            self._take(flying)

    def _take(self, flying: list) -> None:
        handles, ticket = flying.pop(0)
        require(set(ticket.wait().statuses) == {Status.OK}, "a read failed")
        self.tier.release(handles)

    def fio(self, kind: str) -> Cost:
        """fio moves as many bytes of the same file, `workers` requests at a time."""
        command = ["fio", "--name=peer", f"--filename={self.file}", "--direct=1", "--ioengine=libaio", "--end_fsync=1"]
        command += [f"--rw={kind}", f"--bs={self.size}", f"--iodepth={self.workers}", f"--size={self.nbytes}"]
        done = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True, check=True)
        job = json.loads(done.stdout)["jobs"][0]
        seconds = job["job_runtime"] / 1000
        return Cost(max(seconds, 1e-3), seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100)

    def close(self) -> None:
        self.tier.close()
        shutil.rmtree(self.path)


def _bandwidth(report: Report, place: Path, size: int, batch: int, workers: int, *, quick: bool) -> None:
    nbytes, rounds = (128 * _MIB, 2) if quick else (256 * _MIB, 7)
    load = _Load(place, nbytes, size, batch, workers)
    peer = shutil.which("fio") is not None
    name = f"fio qd{workers}" if peer else None
    params = {"block": size, "workers": workers, "batch": batch}

    def bandwidth(row: str, order: str, measures: dict, kind: str) -> None:
        if peer:
            measures[f"fio qd{workers}"] = partial(load.fio, kind)
        result = interleaved(measures, rounds)
        cpu_ms = 1e3 * result.median(row).cpu_seconds / (nbytes / _MIB)
        report.add_bandwidth(
            row, {**params, "order": order, "cpu_ms_per_mib": round(cpu_ms, 3)}, result, row, name, nbytes
        )

    bandwidth("nvme.put", "chains", {"nvme.put": load.put}, "randwrite")
    load.put()
    chains = [[ref.key for ref in refs] for refs in load.chains]
    keys = [key for chain in chains for key in chain]
    random.Random(0).shuffle(keys)
    scattered = [keys[at : at + batch] for at in range(0, len(keys), batch)]
    bandwidth("nvme.get", "chains", {"nvme.get": partial(load.get, chains)}, "randread")
    bandwidth("nvme.get", "random", {"nvme.get": partial(load.get, scattered)}, "randread")
    load.close()


def _full(report: Report, place: Path, *, quick: bool) -> None:
    """How much longer a put takes where every block evicts another one."""
    size, batches = 256 * _KIB, 24 if quick else 128
    tier = NvmeTier(place / "full", batches * _BATCH * size, NvmeOptions(min_free_bytes=0))
    buffers = _buffers(size, _BATCH)

    def put(seed: int) -> Cost:
        refs = chain_refs(_BATCH, seed=seed)

        def work() -> None:
            held = tier.reserve(refs, [size] * _BATCH, ["raw"] * _BATCH, "bench")
            handles = [handle for handle in held if isinstance(handle, NvmeHandle)]
            require(len(handles) == _BATCH, "the tier refused a block")
            tier.write(list(zip(handles, buffers, strict=True))).wait()
            tier.commit(handles)

        return timed(work)

    empty = [put(seed) for seed in range(batches)]
    full = [put(seed) for seed in range(batches, 3 * batches)]
    half = batches // 2
    wall = [float(np.median([cost.seconds for cost in costs])) for costs in (empty[half // 2 :], full)]
    cpu = [sum(cost.cpu_seconds for cost in costs) / len(costs) for costs in (empty[half // 2 :], full)]
    params = {"block": size, "cpu_ratio": round(cpu[0] / cpu[1], 3), "ms": round(1e3 * wall[1], 3)}
    report.add(Result("nvme.put.full", 1e3 * wall[1], "ms", params, "empty", 1e3 * wall[0], wall[0] / wall[1]))
    tier.close()
    shutil.rmtree(place / "full")


# ---- index


class _NoFiles(Segments):
    """Segments of which only the numbers count."""

    def allocate(self, extent: Extent) -> None:
        """Nothing is set aside."""

    def zero(self, extent: Extent) -> None:
        """Nothing is written."""


def _batches(entries: int, per_batch: int) -> Iterator[list[BlockRef]]:
    """Chains of 16 blocks with random keys."""
    ns = namespace_index(b"benchmark".ljust(32, b"\0"))
    dice = np.random.default_rng(1)
    for start in range(0, entries, per_batch):
        data = dice.bytes(16 * min(per_batch, entries - start))
        keys = [data[at : at + 16] for at in range(0, len(data), 16)]
        yield [
            BlockRef(key, ns, at % _BATCH, keys[at - 1] if at % _BATCH else None, exact=True)
            for at, key in enumerate(keys)
        ]


def _index(report: Report, place: Path, entries: int) -> None:
    path, sample = place / "index", list[bytes]()
    capacity = (entries + 4096) * PAGE * 65 // 64
    tier = NvmeTier(path, capacity, NvmeOptions(segment_bytes=1 << 30, min_free_bytes=0))
    grower = tier._space._grower  # noqa: SLF001  ten million pages are not to be had on most disks
    grower._segments = _NoFiles(path, (1 << 30) // PAGE, direct=False)  # noqa: SLF001
    start = time.perf_counter()
    for refs in _batches(entries, 512):
        held = tier.reserve(refs, [PAGE] * len(refs), ["raw"] * len(refs), "bench")
        handles = [handle for handle in held if isinstance(handle, NvmeHandle)]
        require(len(handles) == len(refs), "the index refused an entry")
        for handle in handles:
            handle.checksum = bytes(16)  # as `write` leaves it
        tier.commit(handles)
        sample += [ref.key for ref in refs[:: max(1, entries // 100_000)]]
    params = {"entries": entries}
    report.add(Result("index.build", time.perf_counter() - start, "s", params))
    tier.flush()
    parts = [file.stat().st_blocks * 512 for file in (path / "index/data.mdb", path / "recency.bin")]
    params_bytes = {**params, "index": parts[0] // entries, "recency": parts[1] // entries}
    report.add(Result("index.bytes", sum(parts) / entries, "B/entry", params_bytes))
    _look_up(report, tier, sample, params)
    _evict(report, tier, params)
    tier.close()
    report.add(Result("index.reopen", _reopen(path, capacity), "s", {**params, "after": "close"}))
    program = "import sys,os; from kvtier.nvme import NvmeTier, NvmeOptions; from pathlib import Path; "
    program += "NvmeTier(Path(sys.argv[1]), int(sys.argv[2]), NvmeOptions(min_free_bytes=0)); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", program, str(path), str(capacity)], check=False)
    report.add(Result("index.reopen", _reopen(path, capacity), "s", {**params, "after": "kill -9"}))
    if entries <= 1_000_000:
        _clear(report, path, capacity, params)
    shutil.rmtree(path)


def _clear(report: Report, path: Path, capacity: int, params: dict) -> None:
    """CPU per entry when all go, in transactions of 512."""
    tier = NvmeTier(path, capacity, NvmeOptions(min_free_bytes=0))
    blocks = tier.stats()["blocks"]
    cost = timed(tier.clear)
    require(tier.stats()["blocks"] == 0, "an entry was not cleared")
    report.add(Result("index.clear", 1e6 * cost.cpu_seconds / blocks, "us/entry", {**params, "blocks": blocks}))
    tier.close()


def _look_up(report: Report, tier: NvmeTier, sample: list[bytes], params: dict) -> None:
    random.Random(0).shuffle(sample)
    batches = [sample[at : at + 512] for at in range(0, min(len(sample), 102_400), 512)]
    for name in ("contains", "acquire"):
        cpu = []
        for keys in batches:
            before = time.thread_time()
            done = tier.contains(keys).wait() if name == "contains" else tier.acquire(keys, "bench").wait()
            cpu.append((time.thread_time() - before) / len(keys))
            require(set(done.statuses) == {Status.OK}, "an entry is missing")
            tier.release(done.handles)
        report.add(Result(f"index.{name}", 1e6 * float(np.median(cpu)), "us/key", params))


def _evict(report: Report, tier: NvmeTier, params: dict) -> None:
    """CPU per evicted entry, and the longest eviction of a batch."""
    cpu, evicted = [], 0
    for _ in range(50):
        before, blocks = time.thread_time(), tier.stats()["blocks"]
        tier._space._evict(256, 2**62)  # noqa: SLF001
        cpu.append(time.thread_time() - before)
        evicted += blocks - tier.stats()["blocks"]
    values = {**params, "longest_ms": round(1e3 * max(cpu), 2)}
    report.add(Result("index.evict", 1e6 * sum(cpu) / max(1, evicted), "us/entry", values))


def _reopen(path: Path, capacity: int) -> float:
    start = time.perf_counter()
    tier = NvmeTier(path, capacity, NvmeOptions(min_free_bytes=0))
    seconds = time.perf_counter() - start
    tier.close()
    return seconds
