"""The REST API on a real socket: uvicorn in a thread, over a real cache. Raw connections for what no client sends."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import xxhash
from patience import until

from kvtier.config import ServiceSettings, TieringSettings
from kvtier.service.cache import Cache, Caller, Scope, TenantStats, Tokens
from kvtier.service.rest import connection_options, make_app
from kvtier.wire.blockstream import MEDIA_TYPE, STREAM_BEGIN, STREAM_END, BlockHead, StreamDecoder, record_head

KEYS = [f"{at:02x}" * 16 for at in range(1, 33)]
LAYOUT = {
    "block_size": 4,
    "groups": [{"kind": "gqa", "layers": [0], "planes": 2, "kv_heads": 1, "head_dim": 32, "dtype": "float32"}],
}
LAYOUT_BYTES = 2 * 4 * 32 * 4


class RunningRest:
    """Serves from construction to `stop`."""

    def __init__(self, cache: Cache, tokens: Tokens, settings: ServiceSettings, *, send_buffer: int = 0) -> None:
        self.cache = cache
        self.tokens = tokens
        self.app = make_app(cache, tokens, settings)
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=1,
            **connection_options(settings),
        )
        self.server = uvicorn.Server(config)
        taken = socket.create_server(("127.0.0.1", 0))
        if send_buffer:
            # What is accepted has the same.
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [taken]}, daemon=True)
        self._thread.start()
        until(lambda: self.server.started)
        self.http = self.client()

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # A connection of its own each time: a kept one may be ended by the service's idle limit while it is taken up.
        # Nothing is encrypted here, and to read a machine's certificates takes longer than most of these tests.
        return httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=20,
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=False,
        )

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def tenants(self) -> Sequence[TenantStats]:
        admin = Caller(next(iter(self.cache._tenants)), frozenset(Scope), None, "test")
        return self.cache.stats(admin).tenants

    def leases(self) -> int:
        return sum(tenant.leases + tenant.tiers["store"]["leases"] for tenant in self.tenants())

    def at_rest(self) -> None:
        """Nothing is under way, and nothing is held."""
        until(lambda: not self.server.server_state.tasks)
        until(lambda: self.leases() == 0)
        until(lambda: all(tenant.inflight_bytes == 0 for tenant in self.tenants()))

    # ---- raw

    @contextmanager
    def line(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as line:
            yield line

    def raw(self, data: bytes, *, close: bool = True) -> bytes:
        """What comes back for some bytes, after which the client sends no more."""
        with self.line() as line:
            line.sendall(data)
            if close:
                line.shutdown(socket.SHUT_WR)
            return read_all(line)


@contextmanager
def running(
    *,
    host: str = "1MiB",
    nvme: Path | None = None,
    tokens: Path | None = None,
    send_buffer: int = 0,
    **settings: Any,
) -> Iterator[RunningRest]:
    """A service with small limits."""
    sized = {"max_block": "256KiB", "max_batch": "512KiB", "inflight_bytes": "8MiB", "idle_timeout": 5.0}
    below = {}
    if nvme is not None:
        below["nvme"] = {"path": nvme / "blocks", "capacity": "16MiB", "segment_size": "4MiB", "min_free": 0}
        sized["state"] = nvme / "state"
    chosen = ServiceSettings(**{**sized, "tokens": tokens, **settings})
    cache = Cache.open(chosen, TieringSettings(host={"capacity": host}, **below))
    try:
        rest = RunningRest(cache, Tokens.open(tokens), chosen, send_buffer=send_buffer)
        try:
            yield rest
        finally:
            rest.stop()
    finally:
        cache.close()


def read_all(line: socket.socket) -> bytes:
    data = b""
    try:
        while piece := line.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message", "param"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def raw_error(answer: bytes) -> tuple[int, str]:
    """Status and code of a raw refusal."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def block(seed: int, nbytes: int = LAYOUT_BYTES) -> bytes:
    """The same bytes for the same seed."""
    return (xxhash.xxh3_128_digest(seed.to_bytes(8, "little")) * (nbytes // 16 + 1))[:nbytes]


def digest(data: bytes) -> str:
    return f"xxh3-128={xxhash.xxh3_128_hexdigest(data)}"


def stream(records: Sequence[tuple[dict[str, Any], bytes]]) -> bytes:
    return (
        STREAM_BEGIN + b"".join(record_head(BlockHead(**head), len(data)) + data for head, data in records) + STREAM_END
    )


def unstream(data: bytes) -> list[tuple[BlockHead, bytes]]:
    decoder = StreamDecoder(lambda _, nbytes: memoryview(bytearray(nbytes)))
    decoder.feed(data)
    return [(head, bytes(body)) for head, body in decoder.finish()]


def match(http: httpx.Client, ns: str, **asked: Any) -> httpx.Response:
    """Where the leading run of a prefix lies."""
    return http.post("/v1/match", json={"namespace": ns, **asked})


def put_stream(http: httpx.Client, ns: str, data: Any) -> httpx.Response:
    return http.post(f"/v1/namespaces/{ns}/blocks:put", content=data, headers={"Content-Type": MEDIA_TYPE})


def chain(count: int, *, nbytes: int = LAYOUT_BYTES, keys: Sequence[str] = KEYS) -> list[tuple[dict[str, Any], bytes]]:
    """A chain of records from depth 0 on."""
    return [
        ({"key": keys[at], "depth": at, "parent": keys[at - 1] if at else None}, block(at, nbytes))
        for at in range(count)
    ]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
