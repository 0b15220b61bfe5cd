"""One client of `service.py` for LMCache's TCP server (`lm://`), in LMCache's own environment.

It is `LMCServerConnector`, awaited in the calling thread: `RemoteBackend`, by which an engine reaches it, adds a hop to
another thread and a serde, and no batches, since the protocol has none.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from harness import require
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from service_client import SEED_SHIFT, answer

LAYERS, WIDTH = 8, 64
TOKEN_BYTES = 2 * LAYERS * WIDTH * 2  # K and V, bfloat16
POOL_GIB = 0.125
CLIENTS = 8
KEPT_BYTES = 128 << 20


class LMCache:
    """LMCache's server at "host:port".

    What is put lies in the caller's memory, what is got in the connector's pool, where an engine would use it.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        config = LMCacheEngineConfig.from_defaults(max_local_cpu_size=POOL_GIB)
        metadata = LMCacheMetadata("benchmark", 1, 1, 0, 0, torch.bfloat16, (LAYERS, 2, 256, 1, WIDTH))
        pool = LocalCPUBackend(config, metadata, "cpu")
        self._loop = asyncio.new_event_loop()
        self._connector = LMCServerConnector(host, int(port), self._loop, pool)
        self._names: dict[bytes, CacheEngineKey] = {}
        self._last: MemoryObj | None = None

    def put(self, keys: Sequence[bytes], data: Sequence[memoryview]) -> None:
        if not self._names:
            self._loop.run_until_complete(self._fill(int.from_bytes(keys[0], "big"), data))
        self._loop.run_until_complete(self._put(keys, data))

    async def _fill(self, first: int, data: Sequence[memoryview]) -> None:
        """Put once under every name, in the round that is thrown away: those after it find the server full."""
        nbytes = data[0].nbytes
        for number in range(first, first + KEPT_BYTES // nbytes):
            await self._connector.put(_name(number, nbytes), _wrapped(data[number % len(data)]))

    async def _put(self, keys: Sequence[bytes], data: Sequence[memoryview]) -> None:
        for key, view in zip(keys, data, strict=True):
            name = self._names[key] = _name(int.from_bytes(key, "big"), view.nbytes)
            await self._connector.put(name, _wrapped(view))
        # The server acknowledges no put. It does what one connection asks for in that order, though.
        require(await self._connector.exists(self._names[keys[-1]]), "a put was dropped")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> memoryview:
        if self._last is not None:
            self._last.ref_count_down()
        self._last = self._loop.run_until_complete(self._get(keys))
        require(self._last.get_size() == into[-1].nbytes, "a get was cut")
        return np.frombuffer(self._last.byte_array, np.uint8).data

    async def _get(self, keys: Sequence[bytes]) -> MemoryObj:
        """All of them; the last one is the caller's."""
        found = [await self._connector.get(self._names[key]) for key in keys]
        require(None not in found, "a get missed")
        for held in found[:-1]:
            held.ref_count_down()
        return found[-1]

    def match(self, keys: Sequence[bytes]) -> int:
        names = [self._names[key] for key in keys]
        return int(self._loop.run_until_complete(self._connector.batched_async_contains("match", names)))


def _name(number: int, nbytes: int) -> CacheEngineKey:
    """Names come again: the server never evicts, and keeps `KEPT_BYTES` for each of so many clients at a time."""
    seed, count = divmod(number, 1 << SEED_SHIFT)
    return CacheEngineKey("benchmark", CLIENTS, seed % CLIENTS, count % (KEPT_BYTES // nbytes), torch.bfloat16)


def _wrapped(view: memoryview) -> TensorMemoryObj:
    shape = torch.Size([2, LAYERS, view.nbytes // TOKEN_BYTES, WIDTH])
    metadata = MemoryObjMetadata(shape, torch.bfloat16, 0, view.nbytes, 1, 0, MemoryFormat.KV_2LTD)
    return TensorMemoryObj(torch.frombuffer(view, dtype=torch.uint8), metadata, None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer({"lmcache": LMCache})
