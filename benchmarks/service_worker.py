"""One client of `service.py`, a process of its own: kvtier's ways to blocks, and those of all peers but LMCache."""

import itertools
import socket
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import valkey
from harness import require
from service_client import Target, answer
from service_peers import COLD_GET, COLD_PUT, GET, PUT

from kvtier.client import Block, Client, ClientOptions
from kvtier.client.data import DataClient


class DataPort:
    """kvtier's data port: "tcp:host:port", "unix:PATH", "shm:PATH"."""

    def __init__(self, address: str) -> None:
        way, _, place = address.partition(":")
        self._client = DataClient(place if way == "tcp" else f"unix:{place}", shared=way == "shm", timeout=60)
        self._client.create_namespace(f"bench.{way}")
        self._ns = f"bench.{way}"

    def put(self, keys: Sequence[bytes], data: Sequence[memoryview]) -> None:
        parents = [None, *keys[:-1]]
        blocks = [Block(key, view, 0, parents[at], at) for at, (key, view) in enumerate(zip(keys, data, strict=True))]
        require(set(self._client.put_many(self._ns, blocks)) == {"stored"}, "a put was dropped")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> memoryview | bytes:
        require(len(self._client.get_many(self._ns, keys, into=into)) == len(keys), "a get missed")
        return into[-1]

    def match(self, keys: Sequence[bytes]) -> int:
        return len(self._client.match(self._ns, keys).tiers)


class InPlace(DataPort):
    """The same, with blocks read where they lie: the service verifies and leases them, nobody copies."""

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> memoryview | bytes:
        with self._client.lease(self._ns, keys) as lease:
            require(len(lease.blocks) == len(keys), "a get missed")
            return bytes(lease.blocks[-1].data)


class Rest:
    """kvtier's REST port, without the data port."""

    def __init__(self, address: str) -> None:
        self._client = Client(address, options=ClientOptions(data="never", timeout=60))
        self._client.create_namespace("bench.rest")

    def put(self, keys: Sequence[bytes], data: Sequence[memoryview]) -> None:
        parents = [None, *keys[:-1]]
        blocks = [Block(key, view, 0, parents[at], at) for at, (key, view) in enumerate(zip(keys, data, strict=True))]
        require(set(self._client.put_many("bench.rest", blocks)) == {"stored"}, "a put was dropped")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> memoryview | bytes:
        found = self._client.get_many("bench.rest", keys)
        require(len(found) == len(into), "a get missed")
        return found[-1].data

    def match(self, keys: Sequence[bytes]) -> int:
        return len(self._client.match("bench.rest", keys).tiers)


class Valkey:
    """Valkey with valkey-py: "single:PORT" one command at a time, "batch:PORT" pipelined puts and MGET."""

    def __init__(self, address: str) -> None:
        way, _, port = address.partition(":")
        self._batch = way == "batch"
        self._client = valkey.Valkey(port=int(port))

    def put(self, keys: Sequence[bytes], data: Sequence[memoryview]) -> None:
        if self._batch:
            pipeline = self._client.pipeline(transaction=False)
            for key, view in zip(keys, data, strict=True):
                pipeline.set(key, view)
            require(all(pipeline.execute()), "a put was dropped")
            return
        for key, view in zip(keys, data, strict=True):
            require(bool(self._client.set(key, view)), "a put was dropped")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> memoryview | bytes:
        found = self._client.mget(list(keys)) if self._batch else [self._client.get(key) for key in keys]
        require(all(found), "a get missed")
        return bytes(found[-1])

    def match(self, keys: Sequence[bytes]) -> int:
        return int(self._client.exists(*keys))


class Raw:
    """A socket and a preallocated buffer on both ends: "host:port" or a path; `cold`: other bytes of it each time."""

    def __init__(self, address: str, *, cold: bool = False) -> None:
        self._put, self._get = (COLD_PUT, COLD_GET) if cold else (PUT, GET)
        local = address.startswith("/")
        self._sock = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
        host, _, port = address.rpartition(":")
        self._sock.connect(address if local else (host, int(port)))

    def put(self, keys: Sequence[bytes], data: Sequence[memoryview]) -> None:
        self._sock.sendall(self._put + (sum(view.nbytes for view in data)).to_bytes(8, "little"))
        for view in data:
            self._sock.sendall(view)
        require(self._sock.recv(1) == self._put, f"the peer took {len(keys)} blocks and did not say so")

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> memoryview | bytes | None:
        self._sock.sendall(self._get + (sum(view.nbytes for view in into)).to_bytes(8, "little"))
        for view in into:
            require(self._sock.recv_into(view, 0, socket.MSG_WAITALL) == view.nbytes, f"{len(keys)} blocks were cut")
        return into[-1] if self._get == GET else None

    def match(self, keys: Sequence[bytes]) -> int:
        return len(keys)


class Memory:
    """memcpy within the process: "1" always the same bytes, which caches keep; "4" those of another call each time."""

    def __init__(self, address: str) -> None:
        self._count = int(address)
        self._kept: list[list[memoryview]] = []
        self._turn = itertools.count()

    def put(self, keys: Sequence[bytes], data: Sequence[memoryview]) -> None:
        if not self._kept:
            self._kept = [[np.ones(view.nbytes, np.uint8).data for view in data] for _ in range(self._count)]
            for kept in self._kept:
                self._copy(data, kept)
        self._copy(data, self._next()[: len(keys)])

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> memoryview | bytes:
        self._copy(self._next()[: len(keys)], into)
        return into[-1]

    def _next(self) -> list[memoryview]:
        return self._kept[next(self._turn) % self._count]

    @staticmethod
    def _copy(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def match(self, keys: Sequence[bytes]) -> int:
        return len(keys)


TARGETS: dict[str, Callable[[str], Target]] = {
    "data": DataPort,
    "rest": Rest,
    "place": InPlace,
    "valkey": Valkey,
    "raw": Raw,
    "cold raw": partial(Raw, cold=True),
    "memory": Memory,
}


if __name__ == "__main__":
    answer(TARGETS)
