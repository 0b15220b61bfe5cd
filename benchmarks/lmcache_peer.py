"""LMCache's CPU and local-disk backends behind a pipe, in LMCache's own environment; store_lmcache.py starts it.

Each line in is a JSON list `[operation, arguments...]`, each line out `[seconds, cpu_seconds]` of that operation.

Everything is done as fast as LMCache's interface allows: batched verbs, and of two ways to copy (through the memory
object's tensor, or its bytes) both are offered.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import Cost, forget_pages, require, timed
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

BATCH = 16
TOKEN_BYTES = 2 * 8 * 512 * 2  # K and V, 8 layers, 512 wide, bfloat16
POOL_BYTES = 1 << 30


class Peer:
    """One size of block at a time: `open`, then rounds of puts and gets.

    Args:
        directory: the disk backends make a directory below it each.
    """

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        shape = (8, 2, 256, 8, 64)
        metadata = LMCacheMetadata("benchmark", 1, 1, 0, 0, torch.bfloat16, shape)
        self._cpu = LocalCPUBackend(self._config(directory, direct=False), metadata, "cpu")
        self._disks = {}
        for direct in (False, True):
            config = self._config(directory / ("direct" if direct else "buffered"), direct=direct)
            self._disks[direct] = LocalDiskBackend(config, self._loop, self._cpu, "cpu", None, metadata)
        self._keys: list[CacheEngineKey] = []

    @staticmethod
    def _config(directory: Path, *, direct: bool) -> LMCacheEngineConfig:
        return LMCacheEngineConfig.from_defaults(
            max_local_cpu_size=POOL_BYTES / 2**30,
            local_disk=str(directory),
            max_local_disk_size=4.0,
            extra_config={"use_odirect": direct},
        )

    def open(self, block_bytes: int, total: int) -> Cost:
        """Blocks of another size: drop what is there, make source and target buffers."""
        self._empty()
        for disk in self._disks.values():
            self._erase(disk)
        self._shape = torch.Size([2, 8, block_bytes // TOKEN_BYTES, 512])
        count = total // block_bytes
        source = torch.randint(0, 256, (count, block_bytes), dtype=torch.uint8)
        target = torch.ones_like(source)
        self._bytes = [list(side.numpy()) for side in (source, target)]
        self._tensors = [[row.view(torch.bfloat16).view(self._shape) for row in side] for side in (source, target)]
        self._keys = [CacheEngineKey("benchmark", 1, 0, at, torch.bfloat16) for at in range(count)]
        self.cpu_put("tensor")
        self.cpu_get("tensor")
        require(torch.equal(source, target), "LMCache returned other bytes")
        return Cost(0.0, 0.0)

    def _batches(self) -> list[slice]:
        return [slice(at, at + BATCH) for at in range(0, len(self._keys), BATCH)]

    def _empty(self) -> None:
        for key in self._keys:
            self._cpu.remove(key)

    # ---- host memory

    def cpu_put(self, copy: str) -> Cost:
        """Allocate, copy in, index; the backend is emptied before."""
        self._empty()
        return timed(lambda: [self._put(part, copy) for part in self._batches()])

    def _put(self, part: slice, copy: str) -> None:
        keys = self._keys[part]
        objects = self._cpu.batched_allocate(self._shape, torch.bfloat16, len(keys))
        if copy == "tensor":
            for held, source in zip(objects, self._tensors[0][part], strict=True):
                held.tensor.copy_(source)
        else:
            for held, source in zip(objects, self._bytes[0][part], strict=True):
                np.copyto(np.frombuffer(held.byte_array, np.uint8), source)
        self._cpu.batched_submit_put_task(keys, objects)
        for held in objects:
            held.ref_count_down()

    def cpu_get(self, copy: str) -> Cost:
        """Look up, copy out, let go."""
        return timed(self._get_tensors if copy == "tensor" else self._get_bytes)

    def _get_tensors(self) -> None:
        for key, target in zip(self._keys, self._tensors[1], strict=True):
            held = self._cpu.get_blocking(key)
            target.copy_(held.tensor)
            held.ref_count_down()

    def _get_bytes(self) -> None:
        for key, target in zip(self._keys, self._bytes[1], strict=True):
            held = self._cpu.get_blocking(key)
            np.copyto(target, np.frombuffer(held.byte_array, np.uint8))
            held.ref_count_down()

    def cpu_get_in_place(self) -> Cost:
        """Look up, take the address, let go. No byte is read."""
        return timed(self._get_in_place)

    def _get_in_place(self) -> None:
        for key in self._keys:
            held = self._cpu.get_blocking(key)
            held.data_ptr  # noqa: B018  a property that computes the address
            held.ref_count_down()

    # ---- disk

    def disk_put(self, direct: bool) -> Cost:  # noqa: FBT001  comes out of a JSON list
        """Write all blocks out of LMCache's own memory, wait until they are written, make them durable."""
        disk = self._disks[direct]
        self._erase(disk)
        objects = [self._cpu.get_blocking(key) for key in self._keys]
        cost = timed(lambda: self._write(disk, objects))
        for held in objects:
            held.ref_count_down()
        return cost

    def _write(self, disk: LocalDiskBackend, objects: list[object]) -> None:
        disk.batched_submit_put_task(self._keys, objects)
        while disk.disk_worker.put_tasks:
            time.sleep(2e-4)
        for path in [*map(disk._key_to_path, self._keys), disk.path]:  # noqa: SLF001
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def _erase(self, disk: LocalDiskBackend) -> None:
        for key in self._keys:
            if disk.contains(key):
                disk.remove(key)
        # 0.5.6 keeps charging for what was removed by key.
        disk.current_cache_size = 0.0

    def disk_get(self, direct: bool, batched: bool) -> Cost:  # noqa: FBT001  comes out of a JSON list
        """Read all blocks, none of them in the page cache."""
        disk = self._disks[direct]
        forget_pages(Path(disk.path))
        return timed(partial(self._read_batches if batched else self._read_each, disk))

    def _read_batches(self, disk: LocalDiskBackend) -> None:
        for part in self._batches():
            for held in disk.batched_get_blocking(self._keys[part]):
                held.ref_count_down()

    def _read_each(self, disk: LocalDiskBackend) -> None:
        for key in self._keys:
            disk.get_blocking(key).ref_count_down()


def main() -> None:
    # LMCache logs to standard output, which is the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    peer = Peer(Path(sys.argv[1]))
    operations: dict[str, Callable[..., Cost]] = {
        "open": peer.open,
        "cpu_put": peer.cpu_put,
        "cpu_get": peer.cpu_get,
        "cpu_get_in_place": peer.cpu_get_in_place,
        "disk_put": peer.disk_put,
        "disk_get": peer.disk_get,
    }
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        print(json.dumps(operations[operation](*arguments)), file=answers, flush=True)
    # LMCache's threads do not end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
