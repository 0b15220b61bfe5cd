"""A real data port for tests: two tenants, tokens, TCP and a Unix socket; and conversations with it byte by byte."""

import contextlib
import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from patience import PATIENCE, came_true

from kvtier.client.data import DataClient
from kvtier.client.results import Block
from kvtier.config import ServiceSettings, TieringSettings
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.service.cache import Cache, Scope, Tokens
from kvtier.service.data import DataServer

BLOCK = 64 << 10
HEADER = struct.Struct("<4sBBHIIQ")
ALL = tuple(Scope)

# One part of 64 KiB.
PLAIN = Layout(16, (LayerGroup(GroupKind.GQA, tuple(range(16)), 2, 2, 16, dtype="float32"),))
# Two groups and two shards: four parts, of two sizes.
PARTS = Layout(
    16,
    (
        LayerGroup(GroupKind.GQA, (0, 1), 2, 2, 16, dtype="float32"),
        LayerGroup(GroupKind.MLA, (2,), 1, 1, 48, rope_dim=16, dtype="float32"),
    ),
    shards=2,
)


class World:
    """A service of two tenants, `red` and `blue`, with a data port. `token`: by tenant; `settings` as they are."""

    def __init__(self, directory: Path, *, tiering: dict[str, Any] | None = None, **more: Any) -> None:
        self.directory = directory
        tenants = directory / "tenants.toml"
        tenants.write_text('[red]\nhost = "16MiB"\n[blue]\nhost = "16MiB"\n')
        self.settings = ServiceSettings(
            **{
                "port": 0,
                "data_port": 0,
                "socket": directory / "data.sock",
                "tokens": directory / "tokens.json",
                "tenants": tenants,
                "max_block": "4MiB",
                "max_batch": "32MiB",
                "inflight_bytes": "64MiB",
                "idle_timeout": 5.0,
                "request_timeout": 5.0,
                **more,
            }
        )
        self.tokens = Tokens.open(self.settings.tokens)
        self.token = {name: self.tokens.create(name, ALL) for name in ("red", "blue")}
        self.cache = Cache.open(self.settings, TieringSettings(**(tiering or {"host": {"capacity": "32MiB"}})))
        self.start()

    def start(self) -> None:
        self.server = DataServer(self.cache, self.tokens, self.settings)
        self.server.start()

    @property
    def tcp(self) -> str:
        address = self.server.address
        assert address is not None
        return f"{address[0]}:{address[1]}"

    @property
    def unix(self) -> str:
        return f"unix:{self.settings.socket}"

    def client(self, way: str = "tcp", tenant: str = "red", **more: Any) -> DataClient:
        address = self.tcp if way == "tcp" else self.unix
        return DataClient(address, self.token[tenant], **{"shared": way == "shared", "timeout": 20.0, **more})

    def talk(self, way: str = "tcp") -> Self:
        return Talk(self.server.address if way == "tcp" else str(self.settings.socket))

    def holds(self) -> dict[str, int]:
        """Everything that a connection could leave behind."""
        tenants = self.cache.stats(self.admin).tenants
        stats = [tenant.tiers for tenant in tenants]
        return {
            "connections": self.server.connections,
            "buffers": self.server.buffer_bytes,
            "readings": sum(tenant.leases for tenant in tenants),
            "leases": sum(tiers["store"]["leases"] + tiers["host"]["leases"] for tiers in stats),
            "reservations": sum(tiers["host"]["reservations"] for tiers in stats),
        }

    @property
    def admin(self) -> Any:
        return self.tokens.caller(self.token["red"])

    def settled(self) -> dict[str, int]:
        """The same, once every connection is over."""
        came_true(lambda: not any(self.holds().values()))
        return self.holds()

    def close(self) -> None:
        self.server.close()
        self.cache.close()


NOTHING = {"connections": 0, "buffers": 0, "readings": 0, "leases": 0, "reservations": 0}


class Talk:
    """One connection, spoken by hand: `struct` for headers, plain maps for heads."""

    def __init__(self, address: tuple[str, int] | str | None) -> None:
        self.sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self.sock.settimeout(30)
        self.sock.connect(address)

    def send(self, opcode: int, fields: object, payload: bytes = b"", *, request: int = 1, **wrong: Any) -> None:
        self.sock.sendall(message(opcode, fields, payload, request=request, **wrong))

    def receive(self) -> tuple[int, int, int, dict[str, Any], bytes] | None:
        """Opcode, flags, request, head and body of the next answer; None: the service closed."""
        try:
            raw = self._exactly(HEADER.size)
        except ConnectionError:
            return None
        if raw is None:
            return None
        magic, version, opcode, flags, request, head, body = HEADER.unpack(raw)
        assert (magic, version) == (b"KVTD", 1)
        content = self._exactly(head), self._exactly(body)
        assert None not in content
        return opcode, flags, request, msgspec.msgpack.decode(content[0]), content[1] or b""

    def ask(self, opcode: int, head: object, body: bytes = b"", request: int = 1) -> dict[str, Any]:
        """The head of the answer, which is no error."""
        self.send(opcode, head, body, request=request)
        answer = self.receive()
        assert answer is not None
        assert answer[:3] == (opcode, 1, request), answer
        return answer[3]

    def refused(self) -> str | None:
        """The code of the error that comes next; None: the service closed."""
        answer = self.receive()
        if answer is None:
            return None
        assert answer[1] == 3, answer
        return str(answer[3]["code"])

    def hello(self, token: str) -> dict[str, Any]:
        return self.ask(1, {"versions": [1], "token": token}, request=0)

    def _exactly(self, nbytes: int) -> bytes | None:
        data = b""
        while len(data) < nbytes:
            part = self.sock.recv(nbytes - len(data))
            if not part:
                return None
            data += part
        return data

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def message(opcode: int, fields: object, payload: bytes = b"", *, request: int = 1, **wrong: Any) -> bytes:
    """A request's bytes; `wrong`: fields of the header that are not as they should be."""
    packed = fields if isinstance(fields, bytes) else msgspec.msgpack.encode(fields)
    header = {"magic": b"KVTD", "version": 1, "opcode": opcode, "flags": 0, "request": request}
    header |= {"head": len(packed), "body": len(payload), **wrong}
    return HEADER.pack(*header.values()) + packed + payload


def chain(count: int, name: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{name}/{at}".encode()).digest() for at in range(count)]


def content(key: bytes, nbytes: int = BLOCK, part: int = 0) -> bytes:
    seed = int.from_bytes(key[:8], "little") + part
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def blocks(keys: Sequence[bytes], nbytes: int = BLOCK) -> list[Block]:
    """A chain's blocks, of one part."""
    parents = [None, *keys[:-1]]
    return [
        Block(key, content(key, nbytes), parent=parent, depth=at)
        for at, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]


def descriptors(at_most: int = 0) -> int:
    """How many are open, once they are no more than `at_most`, or after a while."""
    came_true(lambda: _descriptors() <= at_most, PATIENCE if at_most else 0)
    return _descriptors()


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier-data"))


@contextlib.contextmanager
def world(directory: Path, **more: Any) -> Iterator[World]:
    made = World(directory, **more)
    try:
        yield made
    finally:
        made.close()


def layout_json(layout: Layout) -> str:
    return json.dumps(msgspec.to_builtins(layout))
