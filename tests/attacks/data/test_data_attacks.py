"""Hostile and broken clients of the data port: the documented error, nothing stored, nothing held."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import xxhash
from data_world import (
    BLOCK,
    NOTHING,
    PLAIN,
    Talk,
    World,
    blocks,
    chain,
    content,
    descriptors,
    layout_json,
    message,
    threads,
)
from hypothesis import HealthCheck, given, settings
from patience import PATIENCE, until

HELLO, MATCH, GET, PUT, DELETE, SHARE, LEASE, RELEASE, STAGE, LIST = 1, 2, 4, 5, 6, 17, 18, 19, 20, 21
KEY = b"attacked block.."
GOOD = content(KEY)


@pytest.fixture(autouse=True)
def nothing_stays(service: World) -> Iterator[None]:
    """After every attack: no block, no hold, no connection, no descriptor, no thread, and the service still works."""
    service.settled()
    before = descriptors(), threads()
    yield
    assert service.settled() == NOTHING
    with service.client() as client:
        assert client.get("target", KEY) is None
        (key,) = chain(1, "afterwards")
        client.put_many("target", blocks([key]))
        assert client.get("target", key) is not None
        client.delete("target", [key])
    assert service.settled() == NOTHING
    assert descriptors(before[0]) <= before[0]
    until(lambda: set(threads()) <= set(before[1]))


@pytest.fixture
def talk(service: World) -> Iterator[Talk]:
    with service.talk() as made:
        made.hello(service.token["red"])
        yield made


def put(**more: Any) -> dict[str, Any]:
    return {"ns": "target", "keys": KEY, "sizes": [BLOCK], **more}


# ---- what is no message


@pytest.mark.parametrize(
    "wrong",
    [
        {"magic": b"HTTP"},
        {"version": 2},
        {"version": 0},
        {"flags": 0x8000},
        {"head": (1 << 20) + 1},
        {"head": 2**32 - 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("known", [False, True], ids=["before hello", "after hello"])
def test_a_header_that_is_none_ends_the_connection(service: World, wrong: dict[str, Any], known: bool) -> None:
    with service.talk() as talk:
        if known:
            talk.hello(service.token["red"])
        talk.send(PUT if known else HELLO, b"", **wrong)
        assert talk.refused() == "invalid"
        assert talk.receive() is None


@pytest.mark.parametrize("opcode", [0, 2, 5, 18, 255])
def test_nothing_but_hello_comes_first(service: World, opcode: int) -> None:
    with service.talk() as talk:
        talk.send(opcode, put(), GOOD)
        assert talk.refused() == "unauthorized"
        assert talk.receive() is None


@pytest.mark.parametrize(
    ("head", "code"),
    [
        ({"versions": [1], "token": "kvt_0123456789abcdef_" + "0" * 64}, "unauthorized"),
        ({"versions": [1]}, "unauthorized"),
        ({"versions": [1], "token": "x" * 4096}, "unauthorized"),
        ({"versions": [7]}, "invalid"),
        ({"versions": []}, "invalid"),
        ({"versions": "all"}, "invalid"),
        (b"\xc1", "invalid"),
        (b"", "invalid"),
    ],
)
def test_a_hello_that_is_none_ends_the_connection(service: World, head: object, code: str) -> None:
    with service.talk() as talk:
        talk.send(HELLO, head)
        assert talk.refused() == code
        assert talk.receive() is None


@pytest.mark.parametrize(
    ("opcode", "head"),
    [
        (0, {}),
        (22, {}),
        (255, {}),
        (HELLO, {"versions": [1]}),
        (MATCH, b""),
        (MATCH, b"\x00"),
        (MATCH, b"\x81" * 1000),
        (MATCH, b"\xdf\xff\xff\xff\xff"),
        (MATCH, {"ns": "target"}),
        (MATCH, {"ns": 7, "keys": KEY}),
        (MATCH, {"ns": "target", "keys": KEY, "width": 15}),
        (MATCH, {"ns": "target", "keys": KEY, "width": 1 << 62}),
        (MATCH, {"ns": "target", "keys": KEY[:-1]}),
        (MATCH, {"ns": "target", "keys": KEY, "lossy": "yes"}),
        (MATCH, {"ns": "target", "keys": KEY, "losy": True}),
        (MATCH, {"ns": "../../etc/passwd", "keys": KEY}),
        (MATCH, {"ns": "a" * 129, "keys": KEY}),
        (GET, {"ns": "target", "keys": KEY, "parts": []}),
        (GET, {"ns": "target", "keys": KEY, "parts": [0, 0]}),
        (GET, {"ns": "target", "keys": KEY, "timeout": -1.0}),
        (GET, {"ns": "target", "keys": KEY, "timeout": float("nan")}),
        (LEASE, {"ns": "target", "keys": KEY}),
        (RELEASE, {"leases": [1]}),
        (STAGE, put(offsets=[0])),
        (LIST, {}),
        (LIST, {"ns": "../../etc/passwd"}),
        (LIST, {"ns": "target", "keys": KEY}),
        (SHARE, {"staging": 4096}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_request_that_is_none_is_refused_and_the_next_one_answered(talk: Talk, opcode: int, head: object) -> None:
    talk.send(opcode, head, request=9)
    answer = talk.receive()
    assert answer is not None
    assert answer[:3] == (opcode, 3, 9)
    assert answer[3]["code"] == "invalid"
    assert answer[3]["status"] == 400
    assert talk.ask(MATCH, {"ns": "target", "keys": KEY}) == {"tiers": []}


@pytest.mark.parametrize("part", [1, -1])
def test_a_part_that_there_is_not_is_an_unknown_block(talk: Talk, part: int) -> None:
    talk.send(GET, {"ns": "target", "keys": KEY, "parts": [part]})
    assert talk.refused() == "unknown_block"
    assert talk.ask(MATCH, {"ns": "target", "keys": KEY}) == {"tiers": []}


def test_a_body_where_none_belongs_is_refused(talk: Talk) -> None:
    talk.send(MATCH, {"ns": "target", "keys": KEY}, b"x" * 100_000)
    assert talk.refused() == "invalid"
    assert talk.ask(MATCH, {"ns": "target", "keys": KEY}) == {"tiers": []}


# ---- puts that must not be


@pytest.mark.parametrize(
    ("head", "body", "code"),
    [
        (put(), GOOD[:-1], "invalid"),
        (put(), GOOD + b"x", "invalid"),
        (put(sizes=[0]), b"", "too_large"),
        (put(sizes=[-5]), b"", "too_large"),
        (put(sizes=[]), GOOD, "invalid"),
        (put(sizes=[BLOCK, BLOCK]), GOOD * 2, "invalid"),
        (put(sizes=[5 << 20]), bytes(5 << 20), "too_large"),
        (put(parts=[1]), GOOD, "wrong_layout"),
        (put(parts=[0, 0]), GOOD, "invalid"),
        (put(depths=[1]), GOOD, "conflict"),
        (put(depths=[1], parents=b"x"), GOOD, "invalid"),
        (put(depths=[1 << 40], parents=KEY), GOOD, "invalid"),
        (put(depths=[-2]), GOOD, "invalid"),
        (put(exact=[True, True]), GOOD, "invalid"),
        (put(digests=b"x"), GOOD, "invalid"),
        (put(digests=bytes(16)), GOOD, "wrong_digest"),
        (put(hint={"priority": -1.0}), GOOD, "invalid"),
        (put(hint={"reuse": "always"}), GOOD, "invalid"),
        (put(timeout=0.0), GOOD, "invalid"),
        (put(ns="absent"), GOOD, "unknown_namespace"),
        (put(offsets=[0]), GOOD, "invalid"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else None,
)
def test_a_put_that_must_not_be_is_refused_and_the_next_one_answered(
    talk: Talk, head: dict[str, Any], body: bytes, code: str
) -> None:
    talk.send(PUT, head, body)
    assert talk.refused() == code
    assert talk.ask(MATCH, {"ns": "target", "keys": KEY}) == {"tiers": []}


def test_blocks_of_another_layout_are_refused(talk: Talk, service: World) -> None:
    talk.ask(15, {"name": "layout", "layout": layout_json(PLAIN)})
    talk.send(PUT, put(ns="layout", sizes=[BLOCK - 4]), GOOD[:-4])
    assert talk.refused() == "wrong_layout"
    assert talk.ask(MATCH, {"ns": "layout", "keys": KEY}) == {"tiers": []}


def test_a_body_beyond_all_limits_ends_the_connection_unread(talk: Talk) -> None:
    talk.send(PUT, put(), b"", body=1 << 60)
    assert talk.refused() == "invalid"
    assert talk.receive() is None


def test_a_batch_beyond_the_limit_is_refused_before_its_bytes_are_read(talk: Talk) -> None:
    count = 10
    sizes = [4 << 20] * count
    keys = b"".join(key[:16] for key in chain(count))
    talk.send(PUT, {"ns": "target", "keys": keys, "sizes": sizes}, b"", body=sum(sizes))
    assert talk.refused() == "too_large"
    assert talk.receive() is None


def test_blocks_before_one_with_a_wrong_digest_are_those_that_are_stored(talk: Talk) -> None:
    keys = chain(3, "digests")
    digests = [xxhash.xxh3_128_digest(content(key)) for key in keys]
    digests[1] = bytes(16)
    head = {"ns": "target", "keys": b"".join(keys), "width": 32, "sizes": [BLOCK] * 3, "digests": b"".join(digests)}
    talk.send(PUT, head, b"".join(content(key) for key in keys))
    assert talk.refused() == "wrong_digest"
    for key in keys[1:]:
        assert talk.ask(MATCH, {"ns": "target", "keys": key, "width": 32}) == {"tiers": []}


# ---- other tenants


def test_another_tenant_sees_and_touches_nothing(service: World) -> None:
    (key,) = chain(1, "red's own")
    with service.client() as red:
        red.put_many("target", blocks([key]))
        with service.talk() as talk:
            talk.hello(service.token["blue"])
            for opcode, head in ((MATCH, {}), (GET, {}), (DELETE, {})):
                talk.send(opcode, {"ns": "target", "keys": key[:16], **head})
                assert talk.refused() == "unknown_namespace"
            talk.ask(15, {"name": "target"})
            assert talk.ask(MATCH, {"ns": "target", "keys": key[:16]}) == {"tiers": []}
            assert talk.ask(GET, {"ns": "target", "keys": key[:16]}) == {}
            assert talk.ask(DELETE, {"ns": "target", "keys": key[:16]}) == {"deleted": 0}
        assert red.get("target", key) is not None
        red.delete("target", [key])


def test_leases_of_another_connection_cannot_be_ended(service: World) -> None:
    (key,) = chain(1, "leased")
    with service.client("shared") as client:
        client.put_many("target", blocks([key]))
        lease = client.lease("target", [key])
        with service.talk("unix") as talk:
            talk.hello(service.token["red"])
            for number in range(4):
                talk.send(RELEASE, {"leases": [number]})
                assert talk.refused() == "invalid"
        assert service.holds()["leases"] > 0
        assert bytes(lease.blocks[0].data) == content(key)
        lease.close()
        client.delete("target", [key])


def test_memory_is_shared_once_and_no_more_than_a_batch(service: World) -> None:
    with service.talk("unix") as talk:
        talk.hello(service.token["red"])
        talk.send(SHARE, {"staging": (32 << 20) + 1})
        assert talk.refused() == "too_large"
        talk.send(SHARE, {"staging": -1})
        assert talk.refused() == "too_large"
        talk.send(SHARE, {"staging": 4096})
        _, descriptors_sent, _, _ = socket.recv_fds(talk.sock, 1 << 16, 8)
        while not descriptors_sent:
            _, descriptors_sent, _, _ = socket.recv_fds(talk.sock, 1 << 16, 8)
        for descriptor in descriptors_sent:
            os.close(descriptor)
        assert len(descriptors_sent) == 2


# ---- slow ones, and those that break off

CONVERSATION = [
    (HELLO, {"versions": [1], "token": ""}, b""),
    (PUT, {"ns": "target", "keys": KEY, "sizes": [40]}, b"x" * 40),
    (DELETE, {"ns": "target", "keys": KEY}, b""),
]


def spoken(service: World) -> bytes:
    hello, *rest = CONVERSATION
    first = (hello[0], {**hello[1], "token": service.token["red"]}, hello[2])
    return b"".join(message(*one) for one in (first, *rest))


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_a_conversation_that_ends_at_any_byte(service: World, way: str) -> None:
    """Half-closed: what came whole is answered, what did not is as if it never was."""
    everything = spoken(service)
    ends = []
    length = 0
    for one in CONVERSATION:
        hello = one[0] == HELLO
        length += len(message(one[0], {**one[1], "token": service.token["red"]} if hello else one[1], one[2]))
        ends.append(length)
    assert length == len(everything)
    for stop in range(len(everything)):
        with service.talk(way) as talk:
            talk.sock.sendall(everything[:stop])
            talk.sock.shutdown(socket.SHUT_WR)
            whole = sum(end <= stop for end in ends)
            for opcode, _, _ in CONVERSATION[:whole]:
                answer = talk.receive()
                assert answer is not None
                assert answer[:2] == (opcode, 1)
            assert talk.receive() is None
        if ends[1] <= stop < ends[2]:
            with service.client() as client:
                assert client.delete("target", [KEY]) == 1


def test_a_client_that_vanishes_at_any_byte_of_a_put(service: World) -> None:
    """Reset instead of closed."""
    everything = spoken(service)
    first = len(everything) - len(message(*CONVERSATION[2])) - len(message(*CONVERSATION[1]))
    for stop in range(first, len(everything) - len(message(*CONVERSATION[2])), 7):
        with service.talk() as talk:
            talk.sock.sendall(everything[:stop])
            talk.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@pytest.mark.parametrize("stop", [0, 1, 23, 24, 30])
def test_a_client_that_stalls_within_a_message_is_told_and_left(impatient: World, stop: int) -> None:
    with impatient.talk() as talk:
        talk.hello(impatient.token["red"])
        started = time.monotonic()
        talk.sock.sendall(message(PUT, put(), GOOD)[:stop])
        assert talk.refused() == ("timeout" if stop else None)
        assert talk.receive() is None
        assert (0.9 if stop else 0) < time.monotonic() - started < 20
    assert impatient.settled() == NOTHING


def dribble(talk: Talk) -> None:
    """A minute's worth."""
    for byte in message(PUT, put(), GOOD)[:1200]:
        talk.sock.sendall(bytes([byte]))
        time.sleep(0.05)


def test_a_client_that_dribbles_is_no_better(impatient: World) -> None:
    with impatient.talk() as talk:
        talk.hello(impatient.token["red"])
        with pytest.raises(ConnectionError):
            dribble(talk)
    assert impatient.settled() == NOTHING


def test_a_client_that_does_not_read_is_left(impatient: World) -> None:
    keys = chain(200, "unread")
    with impatient.client() as client:
        client.put_many("target", blocks(keys))
    with impatient.talk() as talk:
        talk.hello(impatient.token["red"])
        asked = {"ns": "target", "keys": b"".join(keys), "width": 32}
        for number in range(4):
            talk.send(GET, asked, request=number)
        until(lambda: impatient.server.connections == 1)
        assert impatient.settled() == NOTHING


@pytest.mark.parametrize("what", ["leases", "staging", "put"])
def test_a_client_that_is_killed_holds_nothing(service: World, what: str) -> None:
    keys = chain(3, "killed")
    with service.client() as client:
        client.put_many("target", blocks(keys))
    script = textwrap.dedent(
        """
        import sys, time
        from kvtier.client.data import DataClient
        from kvtier.client.results import Block
        from kvtier.wire import Opcode, messages
        address, token, what, *keys = sys.argv[1:]
        keys = [bytes.fromhex(key) for key in keys]
        client = DataClient(address, token)
        client.connect()
        pipeline = client._pipeline
        if what == "leases":
            held = [client.lease("target", keys) for _ in range(5)]
        elif what == "staging":
            head = messages.Stage(ns="target", keys=bytes(range(16)), sizes=[4 << 20], offsets=[0])
            for _ in range(50):
                pipeline.begin(Opcode.STAGE, head, (), time.monotonic() + 60)
        else:
            head = messages.Put(ns="target", keys=bytes(range(16)), sizes=[4 << 20])
            packed = messages.encode(head)
            from kvtier.wire import frame
            pipeline.stream.send([frame(Opcode.PUT, 0, 1, packed, 4 << 20), bytes(3 << 20)], 5)
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    arguments = [service.unix, service.token["red"], what, *(key.hex() for key in keys)]
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
        assert service.settled() == NOTHING
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stdout.close()
    with service.client() as client:
        client.delete("target", [*keys, bytes(range(16))])


# ---- garbage


@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_answered_by_an_error_or_the_end(service: World, garbage: bytes) -> None:
    with service.talk() as talk:
        talk.sock.sendall(garbage)
        talk.sock.shutdown(socket.SHUT_WR)
        assert talk.refused() in ("invalid", "unauthorized", None)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
_NAMES = """ns keys width parts lossy each depth timeout digests sizes depths parents exact hint leases offsets staging
id ttl name layout tokens extras session first"""
_FIELDS = st.sampled_from(_NAMES.split())
_CODES = ["invalid", "too_large", "unknown_namespace", "unknown_pin", "unknown_prefetch", "unknown_block", "conflict"]


@given(st.integers(2, 20), st.dictionaries(_FIELDS, _VALUES, max_size=6), st.booleans())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_fields_are_an_error_or_an_answer(service: World, opcode: int, head: dict[str, Any], real: bool) -> None:
    fields = head | ({"ns": "target", "keys": KEY} if real else {})
    with service.talk() as talk:
        talk.hello(service.token["red"])
        try:
            packed = msgspec.msgpack.encode(fields)
        except OverflowError:
            return
        talk.send(opcode, packed, request=3)
        answer = talk.receive()
        assert answer is not None
        assert answer[0] == opcode
        if answer[1] == 3:
            assert answer[3]["code"] in _CODES
