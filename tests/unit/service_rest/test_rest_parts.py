"""What the routes are made of: ranges, tags, digests, the buffer pool, cuts of a body."""

import base64
import hashlib

import pytest

from kvtier.service.cache import ServiceError
from kvtier.service.rest.errors import RestError, from_validation
from kvtier.service.rest.heads import content_digest, etag, matches_tag, span_of
from kvtier.service.rest.memory import BufferPool
from kvtier.service.rest.sending import WRITE_BUFFER, _chunks


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("bytes=0-0", (0, 0)),
        ("bytes=0-", (0, 99)),
        ("bytes=10-19", (10, 19)),
        ("bytes=90-500", (90, 99)),
        ("bytes=-1", (99, 99)),
        ("bytes=-500", (0, 99)),
        # What is no range may be ignored, and several ranges at once are.
        ("bytes=", None),
        ("bytes=-", None),
        ("bytes=9-5", None),
        ("bytes=0-1,5-6", None),
        ("lines=0-1", None),
        ("bytes=a-b", None),
    ],
)
def test_ranges(header, expected):
    assert span_of(header, 100) == expected


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_ranges_that_are_not_there(header):
    with pytest.raises(RestError) as told:
        span_of(header, 100)
    assert (told.value.status, told.value.headers["Content-Range"]) == (416, "bytes */100")


def test_tags():
    tag = etag(bytes(16))
    assert tag == '"xxh3-128-' + "0" * 32 + '"'
    assert matches_tag("*", tag)
    assert matches_tag(f'"a", W/{tag}', tag)
    assert not matches_tag('"a"', tag)
    assert not matches_tag(tag.strip('"'), tag)


def test_content_digests():
    sha = hashlib.sha256(b"x").digest()
    told = base64.b64encode(sha).decode()
    assert content_digest(f"sha-256=:{told}:") == sha
    assert content_digest(f"md5=:AAAA:, sha-256=:{told}:") == sha
    assert content_digest(None) is None
    assert content_digest("sha-512=:AAAA:") is None
    for bad in ("sha-256=:AAAA:", "sha-256=:AAA:", "sha-256=::"):
        with pytest.raises(RestError):
            content_digest(bad)


def test_the_pool_is_bounded_for_each_and_its_memory_is_used_again():
    pool = BufferPool(1 << 20)
    first = pool.take("a", 300_000)
    assert len(first.view) == 300_000
    first.view[:2] = b"ab"
    assert pool.used["a"] == 512 << 10
    second = pool.take("a", 400_000)
    with pytest.raises(ServiceError) as told:
        pool.take("a", 1)
    assert (told.value.code, told.value.status) == ("busy", 503)
    pool.take("b", 400_000).release()
    first.release()
    again = pool.take("b", 500_000)
    assert bytes(again.view[:2]) == b"ab"
    again.release()
    second.release()
    assert set(pool.used.values()) == {0}


def test_one_body_is_always_let_in():
    pool = BufferPool(100_000)
    pool.take("a", 90_000)
    with pytest.raises(ServiceError):
        pool.take("a", 1)


@pytest.mark.parametrize("sizes", [[], [1], [WRITE_BUFFER], [WRITE_BUFFER + 1], [8, 1 << 20, 7, 300_000], [1 << 20, 8]])
def test_the_end_of_a_body_is_sent_as_a_copy(sizes):
    pieces = [memoryview(bytes([at % 251]) * size) for at, size in enumerate(sizes)]
    whole = b"".join(pieces)
    chunks = list(_chunks(pieces, len(whole)))
    assert b"".join(chunks) == whole
    borrowed = sum(len(chunk) for chunk in chunks if isinstance(chunk, memoryview))
    assert borrowed == max(len(whole) - WRITE_BUFFER, 0)
    assert all(isinstance(chunk, memoryview) for chunk in chunks[:-1])


def test_validation_errors_name_the_field():
    error = from_validation([{"type": "missing", "loc": ("body", "keys"), "msg": "Field required"}])
    assert (error.status, error.code, error.param) == (400, "invalid", "keys")
    error = from_validation([{"type": "x", "loc": ("header", "KVTier-Part"), "msg": "Input should be 1"}])
    assert (error.param, str(error)) == ("KVTier-Part", "KVTier-Part: expected 1")
