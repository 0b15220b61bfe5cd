"""What clients do when connections break, bytes are damaged, servers are silent: against real sockets."""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_world import LAYOUT, Service, blocks, serving
from patience import PATIENCE, until

import kvtier.client
from kvtier.client import AsyncClient, Client, ClientOptions, Event, Gap
from kvtier.client.errors import (
    Busy,
    ClientError,
    DeadlineExceeded,
    Interrupted,
    ProtocolError,
    Unauthorized,
    Unreachable,
    WrongDigest,
)
from kvtier.service.cache import Scope, Tokens

PLAIN = ClientOptions(data="never", backoff=0.005, longest_backoff=0.05)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("service"), max_events=8) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    service.forget()
    with Client(service.url, options=PLAIN) as client:
        client.create_namespace("n", LAYOUT)
        yield client


# ---- damage on the way


class Damaging(httpx.HTTPTransport):
    """Flips a bit of the first `times` bodies."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if response.status_code != 200 or not self.times:
            return response
        self.times -= 1
        body = bytearray(response.read())
        body[len(body) // 2] ^= 1
        return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(bytes(body)))


@pytest.mark.parametrize("many", [False, True])
def test_damage_is_found_asked_for_again_once_and_then_told(client: Client, service: Service, *, many: bool) -> None:
    (block,) = blocks(1)
    client.put("n", block)

    def read(times: int) -> bytes:
        with Client(service.url, options=PLAIN, transport=Damaging(times)) as other:
            found = other.get_many("n", [block.key])[0] if many else other.get("n", block.key)
            assert found is not None
            return bytes(found.data)

    assert read(1) == block.data
    with pytest.raises(WrongDigest):
        read(2)


# ---- servers that do not do their part


@contextmanager
def listening(talk: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[int]]]:
    """A server that does `talk` with each connection; its URL, and how many came."""
    seen: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            seen.append(1)
            with connection:
                try:
                    connection.recv(65536)
                    talk(connection)
                except OSError:
                    pass

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(PATIENCE)


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(1000):
        connection.sendall(b"x")
        time.sleep(0.02)


def silent(connection: socket.socket) -> None:
    connection.settimeout(20)
    connection.recv(1)


@pytest.mark.parametrize("talk", [silent, drip])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_no_call_takes_longer_than_its_deadline(kind: type, talk: Callable[[socket.socket], None]) -> None:
    with listening(talk) as (url, _):
        client = kind(url, options=PLAIN)
        start = time.monotonic()
        call = client.stats if kind is Client else lambda timeout: asyncio.run(client.stats(timeout=timeout))
        with pytest.raises(DeadlineExceeded):
            call(timeout=0.2)
        # Either of them would take twenty seconds.
        assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("answer", "error", "tries"),
    [
        (b"", Interrupted, 4),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf", Interrupted, 4),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", ProtocolError, 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n{{{{", ProtocolError, 1),
        (b"SSH-2.0-OpenSSH\r\n", Interrupted, 4),
        (b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", ClientError, 1),
    ],
)
def test_answers_that_are_none(answer: bytes, error: type[ClientError], tries: int) -> None:
    with listening(lambda connection: connection.sendall(answer)) as (url, seen), Client(url, options=PLAIN) as client:
        with pytest.raises(error):
            client.namespaces()
        assert len(seen) == tries


def test_verbs_that_are_not_idempotent_are_sent_once() -> None:
    with listening(lambda connection: None) as (url, seen), Client(url, options=PLAIN) as client:
        with pytest.raises(Interrupted):
            client.pin("n", [b"k" * 16], 1.0)
        assert len(seen) == 1


@contextmanager
def bound() -> Iterator[int]:
    """A port where nobody listens, nor can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_nobody_there() -> None:
    with (
        bound() as port,
        Client(f"http://127.0.0.1:{port}", options=PLAIN) as client,
        pytest.raises(Unreachable, match=str(port)),
    ):
        client.stats()


# ---- back-pressure and tokens of the real service


def test_a_service_that_drains_is_busy_until_it_resumes(client: Client) -> None:
    (block,) = blocks(1)
    client.put("n", block)
    client.drain()
    try:
        with pytest.raises(Busy) as caught:
            client.match("n", [block.key], timeout=4)  # it is to come back in five
        assert caught.value.code == "draining"
        assert caught.value.retry_after
    finally:
        client.resume()
    assert client.match("n", [block.key]).tiers == ("host",)


def test_tokens_open_their_own_doors(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens = Tokens.open(path)
    secret = tokens.create("default", [Scope.READ])
    with serving(tmp_path, tokens=path) as service:
        with Client(service.url) as client, pytest.raises(Unauthorized):
            client.namespaces()
        with Client(service.url, token=secret) as client:
            assert client.namespaces() == []
            with pytest.raises(ClientError) as caught:
                client.create_namespace("n")
            assert getattr(caught.value, "code", "") == "forbidden"


# ---- ports that come and go


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_without_its_data_port_rest_carries_on(tmp_path: Path, kind: type) -> None:
    (block,) = blocks(1)

    async def waited(client: Any, verb: str, *arguments: Any) -> Any:
        found = getattr(client, verb)(*arguments)
        return await found if kind is AsyncClient else found

    async def scenario(service: Service) -> None:
        client = kind(service.url, options=ClientOptions(backoff=0.005))
        await waited(client, "create_namespace", "n", LAYOUT)
        await waited(client, "put", "n", block)
        assert client.way == "shared memory"
        service.data.close()
        found = await waited(client, "get", "n", block.key)
        assert bytes(found.data) == block.data
        await waited(client, "close")

    with serving(tmp_path) as service:
        asyncio.run(scenario(service))


def test_a_port_that_is_gone_is_left_for_the_next_one(tmp_path: Path) -> None:
    (block,) = blocks(1)
    with serving(tmp_path) as service, Client(service.url, options=ClientOptions(backoff=0.005)) as client:
        client.create_namespace("n", LAYOUT)
        client.put("n", block)
        assert client.way == "shared memory"
        assert service.socket is not None
        service.socket.unlink()
        for connection in list(service.data._connections):
            connection.kill()
        ways = []
        for _ in range(2):
            found = client.get("n", block.key)
            assert found is not None
            assert bytes(found.data) == block.data
            ways.append(client.way)
        assert ways == ["rest", "data"]


# ---- events


def hang_up(service: Service) -> None:
    """Every connection to the REST port breaks."""
    state = service.rest.server.server_state
    for connection in list(state.connections):
        connection.loop.call_soon_threadsafe(connection.transport.abort)
    until(lambda: not state.connections)


def test_events_go_on_where_their_connection_broke(client: Client, service: Service) -> None:
    chain = blocks(4)
    events = client.events(f"{service.cache.events(_local()).last}")
    client.put("n", chain[0])
    first = next(events)
    assert isinstance(first, Event)
    assert (first.kind, first.tier, first.namespace, first.part) == ("stored", "host", "n", 0)
    assert first.keys == (chain[0].key[:16],)
    hang_up(service)
    client.put("n", chain[1])
    client.delete("n", [chain[0].key])
    second, third = next(events), next(events)
    assert isinstance(second, Event)
    assert isinstance(third, Event)
    assert (second.sequence, third.sequence) == (first.sequence + 1, first.sequence + 2)
    assert second.keys == (chain[1].key[:16],)
    assert third.kind == "removed"


def test_lost_events_are_told_as_a_gap(client: Client, service: Service) -> None:
    client.put("n", blocks(1)[0])
    last = service.cache.events(_local()).last
    events = client.events(f"{service.cache.events(_local()).epoch}-{last - 1}")
    first = next(events)
    assert isinstance(first, Event)
    hang_up(service)
    for seed in range(1, 20):
        client.put("n", blocks(1, seed=seed)[0])
    gap, following = next(events), next(events)
    assert isinstance(gap, Gap)
    assert isinstance(following, Event)
    assert first.sequence < gap.sequence == following.sequence - 1


def test_a_service_that_began_anew_is_a_gap(client: Client, service: Service) -> None:
    client.put("n", blocks(1)[0])
    found = next(client.events(f"{'0' * 16}-{service.cache.events(_local()).last}"))
    assert isinstance(found, Gap)


def test_async_events_are_the_same(client: Client, service: Service) -> None:
    last = str(service.cache.events(_local()).last)

    async def scenario() -> list[Event | Gap]:
        async with AsyncClient(service.url, options=PLAIN) as other:
            found = []
            async for event in other.events(last):
                found.append(event)
                if len(found) == 2:
                    return found
                await asyncio.to_thread(hang_up, service)
                await asyncio.to_thread(client.put, "n", blocks(1, seed=2)[0])
            return found

    writer = threading.Timer(0.2, client.put, ("n", blocks(1)[0]))
    writer.start()
    found = asyncio.run(scenario())
    writer.join()
    assert [event.kind for event in found if isinstance(event, Event)] == ["stored", "stored"]


def test_followers_give_up_when_told_to() -> None:
    with bound() as port, Client(f"http://127.0.0.1:{port}", options=PLAIN) as client, pytest.raises(Unreachable):
        next(client.events(patience=0.1))


def _local() -> Any:
    from kvtier.service.cache import LOCAL

    return LOCAL


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvtier.client.client")
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match=r"httpx is missing: pip install 'kvtier\[client\]'"):
        _ = kvtier.client.Client
