"""A client that is written from docs/data-port.md alone: `struct`, MessagePack, sockets and mmap, nothing of kvtier."""

import mmap
import os
import re
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from data_world import PARTS, World, chain, content, layout_json

HEADER = struct.Struct("<4sBBHIIQ")
ANSWER, ERROR, MORE, QUIET = 1, 2, 4, 8
HELLO, MATCH, MATCH_TOKENS, GET, PUT, DELETE, PIN, UNPIN = range(1, 9)
CREATE, SHARE, LEASE, RELEASE, STAGE, LIST = 15, 17, 18, 19, 20, 21
SIZE = 300_000


class PlainClient:
    def __init__(self, address: str | tuple[str, int], token: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self.sock.settimeout(10)
        self.sock.connect(address)
        self.number = 0
        self.welcome = self.call(HELLO, {"versions": [1], "token": token})[0]

    def call(self, opcode: int, head: dict[str, Any], body: bytes = b"") -> tuple[dict[str, Any], bytes]:
        self.send(opcode, head, body)
        flags, answer, data = self.receive(opcode)
        assert flags == ANSWER
        return answer, data

    def send(self, opcode: int, head: dict[str, Any], body: bytes = b"", flags: int = 0) -> None:
        packed = msgspec.msgpack.encode(head)
        self.number += 1
        header = HEADER.pack(b"KVTD", 1, opcode, flags, self.number, len(packed), len(body))
        self.sock.sendall(header + packed + body)

    def receive(self, opcode: int) -> tuple[int, dict[str, Any], bytes]:
        magic, version, repeated, flags, number, head, body = HEADER.unpack(self.exactly(HEADER.size))
        assert (magic, version, repeated, number) == (b"KVTD", 1, opcode, self.number)
        return flags, msgspec.msgpack.decode(self.exactly(head)), self.exactly(body)

    def exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            part = self.sock.recv(min(1 << 20, nbytes - len(data)))
            assert part
            data += part
        return bytes(data)

    def regions(self) -> dict[int, mmap.mmap]:
        """What follows the answer to a share."""
        data, descriptors, _, _ = socket.recv_fds(self.sock, 4, 16)
        (count,) = struct.unpack("<I", data)
        assert count == len(descriptors)
        mapped = {}
        for descriptor in descriptors:
            region, nbytes, writable = struct.unpack("<QQ?", self.exactly(17))
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapped[region] = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, access)
            os.close(descriptor)
        return mapped


def address_of(service: World, way: str) -> str | tuple[str, int]:
    address = service.server.address
    assert address is not None
    return address if way == "tcp" else str(service.settings.socket)


def put_head(keys: list[bytes]) -> dict[str, Any]:
    parents = [bytes(32), *keys[:-1]]
    return {
        "ns": "document",
        "keys": b"".join(keys),
        "width": 32,
        "sizes": [SIZE] * len(keys),
        "depths": list(range(len(keys))),
        "parents": b"".join(parents),
    }


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_the_document_is_enough(service: World, way: str) -> None:
    client = PlainClient(address_of(service, way), service.token["red"])
    assert client.welcome["version"] == 1
    assert client.welcome["tenant"] == "red"
    assert client.welcome["limits"]["keys"] == 8192
    made, _ = client.call(CREATE, {"name": "document"})
    assert made["namespaces"][0]["parts"] == 1
    keys = chain(40, f"document.{way}")
    bodies = [content(key, SIZE) for key in keys]
    digests = b"".join(xxhash.xxh3_128(body).digest() for body in bodies)
    answer, _ = client.call(PUT, {**put_head(keys), "digests": digests}, b"".join(bodies))
    assert answer == {"outcomes": [["stored", 40]]}
    assert client.call(MATCH, {"ns": "document", "keys": b"".join(key[:16] for key in keys)})[0] == {
        "tiers": [["host", 40]]
    }
    client.send(GET, {"ns": "document", "keys": b"".join(keys) + bytes(32), "width": 32, "digests": True})
    seen: list[int] = []
    flags = MORE
    while flags & MORE:
        flags, got, data = client.receive(GET)
        assert not flags & ERROR
        for place, at in enumerate(got.get("at", [])):
            assert data[place * SIZE : (place + 1) * SIZE] == bodies[at]
            assert got["digests"][16 * place : 16 * place + 16] == digests[16 * at : 16 * at + 16]
            assert got["parents"][16 * place : 16 * place + 16] == (keys[at - 1][:16] if at else bytes(16))
            assert got["depths"][place] == at
        seen += got.get("at", [])
    assert seen == list(range(40))
    read_unchecked(client, keys, bodies)
    client.send(LIST, {"ns": "document"})
    listed, flags = set(), MORE
    while flags & MORE:
        flags, some, _ = client.receive(LIST)
        listed |= {some["keys"][at : at + 16] for at in range(0, len(some.get("keys", b"")), 16)}
    assert listed == {key[:16] for key in keys}
    assert client.call(DELETE, {"ns": "document", "keys": keys[1][:16]})[0] == {"deleted": 1}
    # A quiet request is not answered, and the next one is.
    client.send(DELETE, {"ns": "document", "keys": keys[0][:16]}, flags=QUIET)
    assert client.call(MATCH, {"ns": "document", "keys": keys[0][:16]})[0] == {"tiers": []}
    client.send(MATCH, {"ns": "absent", "keys": bytes(16)})
    flags, error, _ = client.receive(MATCH)
    assert (flags, error["status"], error["code"]) == (ANSWER | ERROR, 404, "unknown_namespace")
    client.sock.close()


def read_unchecked(client: PlainClient, keys: list[bytes], bodies: list[bytes]) -> None:
    asked = {"ns": "document", "keys": b"".join(keys), "width": 32, "unchecked": True}
    client.send(GET, asked)
    flags, sound = MORE, 0
    while flags & MORE:
        flags, got, data = client.receive(GET)
        for place, at in enumerate(got["at"]):
            body, head = data[place * SIZE : (place + 1) * SIZE], got["heads"][64 * place : 64 * (place + 1)]
            assert body == bodies[at]
            sound += xxhash.xxh3_128_digest(head + body) == got["checksums"][16 * place : 16 * (place + 1)]
    assert sound == len(keys)
    for field in ({"digests": True}, {"limit": 8}):
        client.send(GET, asked | field)
        assert client.receive(GET)[1]["code"] == "invalid"


def test_parts_and_token_ids(service: World) -> None:
    client = PlainClient(address_of(service, "tcp"), service.token["red"])
    made, _ = client.call(CREATE, {"name": "document-parts", "layout": layout_json(PARTS)})
    sizes = made["namespaces"][0]["block_bytes"]
    assert sizes == [8192, 8192, 4096, 4096]
    tokens = struct.pack("<32I", *range(32))
    named, _ = client.call(MATCH_TOKENS, {"ns": "document-parts", "tokens": tokens})
    assert named["tiers"] == []
    keys = [named["keys"][at : at + 32] for at in (0, 32)]
    head = {
        "ns": "document-parts",
        "width": 32,
        "keys": b"".join(key for key in keys for _ in range(4)),
        "parts": [0, 1, 2, 3] * 2,
        "sizes": sizes * 2,
        "depths": [0] * 4 + [1] * 4,
        "parents": bytes(32) * 4 + keys[0] * 4,
    }
    body = b"".join(content(key, sizes[part], part) for key in keys for part in range(4))
    assert client.call(PUT, head, body)[0] == {"outcomes": [["stored", 8]]}
    assert client.call(MATCH_TOKENS, {"ns": "document-parts", "tokens": tokens})[0]["tiers"] == [["host", 2]]
    pin, _ = client.call(PIN, {"ns": "document-parts", "keys": b"".join(keys), "width": 32, "ttl": 5.0})
    assert pin["blocks"] == 2
    assert client.call(UNPIN, {"id": pin["id"]})[0] == {}
    client.sock.close()


def test_shared_memory(service: World) -> None:
    client = PlainClient(address_of(service, "unix"), service.token["red"])
    assert client.welcome["shared"]
    client.call(CREATE, {"name": "document"})
    shared, _ = client.call(SHARE, {"staging": 1 << 20})
    regions = client.regions()
    assert {region["id"] for region in shared["regions"]} == regions.keys()
    keys = chain(3, "document.shared")
    staging = regions[shared["staging"]]
    for at, key in enumerate(keys):
        staging[at * SIZE : (at + 1) * SIZE] = content(key, SIZE)
    staged, _ = client.call(STAGE, {**put_head(keys), "offsets": [0, SIZE, 2 * SIZE]})
    assert staged == {"outcomes": [["stored", 3]]}
    lease, _ = client.call(LEASE, {"ns": "document", "keys": b"".join(keys), "width": 32})
    for at, region, offset, nbytes in zip(lease["at"], lease["regions"], lease["offsets"], lease["sizes"], strict=True):
        assert regions[region][offset : offset + nbytes] == content(keys[at], SIZE)
    assert "checksums" not in lease or not lease["checksums"]
    assert client.call(RELEASE, {"leases": [lease["lease"]]})[0] == {}
    unchecked, _ = client.call(LEASE, {"ns": "document", "keys": b"".join(keys), "width": 32, "unchecked": True})
    for at, key in enumerate(keys):
        guarded = unchecked["heads"][64 * at : 64 * (at + 1)] + content(key, SIZE)
        assert xxhash.xxh3_128_digest(guarded) == unchecked["checksums"][16 * at : 16 * (at + 1)]
    assert client.call(RELEASE, {"leases": [unchecked["lease"]]})[0] == {}
    client.send(RELEASE, {"leases": [lease["lease"]]})
    assert client.receive(RELEASE)[1]["code"] == "invalid"
    client.sock.close()


def test_the_document_lists_every_opcode_and_field() -> None:
    from kvtier.wire.messages import REQUESTS

    text = (Path(__file__).parents[3] / "docs/data-port.md").read_text()
    for opcode, kind in REQUESTS.items():
        assert re.search(rf"^\| {int(opcode)} {opcode.name.lower().replace('_', ' ')} \|", text, re.MULTILINE), opcode
        for field in msgspec.structs.fields(kind):
            assert f"`{field.name}`" in text, (opcode, field.name)
