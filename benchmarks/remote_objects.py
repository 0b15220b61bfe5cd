"""The remote tier over a directory, as on NFS, beside plain files in it.

Our objects are runs of blocks, each behind a table; a put asks what is there, checksums, writes, and makes the object
visible as a whole, first writer first. A get looks a chain up, leases it, reads runs into memory that was there before
and verifies every block. Plain files: one per block, written beside its place and renamed, read into the same memory;
they verify nothing. Both read from the page cache, and neither waits for the disk.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from harness import DIRECTORY, Cost, Report, Result, Rounds, interleaved, require, timed

from kvtier.config import RemoteSettings
from kvtier.remote import RemoteTier, open_remote
from kvtier.testing.blocks import chain_refs
from kvtier.tiers import BlockRef, Handle, Status

__all__ = ["run"]

_KIB, _MIB = 1 << 10, 1 << 20
_BATCH_BYTES = 16 * _MIB
_RUNS = {256 * _KIB: 8, _MIB: 4, 4 * _MIB: 1}
_OURS, _FILES = "kvtier", "plain files"


def run(report: Report, quick: bool) -> None:  # noqa: FBT001  every section is called so
    """The rows of `remote.objects.*`."""
    nbytes, rounds = (64 * _MIB, 3) if quick else (256 * _MIB, 7)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for size, blocks in _RUNS.items():
        directory = Path(mkdtemp(dir=DIRECTORY, prefix="objects-"))
        try:
            _rows(report, _Load(directory, nbytes, size, blocks), rounds)
        finally:
            shutil.rmtree(directory)


def _rows(report: Report, load: "_Load", rounds: int) -> None:
    puts = interleaved({_OURS: load.put, _FILES: load.put_files}, rounds)
    load.fill()
    gets = interleaved({_OURS: load.get, _FILES: load.get_files}, rounds)
    params = {"block": load.size, "run": load.run, "moved": load.nbytes}
    for verb, found in (("put", puts), ("get", gets)):
        name = f"remote.objects.{verb}"
        report.add_bandwidth(name, params, found, _OURS, _FILES, load.nbytes)
        report.add(_cpu(f"{name}.cpu", params, found, load.nbytes))


def _cpu(name: str, params: dict[str, int], rounds: Rounds, nbytes: int) -> Result:
    ours, theirs = (1e9 * rounds.median(who).cpu_seconds / nbytes for who in (_OURS, _FILES))
    return Result(name, ours, "CPU s/GB", params, _FILES, theirs, rounds.cpu_ratio(_OURS, _FILES))


class _Load:
    """Chains of blocks of one size, as objects and as files."""

    def __init__(self, directory: Path, nbytes: int, size: int, run: int) -> None:
        self.size = size
        self.run = run
        self._directory = directory
        self._blocks = _BATCH_BYTES // size
        self._chains = [chain_refs(self._blocks, seed=seed) for seed in range(nbytes // _BATCH_BYTES)]
        self.nbytes = len(self._chains) * _BATCH_BYTES
        self._memory = np.random.default_rng(0).integers(0, 256, (self._blocks, size), np.uint8)
        self._target = np.zeros_like(self._memory)

    def fill(self) -> None:
        """Both are there."""
        self.put()
        self.put_files()

    def put(self) -> Cost:
        shutil.rmtree(self._directory / "objects", ignore_errors=True)
        return self._by_tier(self._put)

    def get(self) -> Cost:
        return self._by_tier(self._get)

    def put_files(self) -> Cost:
        shutil.rmtree(self._directory / "files", ignore_errors=True)
        (self._directory / "files").mkdir()
        return timed(partial(self._all, self._write_files))

    def get_files(self) -> Cost:
        return timed(partial(self._all, self._read_files))

    def _by_tier(self, move: Callable[[RemoteTier, Sequence[BlockRef]], None]) -> Cost:
        url = (self._directory / "objects").as_uri()
        # Another one each time: it knows of no object yet.
        tier = open_remote(RemoteSettings(url=url, options=f"run={self.run}", timeout=60, absent_ttl=0))
        try:
            return timed(partial(self._all, partial(move, tier)))
        finally:
            tier.close()

    def _all(self, move: Callable[[Sequence[BlockRef]], None]) -> None:
        for refs in self._chains:
            move(refs)

    def _put(self, tier: RemoteTier, refs: Sequence[BlockRef]) -> None:
        count = len(refs)
        slots = tier.reserve(refs, [self.size] * count, ["raw"] * count, "bench")
        handles = [slot for slot in slots if isinstance(slot, Handle)]
        done = tier.write([(one, row.data) for one, row in zip(handles, self._memory, strict=True)]).wait()
        require(set(done.statuses) == {Status.OK}, "a block was not written")
        tier.commit(handles)

    def _get(self, tier: RemoteTier, refs: Sequence[BlockRef]) -> None:
        handles = tier.acquire([ref.key for ref in refs], "bench", exact=True).wait().handles
        require(len(handles) == len(refs), "a block is missing")
        done = tier.read([(one, row.data) for one, row in zip(handles, self._target, strict=True)]).wait()
        require(set(done.statuses) == {Status.OK}, "a block was not read")
        tier.release(handles)

    def _write_files(self, refs: Sequence[BlockRef]) -> None:
        for ref, row in zip(refs, self._memory, strict=True):
            path = self._path(ref)
            beside = path.with_suffix(".tmp")
            with beside.open("wb", buffering=0) as file:
                require(file.write(row.data) == self.size, "a file was not written")
            beside.rename(path)

    def _read_files(self, refs: Sequence[BlockRef]) -> None:
        for ref, row in zip(refs, self._target, strict=True):
            descriptor = os.open(self._path(ref), os.O_RDONLY)
            require(os.preadv(descriptor, [row.data], 0) == self.size, "a file was not read")
            os.close(descriptor)

    def _path(self, ref: BlockRef) -> Path:
        return self._directory / "files" / ref.key.hex()
