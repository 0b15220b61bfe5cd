"""Receive and hash in one pass: what was sent, and xxhash's own digests, however the bytes are cut on the way."""

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import xxhash

from kvtier.native import receiving
from kvtier.native.receiving import receive

_EDGES = [0, 1, 64, 176, 177, 240, 241, 895, 896, 959, 960, 961, 1023, 1024, 1025, 1984, 2048, 65_536, 300_001]


@pytest.fixture(params=["compiled", "portable"], autouse=True)
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "portable":
        monkeypatch.setattr(receiving, "_compiled", None)
    elif not receiving.available():
        pytest.skip("the extension was not built")


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    if request.param == "unix":
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ends = (socket.create_connection(listener.getsockname()), listener.accept()[0])
    with ends[0], ends[1]:
        yield ends


def _buffers(sizes: Sequence[int]) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def _digests(heads: Sequence[bytes | None], data: Sequence[bytes]) -> list[bytes]:
    return [b"" if head is None else xxhash.xxh3_128_digest(head + one) for head, one in zip(heads, data, strict=True)]


def _dripping(sock: socket.socket, data: bytes, seed: int) -> threading.Thread:
    """Send in pieces of any size, so that hashes are taken up anywhere."""

    def send() -> None:
        dice, left = random.Random(seed), memoryview(data)
        while left:
            left = left[sock.send(left[: dice.choice([1, 63, 1000, 1025, 50_000, 400_000])]) :]

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_every_edge_in_one_call(pair: tuple[socket.socket, socket.socket]) -> None:
    dice = random.Random(1)
    for head in (None, b"", dice.randbytes(64)):
        data = [dice.randbytes(size) for size in _EDGES]
        outs, heads = _buffers(_EDGES), [head] * len(data)
        sender = _dripping(pair[0], b"".join(data), len(head or b""))
        assert receive(pair[1], outs, heads, 0, 20) == _digests(heads, data)
        sender.join()
        assert [bytes(out) for out in outs] == data


def test_many_buffers_of_which_some_bytes_are_there(pair: tuple[socket.socket, socket.socket]) -> None:
    dice = random.Random(2)
    for turn in range(12):
        data = [dice.randbytes(dice.choice([*_EDGES, dice.randrange(9000)])) for _ in range(dice.randrange(1, 90))]
        heads = [dice.choice([None, b"", dice.randbytes(64)]) for _ in data]
        whole, outs = b"".join(data), _buffers([len(one) for one in data])
        there = left = dice.randrange(len(whole) + 1)
        for out, one in zip(outs, data, strict=True):
            count = min(left, len(one))
            out[:count], left = one[:count], left - count
        sender = _dripping(pair[0], whole[there:], turn)
        assert receive(pair[1], outs, heads, there, 20) == _digests(heads, data)
        sender.join()
        assert [bytes(out) for out in outs] == data


def test_what_follows_stays_in_the_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"a" * 1000 + b"rest")
    pair[1].setblocking(False)
    (out,) = _buffers([1000])
    receive(pair[1], [out], [b""], 0, 5)
    assert pair[1].recv(100) == b"rest"
    assert receive(pair[1], [], [], 0, 5) == []


def test_a_socket_wakes_for_few_bytes_again(pair: tuple[socket.socket, socket.socket]) -> None:
    # Many were waited for: nobody else is to be left waiting for as many.
    ours, theirs = pair
    data, outs = random.Random(1).randbytes(1_000_000), _buffers([1_000_000])
    thread = _dripping(theirs, data, 1)
    assert receive(ours, outs, [b""], 0, 20.0) == _digests([b""], [data])
    thread.join()
    theirs.send(b"few")
    assert select.select([ours], [], [], 20.0)[0]
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    assert ours.recv(100) == b"few"
    with pytest.raises(BlockingIOError):
        receive(ours, _buffers([500_000]), [b""], 0, 0.2)
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def test_time_and_the_other_side_end_it(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"some")
    start = time.monotonic()
    with pytest.raises(BlockingIOError):
        receive(pair[1], _buffers([1000]), [b""], 0, 0.2)
    assert 0.15 < time.monotonic() - start < 5
    pair[0].sendall(b"more")
    pair[0].close()
    with pytest.raises(ConnectionResetError, match="closed"):
        receive(pair[1], _buffers([1000]), [None], 0, 5)


def _limit(sock: socket.socket, option: int, seconds: float) -> None:
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, int(1e6 * seconds)))


def test_a_turn_sends_all_before_it_receives(pair: tuple[socket.socket, socket.socket]) -> None:
    message, heard = random.Random(3).randbytes(6 << 20), bytearray(6 << 20)

    def answer() -> None:
        view = memoryview(heard)
        while view:
            view = view[pair[0].recv_into(view) :]
        pair[0].sendall(b"answer")

    other = threading.Thread(target=answer)
    other.start()
    out = memoryview(bytearray(100))
    assert receiving.turn(pair[1], message, out) == 6
    other.join()
    assert heard == message
    assert out[:7] == b"answer\0"


def test_a_turn_ends_with_the_other_side_or_in_time(pair: tuple[socket.socket, socket.socket]) -> None:
    out = memoryview(bytearray(8))
    _limit(pair[1], socket.SO_RCVTIMEO, 0.2)
    with pytest.raises(BlockingIOError):
        receiving.turn(pair[1], b"x", out)
    assert pair[0].recv(8) == b"x"
    _limit(pair[1], socket.SO_SNDTIMEO, 0.2)
    with pytest.raises(BlockingIOError):
        receiving.turn(pair[1], bytes(64 << 20), out)
    with contextlib.suppress(BlockingIOError):
        while pair[0].recv(1 << 20, socket.MSG_DONTWAIT):
            pass
    pair[0].shutdown(socket.SHUT_WR)
    assert receiving.turn(pair[1], b"y", out) == 0
    pair[0].close()
    with contextlib.suppress(OSError):
        receiving.turn(pair[1], b"z", out)  # over TCP only its answer says that nobody is there
    with pytest.raises(OSError, match=r"pipe|reset"):
        receiving.turn(pair[1], b"z", out)


@pytest.mark.skipif(not receiving.available(), reason="the extension was not built")
def test_extension_refuses_what_it_would_overrun() -> None:
    compiled = receiving._load()
    assert compiled is not None
    ends = socket.socketpair()
    bad: list[tuple[list[int], list[bytes | None], int]] = [
        ([1000], [b"x"], 0),
        ([240], [b""], 0),
        ([176], [bytes(64)], 0),
        ([1000], [], 0),
        ([1000, 1000], [None, None], 2001),
        ([1000], [None], -1),
    ]
    for sizes, heads, there in bad:
        with pytest.raises(ValueError, match="expected"):
            compiled.receive(ends[1].fileno(), _buffers(sizes), heads, there, 1.0)
    with pytest.raises(BufferError):
        compiled.receive(ends[1].fileno(), [memoryview(bytes(1000))], [None], 0, 1.0)
    with pytest.raises(TypeError, match="read-write"):
        compiled.turn(ends[1].fileno(), b"x", memoryview(bytes(10)))
    for end in ends:
        end.close()
