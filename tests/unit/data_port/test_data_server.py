"""Connections: who is let in, for how long, and how they end."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import trustme
from data_world import BLOCK, HEADER, NOTHING, Talk, World, blocks, chain, content, descriptors, message, threads, world
from patience import PATIENCE, until

from kvtier.client.data import DataClient
from kvtier.client.errors import (
    Busy,
    DeadlineExceeded,
    Interrupted,
    Invalid,
    NotFound,
    ProtocolError,
    Refused,
    Unauthorized,
    Unreachable,
    WrongDigest,
)
from kvtier.client.pipeline import Pipeline
from kvtier.client.stream import PlainStream
from kvtier.config import ServiceSettings
from kvtier.errors import ConfigError
from kvtier.remote.peer.link import Link
from kvtier.service.cache import Scope
from kvtier.service.data import DataServer, listing
from kvtier.service.data.connection import Connection
from kvtier.wire import Opcode
from kvtier.wire import messages as wire


def test_hello_says_who_one_is_and_what_the_limits_are(service: World) -> None:
    with service.client() as client:
        welcome = client.connect()
    assert (welcome.tenant, welcome.scopes, welcome.version) == ("red", ["admin", "read", "write"], 1)
    assert (welcome.limits.block_bytes, welcome.limits.batch_bytes, welcome.limits.idle) == (4 << 20, 32 << 20, 5.0)


@pytest.mark.parametrize("token", ["", "kvt_0123456789abcdef_" + "0" * 64, "nonsense"])
def test_nobody_without_a_token_is_let_in(service: World, token: str) -> None:
    client = DataClient(service.tcp, token)
    with pytest.raises(Unauthorized, match="no valid token"):
        client.connect()
    assert service.settled() == NOTHING


def test_scopes_hold_on_this_port(service: World) -> None:
    with service.client() as admin:
        admin.create_namespace("scoped", None)
        admin.put_many("scoped", blocks(chain(1)))
    reader = DataClient(service.tcp, service.tokens.create("red", [Scope.READ]))
    assert len(reader.get_many("scoped", chain(1))) == 1
    with pytest.raises(Refused, match="needs write"):
        reader.put_many("scoped", blocks(chain(1)))
    writer = DataClient(service.tcp, service.tokens.create("red", [Scope.WRITE]))
    assert len(writer.put_many("scoped", blocks(chain(2)))) == 2
    with pytest.raises(Refused, match="needs read"):
        writer.get_many("scoped", chain(1))
    reader.close()
    writer.close()


def test_what_a_namespace_has_is_listed_answer_by_answer(service: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_KEYS", 7)
    keys = chain(20, "listed")
    with service.client() as client, service.client(tenant="blue") as other:
        for one in (client, other):
            one.create_namespace("listed", None)
        client.put_many("listed", blocks(keys))

        def listed(secret: str) -> list[bytes]:
            until = time.monotonic() + PATIENCE
            with contextlib.closing(Pipeline(service.tcp, secret, None, until)) as pipeline:
                return Link(pipeline, until).listed("listed", until)

        assert sorted(listed(service.token["red"])) == sorted(key[:16] for key in keys)
        assert listed(service.token["blue"]) == []
        client.delete("listed", keys[10:])
        assert sorted(listed(service.tokens.create("red", [Scope.WRITE]))) == sorted(key[:16] for key in keys[:10])
        with pytest.raises(Refused, match="needs write"):
            listed(service.tokens.create("red", [Scope.READ]))
        with pytest.raises(NotFound):
            listed(service.tokens.create("red", [Scope.WRITE], ["other"]))


def test_another_tenants_blocks_are_not_there(service: World) -> None:
    with service.client() as red, service.client(tenant="blue") as blue, service.client("shared", "blue") as shared:
        red.create_namespace("same", None)
        blue.create_namespace("same", None)
        keys = chain(2, "red's")
        red.put_many("same", blocks(keys))
        assert blue.match("same", keys).tiers == ()
        assert blue.get_many("same", keys, each=True) == []
        assert shared.get_many("same", keys) == []
        assert blue.delete("same", keys) == 0
        assert len(red.get_many("same", keys)) == 2


def test_a_revoked_token_opens_nothing_any_more(service: World) -> None:
    secret = service.tokens.create("red", (Scope.READ,))
    with DataClient(service.tcp, secret) as client:
        assert client.namespaces() is not None
        service.tokens.revoke(secret.split("_")[1])
        time.sleep(1.05)
        with pytest.raises(Unauthorized):
            client.namespaces()


def test_a_client_finds_a_service_again_that_was_restarted(tmp_path: Path) -> None:
    with world(tmp_path) as service, service.client("shared") as client, service.client() as other:
        keys = chain(3)
        for one in (client, other):
            one.create_namespace("again", None)
            one.put_many("again", blocks(keys))
        port = service.server.address
        service.server.close()
        with pytest.raises((Unreachable, Interrupted)):
            other.get_many("again", keys)
        assert port is not None
        service.settings = ServiceSettings(**{**service.settings.model_dump(), "data_port": port[1]})
        service.start()
        for one in (client, other):
            assert [bytes(item.data) for item in one.get_many("again", keys)] == [content(key) for key in keys]
        assert client.shares_memory


def test_a_silent_connection_is_ended_and_a_client_does_not_notice(tmp_path: Path) -> None:
    with world(tmp_path, idle_timeout=1.0) as service, service.client() as client:
        client.create_namespace("idle", None)
        until(lambda: not service.server.connections)
        assert client.match("idle", chain(1)).tiers == ()


def test_no_more_connections_than_may_be(tmp_path: Path) -> None:
    with world(tmp_path, max_connections=2) as service:
        clients = [service.client() for _ in range(3)]
        for client in clients[:2]:
            client.connect()
        with pytest.raises((Busy, Interrupted)):
            clients[2].connect()
        clients[0].close()
        until(lambda: service.server.connections <= 1)
        clients[2].connect()
        for client in clients:
            client.close()


def test_a_tenant_with_many_connections_leaves_some_to_others(tmp_path: Path) -> None:
    with world(tmp_path, max_connections=8) as service, contextlib.ExitStack() as stack:

        def connected(tenant: str) -> DataClient:
            client = stack.enter_context(service.client(tenant=tenant))
            client.connect()
            return client

        first, *_ = [connected("red") for _ in range(6)]
        with pytest.raises(Busy, match="this tenant has 6 of 8 connections, and 2 are left for all"):
            connected("red")
        assert connected("blue").namespaces() == []
        first.close()
        until(lambda: service.server.connections == 6)
        connected("red")


def drained(service: World, busy: Talk, quiet: Talk) -> None:
    """What `busy` has asked is answered, then both are let go."""
    for talk in (busy, quiet):
        talk.hello(service.token["red"])
    busy.send(2, {"ns": "drain", "keys": bytes(16)})
    assert service.server.drain(PATIENCE)
    assert busy.receive() is not None
    assert busy.receive() is None
    assert quiet.receive() is None


def test_draining_answers_what_has_arrived_and_lets_nobody_in(tmp_path: Path) -> None:
    with world(tmp_path) as service:
        with service.client() as client:
            client.create_namespace("drain", None)
        with service.talk() as busy, service.talk("unix") as quiet:
            drained(service, busy, quiet)
        with pytest.raises(Unreachable):
            service.client().connect()
        with pytest.raises(Unreachable):
            service.client("unix").connect()
        assert service.settled() == NOTHING


def test_draining_answers_what_arrived_before_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet = Connection._greet

    def slow(self: Connection, *args: Any) -> Any:
        session = greet(self, *args)
        until(lambda: self._finishing)
        return session

    with world(tmp_path) as service:
        with service.client() as client:
            client.create_namespace("drain", None)
        monkeypatch.setattr(Connection, "_greet", slow)
        with service.talk() as busy, service.talk() as quiet:
            drained(service, busy, quiet)


def test_draining_answers_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(tmp_path) as service:
        with service.client() as client:
            client.create_namespace("drain", None)
        begun, match = threading.Event(), service.cache.match

        def slow(*args: Any, **more: Any) -> tuple[str, ...]:
            begun.set()
            until(lambda: service.server._draining)
            time.sleep(0.2)  # the connection is told to end after its answer
            return match(*args, **more)

        monkeypatch.setattr(service.cache, "match", slow)
        with service.talk() as talk:
            talk.hello(service.token["red"])
            talk.send(2, {"ns": "drain", "keys": bytes(16)})
            assert begun.wait(PATIENCE)
            assert service.server.drain(PATIENCE)
            assert talk.receive() is not None
            assert talk.receive() is None


def test_the_cache_says_that_it_drains(tmp_path: Path) -> None:
    with world(tmp_path) as service, service.client() as client:
        client.create_namespace("drain", None)
        service.cache.drain()
        with pytest.raises(Busy) as refused:
            client.match("drain", chain(1))
        assert (refused.value.code, refused.value.status) == ("draining", 503)
        assert refused.value.retry_after is not None


def test_an_address_that_is_taken_is_refused_and_nothing_stays(service: World, tmp_path: Path) -> None:
    taken = service.server.address
    assert taken is not None
    before = descriptors()
    for more in ({"data_port": taken[1]}, {"socket": service.settings.socket}):
        settings = ServiceSettings(**{"data_port": 0, "socket": tmp_path / "s", **more})
        with pytest.raises(ConfigError, match="choose"):
            DataServer(service.cache, service.tokens, settings).start()
    # The service looked after the connection with which the other one found it alive.
    assert service.settled() == NOTHING
    assert descriptors(before) <= before


def test_a_socket_that_is_anothers_by_now_is_left_alone(tmp_path: Path) -> None:
    with world(tmp_path) as service:
        socket_path = tmp_path / "data.sock"
        socket_path.rename(tmp_path / "moved.sock")
        other = DataServer(service.cache, service.tokens, service.settings)
        other.start()
        try:
            service.server.close()
            with service.client("unix") as client:
                assert client.namespaces() == []
        finally:
            other.close()
        assert not socket_path.exists()


def test_starting_and_closing_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    with world(tmp_path) as service:
        service.server.close()
        before = descriptors(), threads()
        for _ in range(3):
            service.start()
            with service.client() as client, service.client("shared") as shared:
                client.connect()
                shared.connect()
            service.server.close()
        assert descriptors(before[0]) <= before[0]
        assert threads() == before[1]


class Tls:
    """A certificate authority of its own, and a service that it vouches for."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        self.cert, self.key = directory / "cert.pem", directory / "key.pem"
        certificate.cert_chain_pems[0].write_to_path(self.cert)
        certificate.private_key_pem.write_to_path(self.key)
        self.context = ssl.create_default_context()
        authority.configure_trust(self.context)


def test_tls_on_tcp(tmp_path: Path) -> None:
    tls = Tls(tmp_path)
    with world(tmp_path, tls_cert=tls.cert, tls_key=tls.key) as service:
        with service.client(context=tls.context) as client, service.client("shared") as local:
            client.create_namespace("tls", None)
            keys = chain(40)
            client.put_many("tls", blocks(keys))
            assert [bytes(item.data) for item in client.get_many("tls", keys)] == [content(key) for key in keys]
            assert len(local.get_many("tls", keys)) == 40
        with pytest.raises(Unreachable, match="certificate"):
            service.client(context=ssl.create_default_context()).connect()
        with pytest.raises((Interrupted, ProtocolError)):
            service.client().connect()
        client = service.client(context=tls.context)
        client.connect()
        assert service.server.drain(PATIENCE)
        client.close()
        assert service.settled() == NOTHING


def test_threads_share_a_connection_and_each_gets_its_own_answer(service: World) -> None:
    with service.client() as client:
        client.create_namespace("many", None)
        keys = chain(24, "many")
        client.put_many("many", [block._replace(parent=None, depth=-1) for block in blocks(keys, 3000)])

        def work(mine: list[bytes]) -> None:
            for key in mine * 10:
                found = client.get("many", key)
                assert found is not None
                assert bytes(found.data) == content(key, 3000)
                assert len(client.match("many", [key]).tiers) == 1

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, [keys[at::8] for at in range(8)]))


def test_a_service_that_hangs_is_left_at_the_deadline() -> None:
    with SlowService(welcomes=False) as slow:
        client = DataClient(slow.address, timeout=0.2)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.connect()
        assert time.monotonic() - started < 20


def test_who_gives_up_before_its_turn_does_not_spoil_it_for_others() -> None:
    """The answers that nobody waits for any more are skipped by whoever comes next."""
    with SlowService() as slow, DataClient(slow.address, timeout=PATIENCE) as client:
        client.connect()
        pipeline = client._pipeline
        assert pipeline is not None
        now = time.monotonic()
        patient = pipeline.begin(Opcode.MATCH, wire.Match("any", bytes(16)), (), now + PATIENCE)
        hasty = pipeline.begin(Opcode.MATCH, wire.Match("any", bytes(16)), (), now + PATIENCE)
        hasty.deadline = now  # not before it is sent
        with pytest.raises(DeadlineExceeded):
            pipeline.finish(hasty, lambda incoming: incoming.head(wire.Matched))
        slow.answers.set()
        assert pipeline.finish(patient, lambda incoming: incoming.head(wire.Matched)).tiers == [("host", 1)]
        assert client.match("any", chain(1)).tiers == ("host",)


def test_who_gives_up_in_its_turn_ends_the_connection_and_the_others_are_told() -> None:
    with SlowService() as slow, DataClient(slow.address, timeout=PATIENCE) as client:
        client.connect()
        pipeline = client._pipeline
        assert pipeline is not None
        now = time.monotonic()
        first = pipeline.begin(Opcode.MATCH, wire.Match("any", bytes(16)), (), now + PATIENCE)
        second = pipeline.begin(Opcode.MATCH, wire.Match("any", bytes(16)), (), now + PATIENCE)
        first.deadline = now  # not before it is sent
        with pytest.raises(DeadlineExceeded):
            pipeline.finish(first, lambda incoming: incoming.head(wire.Matched))
        with pytest.raises(Interrupted):
            pipeline.finish(second, lambda incoming: incoming.head(wire.Matched))
        slow.answers.set()
        assert client.match("any", chain(1)).tiers == ("host",)


def test_an_answer_to_another_request_is_no_answer() -> None:
    with SlowService(numbers_off_by=1) as slow, DataClient(slow.address, timeout=PATIENCE) as client:
        slow.answers.set()
        with pytest.raises(ProtocolError, match="expected an answer to request"):
            client.match("any", chain(1))


class SlowService:
    """Says hello, and answers every match once `answers` is set."""

    def __init__(self, *, welcomes: bool = True, numbers_off_by: int = 0) -> None:
        self.answers = threading.Event()
        self._off = numbers_off_by
        self._welcomes = welcomes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(sock,), daemon=True))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as stream:
            while len(raw := stream.read(HEADER.size)) == HEADER.size:
                _, _, opcode, _, request, head, body = HEADER.unpack(raw)
                stream.read(head + body)
                if opcode == Opcode.HELLO and self._welcomes:
                    answer: object = wire.Welcome(1, "slow", "t", [], wire.Limits(1, 1, 1, 1.0))
                else:
                    self.answers.wait(PATIENCE)
                    answer = wire.Matched([("host", 1)])
                    request += self._off
                try:
                    sock.sendall(message(opcode, msgspec.msgpack.encode(answer), request=request, flags=1))
                except OSError:
                    return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.answers.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(PATIENCE)


@pytest.mark.parametrize(
    ("address", "more", "expected"),
    [
        ("10.0.0.7:7701", {}, True),
        ("cache.example:7701", {}, True),
        ("10.0.0.7:7701", {"context": ssl.create_default_context()}, False),
        ("127.0.0.1:7701", {}, False),
        ("[::1]:7701", {}, False),
        ("unix:/run/kvtier.sock", {}, False),
        ("127.0.0.1:7701", {"verify": True}, True),
    ],
)
def test_digests_travel_where_bytes_are_not_guarded_otherwise(address: str, more: dict, expected: bool) -> None:  # type: ignore[type-arg]
    assert DataClient(address, **more)._verify is expected


def test_bytes_that_arrive_damaged_are_an_error(service: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with service.client(verify=True) as client:
        client.create_namespace("damaged", None)
        keys = chain(3, "damaged")
        assert set(client.put_many("damaged", blocks(keys))) == {"stored"}
        assert len(client.get_many("damaged", keys)) == 3
        honest = PlainStream.fill

        def flips(
            stream: PlainStream, outs: Sequence[memoryview], seconds: float, heads: Sequence[bytes | None] = ()
        ) -> list[bytes]:
            hashes = honest(stream, outs, seconds, heads)
            assert outs[0].nbytes == BLOCK
            outs[0][100] ^= 1
            return hashes

        monkeypatch.setattr(PlainStream, "fill", flips)
        with pytest.raises(WrongDigest, match=keys[0].hex()):
            client.get_many("damaged", keys)
        with pytest.raises(Invalid) as refused:
            client.put_many("damaged", blocks(chain(1, "on the way")))
        assert refused.value.code == "wrong_digest"
        monkeypatch.undo()
        assert client.get("damaged", chain(1, "on the way")[0]) is None
        assert len(client.get_many("damaged", keys)) == 3
