import contextlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvtier.wire import (
    HEADER_BYTES,
    MAX_HEAD,
    Header,
    PackedKeys,
    WireError,
    frame,
    pack_keys,
    pack_runs,
    pack_tokens,
    read_header,
    unpack_keys,
    unpack_runs,
    unpack_tokens,
)
from kvtier.wire.messages import ANSWERS, REQUESTS, Get, Match, Matched, decode, encode

GOOD = frame(2, 0, 7, b"abc", 9)


def test_a_header_says_what_was_sent() -> None:
    assert len(GOOD) == HEADER_BYTES + 3
    assert read_header(GOOD[:HEADER_BYTES]) == Header(opcode=2, flags=0, request=7, head=3, body=9)


@pytest.mark.parametrize(
    ("at", "byte", "why"),
    [(0, 0, "another protocol"), (4, 2, "version 2"), (7, 1, "flags"), (14, 0xFF, "a head of")],
)
def test_a_header_that_is_none_is_refused(at: int, byte: int, why: str) -> None:
    damaged = bytearray(GOOD[:HEADER_BYTES])
    damaged[at] = byte
    with pytest.raises(WireError, match=why):
        read_header(damaged)


def test_a_head_beyond_the_limit_is_never_sent() -> None:
    with pytest.raises(WireError, match="fewer keys"):
        frame(2, 0, 1, bytes(MAX_HEAD + 1))


@given(st.integers(16, 32), st.integers(0, 40))
@settings(max_examples=30)
def test_keys_of_any_width_come_back(width: int, count: int) -> None:
    keys = [bytes([at]) * width for at in range(count)]
    packed = PackedKeys(b"".join(keys), width)
    assert unpack_keys(b"".join(keys), width) == list(packed) == keys
    assert [packed[at] for at in range(-count, count)] == 2 * keys
    assert packed[1:3] == keys[1:3]
    assert len(packed) == count
    with pytest.raises(IndexError):
        packed[count]
    assert unpack_keys(pack_keys(keys), 16) == [key[:16] for key in keys]


@pytest.mark.parametrize(("packed", "width"), [(b"x" * 15, 15), (b"x" * 33, 33), (b"x" * 17, 16), (b"x" * 16, 0)])
def test_bytes_that_are_no_keys_are_refused(packed: bytes, width: int) -> None:
    with pytest.raises(WireError, match="expected whole keys"):
        unpack_keys(packed, width)
    with pytest.raises(WireError, match="expected whole keys"):
        PackedKeys(packed, width)


@pytest.mark.parametrize("keys", [[b"short"], [b"x" * 16, b"x" * 33]])
def test_keys_of_impossible_widths_are_never_sent(keys: list[bytes]) -> None:
    with pytest.raises(WireError, match="expected 16 to 32"):
        pack_keys(keys)


def test_names_travel_as_runs() -> None:
    names = ("host", "host", "nvme", "host")
    assert pack_runs(names) == [("host", 2), ("nvme", 1), ("host", 1)]
    assert unpack_runs(pack_runs(names)) == names


def test_tokens_come_back_and_impossible_ones_do_not_go() -> None:
    assert unpack_tokens(pack_tokens([0, 5, 2**32 - 1])).tolist() == [0, 5, 2**32 - 1]
    assert pack_tokens(np.array([1, 2], np.int32)) == b"\1\0\0\0\2\0\0\0"
    with pytest.raises(WireError, match="token ids -1"):
        pack_tokens([-1])
    with pytest.raises(WireError, match="3 bytes"):
        unpack_tokens(b"abc")


def test_every_request_has_an_answer() -> None:
    assert REQUESTS.keys() == ANSWERS.keys()


def test_a_misspelt_field_of_a_request_is_an_error_and_a_new_one_of_an_answer_is_not() -> None:
    asked = encode(Match("n", b"k" * 16))
    assert decode(Match, asked) == Match("n", b"k" * 16)
    with pytest.raises(WireError, match="losy"):
        decode(Match, asked[:1].replace(b"\x82", b"\x83") + asked[1:] + b"\xa4losy\xc3")
    grown = encode(Matched([("host", 1)])).replace(b"\x81", b"\x82", 1) + b"\xa5later\x01"
    assert decode(Matched, grown) == Matched([("host", 1)])


@given(st.binary(max_size=64))
@settings(max_examples=50)
def test_garbage_is_a_head_or_an_error_and_nothing_else(garbage: bytes) -> None:
    for kind in (Get, Match):
        with contextlib.suppress(WireError):
            assert isinstance(decode(kind, garbage), kind)
