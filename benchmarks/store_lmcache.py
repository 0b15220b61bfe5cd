"""`lmcache.*`: the host and NVMe tiers beside LMCache 0.5.6's LocalCPUBackend and LocalDiskBackend, same blocks.

LMCache runs in a process and an environment of its own (benchmarks/requirements-lmcache.txt says how to make it); both
sides take turns in the same rounds, one thread each, and of LMCache's ways to do the same thing the fastest counts.

    lmcache.cpu.put           copy blocks in and index them; kvtier checksums them too
    lmcache.cpu.get           find and copy out; kvtier verifies them
    lmcache.cpu.get_in_place  find and address; kvtier verifies every byte, LMCache reads none
    lmcache.disk.put          out of memory to the disk, batches submitted at once, drained and made durable
    lmcache.disk.get          cold (fsync and POSIX_FADV_DONTNEED before), into memory; kvtier verifies. Batches of 16.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from harness import Cost, Measure, Report, Result, Rounds, forget_pages, interleaved, require, timed
from lmcache_environment import ENVIRON, MISSING, PYTHON
from store_host import BATCH, Blocks, HostWork, fresh_refs

from kvtier.nvme import NvmeTier
from kvtier.tiers import BlockRef, Handle, Status

__all__ = ["run"]

KIBS = (256, 1024, 4096)


class Peer:
    """LMCache's process. A context manager; `measures` is empty where LMCache is not installed."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._process: subprocess.Popen[str] | None = None
        if not PYTHON.exists():
            return
        with (directory / "lmcache.log").open("w") as log:
            self._process = subprocess.Popen(
                [str(PYTHON), str(Path(__file__).with_name("lmcache_peer.py")), str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=ENVIRON,
            )
        self._log = directory / "lmcache.log"

    @property
    def installed(self) -> bool:
        """Whether there is such a process."""
        return self._process is not None

    def call(self, *request: object) -> Cost:
        """One operation of lmcache_peer.py."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return Cost(0.0, 0.0)
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        require(bool(answer), f"LMCache's process died: {self._log.read_text()[-2000:]}")
        return Cost(*json.loads(answer))

    def measures(self, *requests: Sequence[object]) -> dict[str, Measure]:
        """Operations as measures, by name."""
        if not self.installed:
            return {}
        return {" ".join(map(str, request)): partial(self.call, *request) for request in requests}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


class NvmeWork:
    """One round of puts or gets on an NVMe tier that has room for all blocks."""

    def __init__(self, directory: Path, source: Blocks, target: Blocks, total: int) -> None:
        self._directory = directory
        self._tier = NvmeTier(directory, total + (64 << 20))
        self._source = source
        self._target = target
        self._refs: list[list[BlockRef]] = []

    def put(self) -> Cost:
        self._tier.clear().wait()
        self._refs = [fresh_refs(len(batch)) for batch in self._source.batches]
        cost = timed(self._write)
        require(self._tier.stats()["blocks"] == sum(map(len, self._refs)), "a put was dropped")
        return cost

    def _write(self) -> None:
        under_way = []
        for at, refs in enumerate(self._refs):
            data = self._source.views(at)
            slots = self._tier.reserve(refs, [view.nbytes for view in data], ["raw"] * len(refs), "put")
            handles = [slot for slot in slots if isinstance(slot, Handle)]
            under_way.append((handles, self._tier.write(list(zip(handles, data, strict=True)))))
        for handles, ticket in under_way:
            ticket.wait()
            self._tier.commit(handles)
        self._tier.flush()

    def get(self) -> Cost:
        forget_pages(self._directory)
        return timed(self._read)

    def _read(self) -> None:
        for at, refs in enumerate(self._refs):
            handles = self._tier.acquire([ref.key for ref in refs], "get").wait().handles
            require(len(handles) == len(refs), "a get missed")
            statuses = self._tier.read(list(zip(handles, self._target.views(at), strict=True))).wait().statuses
            require(all(status is Status.OK for status in statuses), "a get missed")
            self._tier.release(handles)

    def close(self) -> None:
        self._tier.close()


def add(report: Report, name: str, params: Mapping[str, object], rounds: Rounds, nbytes: int, peer: str) -> None:
    """GB/s beside the fastest of LMCache's ways; `params.call` says which."""
    others = [way for way in rounds.costs if way != "ours"]
    if not others:
        value = nbytes / rounds.median("ours").seconds / 1e9
        report.add(Result(name, value, "GB/s", params, MISSING))
        return
    fastest = rounds.fastest(*others)
    renamed = Rounds({"ours": rounds.costs["ours"], peer: rounds.costs[fastest]})
    report.add_bandwidth(name, {**params, "call": fastest}, renamed, "ours", peer, nbytes)


def add_in_place(report: Report, params: Mapping[str, object], rounds: Rounds, blocks: int) -> None:
    ours = 1e6 * rounds.median("ours").seconds / blocks
    name, other = "lmcache.cpu.get_in_place", next((way for way in rounds.costs if way != "ours"), None)
    if other is None:
        report.add(Result(name, ours, "us/block", params, MISSING))
        return
    theirs = 1e6 * rounds.median(other).seconds / blocks
    report.add(Result(name, ours, "us/block", params, "LMCache, unverified", theirs, rounds.ratio("ours", other)))


def host(report: Report, peer: Peer, source: Blocks, target: Blocks, params: Mapping[str, object], rounds: int) -> None:
    blocks = sum(map(len, source.batches))
    total = blocks * source.batches[0][0].nbytes
    work = HostWork(source, target)
    work.check()
    backend = "LMCache LocalCPUBackend"
    puts = {"ours": work.put(work.put_in_tier), **peer.measures(("cpu_put", "tensor"), ("cpu_put", "bytes"))}
    add(report, "lmcache.cpu.put", params, interleaved(puts, rounds), total, backend)
    gets = {"ours": work.get(work.get_copy), **peer.measures(("cpu_get", "tensor"), ("cpu_get", "bytes"))}
    add(report, "lmcache.cpu.get", params, interleaved(gets, rounds), total, backend)
    in_place = {"ours": work.get(work.get_in_place), **peer.measures(("cpu_get_in_place",))}
    add_in_place(report, params, interleaved(in_place, rounds), blocks)
    work.close()


def disk(report: Report, peer: Peer, work: NvmeWork, total: int, params: Mapping[str, object], rounds: int) -> None:
    for direct in (False, True) if peer.installed else (False,):
        backend = f"LMCache LocalDiskBackend{' O_DIRECT' if direct else ''}"
        puts = {"ours": work.put, **peer.measures(("disk_put", direct))}
        add(report, "lmcache.disk.put", params, interleaved(puts, rounds), total, backend)
        gets = {"ours": work.get, **peer.measures(("disk_get", direct, False), ("disk_get", direct, True))}
        add(report, "lmcache.disk.get", params, interleaved(gets, rounds), total, backend)


def run(report: Report, quick: bool) -> None:  # noqa: FBT001  every section's signature
    """Add `lmcache.*`."""
    total, rounds = (128 << 20, 3) if quick else (256 << 20, 11)
    directory = report.directory / "lmcache"
    shutil.rmtree(directory, ignore_errors=True)
    with Peer(directory / "peer") as peer:
        for kib in KIBS:
            source = Blocks.private(kib << 10, total, seed=kib)
            target = Blocks.private(kib << 10, total)
            params = {"block_kib": kib, "batch": BATCH, "total_mib": total >> 20}
            peer.call("open", kib << 10, total)
            host(report, peer, source, target, params, rounds)
            nvme = directory / "nvme"
            work = NvmeWork(nvme, source, target, total)
            disk(report, peer, work, total, params, rounds)
            work.close()
            shutil.rmtree(nvme)
    shutil.rmtree(directory)
