"""The block stream: written and read byte by byte, and what is refused."""

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.wire.blockstream import (
    HEAD_LIMIT,
    STREAM_BEGIN,
    STREAM_END,
    BlockHead,
    StreamDamaged,
    StreamDecoder,
    StreamError,
    StreamHint,
    record_head,
)

KEY = "ab" * 16


def decoder():
    return StreamDecoder(lambda _, nbytes: memoryview(bytearray(nbytes)))


def record(head: bytes, body: bytes) -> bytes:
    return struct.pack("<II", len(head), len(body)) + head + body


keys = st.binary(min_size=16, max_size=32).map(bytes.hex)
heads = st.builds(
    BlockHead,
    key=keys,
    part=st.integers(0, 65535),
    parent=st.none() | keys,
    depth=st.integers(-1, 2**31 - 1),
    exact=st.booleans(),
    tier=st.none() | st.just("host"),
    hint=st.none() | st.builds(StreamHint, priority=st.floats(1, 9), ttl=st.none() | st.floats(0, 9)),
)


@settings(max_examples=40)
@given(st.lists(st.tuples(heads, st.binary(min_size=1, max_size=200)), max_size=4), st.integers(1, 400))
def test_what_goes_in_comes_out_however_it_is_cut(records, step):
    data = STREAM_BEGIN + b"".join(record_head(head, len(body)) + body for head, body in records) + STREAM_END
    reader = decoder()
    for start in range(0, len(data), step):
        reader.feed(data[start : start + step])
    assert [(head, bytes(body)) for head, body in reader.finish()] == records


def test_it_is_what_the_page_says_written_with_struct_and_json_alone():
    head = json.dumps({"key": KEY, "part": 1, "parent": "cd" * 16, "depth": 3, "exact": False}).encode()
    reader = decoder()
    reader.feed(b"KVTB" + struct.pack("<HH", 1, 0) + record(head, b"hello") + struct.pack("<II", 0, 0))
    assert reader.finish() == [(BlockHead(KEY, 1, "cd" * 16, 3, exact=False), b"hello")]


def test_every_cut_is_told_from_a_whole_stream():
    data = STREAM_BEGIN + record_head(BlockHead(KEY), 3) + b"abc" + STREAM_END
    for length in range(len(data)):
        reader = decoder()
        reader.feed(data[:length])
        with pytest.raises(StreamError, match="without its end"):
            reader.finish()


def test_a_body_that_is_not_what_its_digest_says():
    reader = decoder()
    with pytest.raises(StreamDamaged, match="send it again"):
        reader.feed(STREAM_BEGIN + record_head(BlockHead(KEY, digest="00" * 16), 3) + b"abc")


@pytest.mark.parametrize(
    "data",
    [
        b"KVTC\1\0\0\0",
        b"KVTB\2\0\0\0",
        b"KVTB\1\0\1\0",
        STREAM_BEGIN + struct.pack("<II", 0, 5),
        STREAM_BEGIN + struct.pack("<II", 5, 0),
        STREAM_BEGIN + struct.pack("<II", HEAD_LIMIT + 1, 1),
        STREAM_BEGIN + struct.pack("<II", 2**32 - 1, 2**32 - 1),
        STREAM_BEGIN + record(b"{", b"x"),
        STREAM_BEGIN + record(b"\xff", b"x"),
        STREAM_BEGIN + record(b"[" * 4000, b"x"),
        STREAM_BEGIN + record(b"{}", b"x"),
        STREAM_BEGIN + record(json.dumps({"key": "AB" * 16}).encode(), b"x"),
        STREAM_BEGIN + record(json.dumps({"key": "ab" * 15}).encode(), b"x"),
        STREAM_BEGIN + record(json.dumps({"key": KEY + "\n"}).encode(), b"x"),
        STREAM_BEGIN + record(json.dumps({"key": KEY, "path": "x"}).encode(), b"x"),
        STREAM_BEGIN + record(json.dumps({"key": KEY, "depth": -2}).encode(), b"x"),
        STREAM_BEGIN + record(json.dumps({"key": KEY, "depth": 1.5}).encode(), b"x"),
        STREAM_BEGIN + record(json.dumps({"key": KEY, "part": 65536}).encode(), b"x"),
        STREAM_BEGIN + record(json.dumps({"key": KEY, "hint": {"reuse": "maybe"}}).encode(), b"x"),
        STREAM_BEGIN + STREAM_END + b"x",
    ],
)
def test_what_is_no_stream(data):
    with pytest.raises(StreamError):
        decoder().feed(data)


def test_what_place_raises_ends_it():
    def full(head, nbytes):
        raise MemoryError(nbytes)

    with pytest.raises(MemoryError, match="7"):
        StreamDecoder(full).feed(STREAM_BEGIN + record_head(BlockHead(KEY), 7))


@pytest.mark.parametrize("nbytes", [0, 2**32])
def test_a_record_that_cannot_be(nbytes):
    with pytest.raises(StreamError):
        record_head(BlockHead(KEY), nbytes)
