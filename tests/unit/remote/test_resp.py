"""Replies are the same however they arrive, and what is no reply ends the connection."""

import socket
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.remote import ENVELOPE_BYTES
from kvtier.remote.valkey.resp import Replies, ReplyError, command
from kvtier.remote.valkey.transport import PlainTransport

HEAD = bytes(range(ENVELOPE_BYTES))


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


class Wire:
    """Both ends of a connection; what is fed arrives in the pieces that it is cut into."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            self._theirs, _ = listener.accept()
        self.transport = PlainTransport(ours)
        self.replies = Replies(self.transport)

    def feed(self, data: bytes, cuts: Sequence[int] = ()) -> threading.Thread:
        edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]

        def work() -> None:
            for start, stop in pairwise(edges):
                self._theirs.sendall(data[start:stop])
                time.sleep(0.0005)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def end(self) -> None:
        self._theirs.close()

    def close(self) -> None:
        self.transport.close()
        self._theirs.close()


@pytest.fixture
def wire() -> Wire:
    return Wire()


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def packed(reply: object) -> bytes:
    match reply:
        case ReplyError():
            return b"-%b\r\n" % reply.encode()
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return bulk(reply)
        case None:
            return b"$-1\r\n"
        case list():
            return b"*%d\r\n" % len(reply) + b"".join(map(packed, reply))
    raise AssertionError(reply)


SMALL = st.one_of(
    st.integers(-(2**40), 2**40),
    st.binary(max_size=200),
    st.none(),
    st.text("abc XYZ:", min_size=1, max_size=30).map(ReplyError),
)
REPLIES = st.recursive(SMALL, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
BODIES = st.binary(max_size=3000)


@settings(max_examples=40)
@given(st.lists(REPLIES, min_size=1, max_size=6), st.lists(st.integers(0, 10**6), max_size=5))
def test_small_replies_come_in_any_pieces(replies: list[object], cuts: list[int]) -> None:
    wire = Wire()
    thread = wire.feed(b"".join(map(packed, replies)), cuts)
    found = [wire.replies.next(soon()) for _ in replies]
    thread.join()
    wire.close()
    assert found == replies
    assert [type(one) for one in found] == [type(one) for one in replies]
    assert wire.replies.idle


RECORDS = st.one_of(
    st.none(),
    st.just(ReplyError("MOVED 1 h:2")),
    st.tuples(BODIES, st.integers(-3, 3)),  # a record, and by how much its length differs from what is expected
    st.binary(max_size=ENVELOPE_BYTES - 1),
)


@settings(max_examples=50)
@given(st.lists(RECORDS, min_size=1, max_size=6), st.lists(st.integers(0, 10**6), max_size=5))
def test_records_land_where_they_belong(records: list[object], cuts: list[int]) -> None:
    stream, expected, bodies = b"", [], []
    for record in records:
        match record:
            case (bytes(body), int(more)):
                stream += bulk(HEAD + body)
                expected.append(len(body))
                bodies.append(bytearray(max(len(body) + more, 0)))
            case bytes():
                stream += bulk(record)
                expected.append(len(record) - ENVELOPE_BYTES)
                bodies.append(bytearray(10))
            case _:
                stream += packed(record)
                expected.append(record)
                bodies.append(bytearray(10))
    wire = Wire()
    thread = wire.feed(stream + b":7\r\n", cuts)
    for record, want, body in zip(records, expected, bodies, strict=True):
        head = memoryview(bytearray(ENVELOPE_BYTES))
        assert wire.replies.record(head, memoryview(body), soon()) == want
        if isinstance(record, tuple):
            assert head == HEAD
            if len(body) == want:
                assert body == record[0]
    assert wire.replies.next(soon()) == 7
    thread.join()
    wire.close()


@pytest.mark.parametrize(
    "data",
    [
        b"!what\r\n",
        b"$x\r\n",
        b"$999999999999\r\n",
        b":1.5\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"x" * 5000,
        b"$3\r\nabcde",
        b"*1\r\n" * 20 + b":1\r\n",
    ],
)
def test_what_is_no_reply_ends_the_connection(wire: Wire, data: bytes) -> None:
    thread = wire.feed(data)
    with pytest.raises(ConnectionError, match="expected a reply of a Valkey or Redis server"):
        wire.replies.next(soon())
    thread.join()
    wire.close()


@pytest.mark.parametrize("data", [b":1\r\n", b"+OK\r\n", b"*0\r\n"])
def test_what_is_no_record_ends_the_connection(wire: Wire, data: bytes) -> None:
    thread = wire.feed(data)
    with pytest.raises(ConnectionError, match="expected a reply"):
        wire.replies.record(memoryview(bytearray(ENVELOPE_BYTES)), memoryview(bytearray(4)), soon())
    thread.join()
    wire.close()


RECORD = bulk(HEAD + b"block bytes")


@pytest.mark.parametrize("kept", range(0, len(RECORD), 7))
def test_an_end_at_any_byte_is_an_error(wire: Wire, kept: int) -> None:
    wire.feed(RECORD[:kept]).join()
    wire.end()
    with pytest.raises(ConnectionError):
        wire.replies.record(memoryview(bytearray(ENVELOPE_BYTES)), memoryview(bytearray(11)), soon())
    wire.close()


@pytest.mark.parametrize("kept", [0, 3, 50, 112, 120])
def test_silence_at_any_byte_is_a_timeout(wire: Wire, kept: int) -> None:
    wire.feed(RECORD[:kept]).join()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        wire.replies.record(memoryview(bytearray(ENVELOPE_BYTES)), memoryview(bytearray(11)), soon(0.05))
    assert time.monotonic() - start < 30
    wire.close()


@pytest.mark.parametrize("nbytes", [100_000, 3_000_000])
def test_a_trickle_does_not_prolong_the_deadline(wire: Wire, nbytes: int) -> None:
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.01):
            wire._theirs.sendall(b"x")

    wire.feed(b"$%d\r\n" % nbytes).join()
    thread = threading.Thread(target=trickle)
    thread.start()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        wire.replies.record(
            memoryview(bytearray(ENVELOPE_BYTES)), memoryview(bytearray(nbytes - ENVELOPE_BYTES)), soon(0.15)
        )
    assert time.monotonic() - start < 30
    stop.set()
    thread.join()
    wire.close()


@pytest.mark.parametrize("kept", [0, 1, 300_000, 3_000_000])
def test_a_large_record_that_ends_too_early_is_an_error(wire: Wire, kept: int) -> None:
    record = bulk(HEAD + b"x" * 3_000_000)
    thread = wire.feed(record[: len(record) - 3_000_002 + kept])
    with pytest.raises(TimeoutError):
        wire.replies.record(memoryview(bytearray(ENVELOPE_BYTES)), memoryview(bytearray(3_000_000)), soon(0.2))
    thread.join()
    wire.close()


def test_large_records_and_what_follows_them(wire: Wire) -> None:
    bodies = [bytes([at]) * nbytes for at, nbytes in enumerate((600_000, 524_286, 524_287, 1, 5_000_000))]
    thread = wire.feed(b"".join(bulk(HEAD + body) + b":%d\r\n" % len(body) for body in bodies), [999_999, 524_400])
    for body in bodies:
        found = bytearray(len(body))
        assert wire.replies.record(memoryview(bytearray(ENVELOPE_BYTES)), memoryview(found), soon()) == len(body)
        assert found == body
        # Few bytes wake the reader again.
        assert wire.replies.next(soon()) == len(body)
    thread.join()
    wire.close()


def test_who_does_not_read_is_a_timeout(wire: Wire) -> None:
    with pytest.raises(TimeoutError):
        wire.transport.send([b"x" * (8 << 20)], soon(0.05))
    wire.close()


def test_commands_are_arrays_of_bulk_strings() -> None:
    assert command("SET", b"\r\n", 7) == b"*3\r\n$3\r\nSET\r\n$2\r\n\r\n\r\n$1\r\n7\r\n"
