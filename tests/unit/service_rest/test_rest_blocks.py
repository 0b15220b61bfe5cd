"""One block over HTTP: put, get, head, delete, and what their headers mean."""

import base64
import hashlib

import pytest
from rest_world import KEYS, LAYOUT_BYTES, block, digest, error_of, match

KEY = KEYS[0]


@pytest.fixture(autouse=True)
def _empty(rest):
    for name in ("plain", "laid"):
        assert rest.http.post(f"/v1/namespaces/{name}:clear").status_code == 204


def path(ns, key=KEY):
    return f"/v1/namespaces/{ns}/blocks/{key}"


def test_a_block_there_and_back(rest):
    data = block(1, 100_000)
    put = rest.http.put(path("plain"), content=data, headers={"KVTier-Digest": digest(data)})
    assert (put.status_code, put.json()) == (201, {"outcome": "stored"})
    got = rest.http.get(path("plain"))
    assert got.status_code == 200
    assert got.content == data
    told = {name: got.headers[name] for name in ("KVTier-Digest", "KVTier-Part", "KVTier-Depth", "KVTier-Exact")}
    assert told == {"KVTier-Digest": digest(data), "KVTier-Part": "0", "KVTier-Depth": "-1", "KVTier-Exact": "true"}
    assert (got.headers["KVTier-Tier"], got.headers["KVTier-Format"]) == ("host", "raw")
    assert (got.headers["content-type"], got.headers["content-length"]) == ("application/octet-stream", "100000")
    assert "KVTier-Layout" not in got.headers
    head = rest.http.head(path("plain"))
    assert (head.status_code, head.content) == (200, b"")
    ignored = ("date", "x-request-id")
    assert [item for item in head.headers.items() if item[0] not in ignored] == [
        item for item in got.headers.items() if item[0] not in ignored
    ]


def test_a_chain_says_what_comes_before(rest):
    for depth, key in enumerate(KEYS[:3]):
        headers = {"KVTier-Depth": str(depth), "KVTier-Exact": "false" if depth == 2 else "true"}
        if depth:
            headers["KVTier-Parent"] = KEYS[depth - 1]
        assert rest.http.put(path("laid", key), content=block(depth), headers=headers).status_code == 201
    got = rest.http.get(path("laid", KEYS[1]))
    assert (got.headers["KVTier-Depth"], got.headers["KVTier-Parent"]) == ("1", KEYS[0])
    assert len(got.headers["KVTier-Layout"]) == 64
    # A block that is not exact is there for those alone who ask for it.
    assert rest.http.get(path("laid", KEYS[2])).status_code == 404
    lossy = rest.http.get(path("laid", KEYS[2]), params={"lossy": "true"})
    assert (lossy.content, lossy.headers["KVTier-Exact"]) == (block(2), "false")


def test_the_first_writer_wins(rest):
    first = {"If-None-Match": "*"}
    assert rest.http.put(path("plain"), content=b"one", headers=first).status_code == 201
    again = rest.http.put(path("plain"), content=b"two", headers=first)
    assert (again.status_code, error_of(again)["code"]) == (412, "exists")
    plain = rest.http.put(path("plain"), content=b"two")
    assert (plain.status_code, plain.json()) == (200, {"outcome": "exists"})
    assert rest.http.get(path("plain")).content == b"one"


def test_ranges(rest):
    data = block(2, 200_000)
    tag = rest.http.put(path("plain"), content=data) and rest.http.head(path("plain")).headers["ETag"]
    for span, expected in [("0-9", data[:10]), ("150000-", data[150_000:]), ("-5", data[-5:]), ("0-999999", data)]:
        got = rest.http.get(path("plain"), headers={"Range": f"bytes={span}"})
        assert (got.status_code, got.content) == (206, expected)
        assert got.headers["Content-Range"].endswith("/200000")
        # Of the whole block, as its tag is.
        assert got.headers["KVTier-Digest"] == digest(data)
    gone = rest.http.get(path("plain"), headers={"Range": "bytes=200000-"})
    assert (gone.status_code, error_of(gone)["code"]) == (416, "invalid_range")
    assert gone.headers["Content-Range"] == "bytes */200000"
    whole = rest.http.get(path("plain"), headers={"Range": "bytes=0-1,3-4"})
    assert (whole.status_code, whole.content) == (200, data)
    part = {"Range": "bytes=0-1"}
    assert rest.http.get(path("plain"), headers={**part, "If-Range": tag}).status_code == 206
    assert rest.http.get(path("plain"), headers={**part, "If-Range": '"other"'}).status_code == 200
    head = rest.http.head(path("plain"), headers=part)
    assert (head.status_code, head.headers["content-length"]) == (206, "2")


def test_a_client_that_has_the_bytes_gets_none(rest):
    rest.http.put(path("plain"), content=b"abc")
    tag = rest.http.get(path("plain")).headers["ETag"]
    for header, status in [(tag, 304), (f'"x", W/{tag}', 304), ("*", 304), ('"x"', 200)]:
        got = rest.http.get(path("plain"), headers={"If-None-Match": header})
        assert got.status_code == status
        assert got.headers["ETag"] == tag
        assert got.content == (b"abc" if status == 200 else b"")


def test_delete(rest):
    rest.http.put(path("plain"), content=b"abc")
    assert rest.http.delete(path("plain")).json() == {"deleted": 1}
    assert rest.http.delete(path("plain")).json() == {"deleted": 0}
    assert rest.http.get(path("plain")).status_code == 404


def test_digests_are_checked(rest):
    sha = base64.b64encode(hashlib.sha256(b"abc").digest()).decode()
    wrong = {"KVTier-Digest": digest(b"other")}
    for headers in (wrong, {"Content-Digest": f"sha-256=:{sha}:"}, {**wrong, "Content-Digest": f"sha-256=:{sha}:"}):
        refused = rest.http.put(path("plain"), content=b"abe", headers=headers)
        assert (refused.status_code, error_of(refused)["code"]) == (422, "wrong_digest")
        assert rest.http.get(path("plain")).status_code == 404
    good = {"KVTier-Digest": digest(b"abc"), "Content-Digest": f"md5=:AAAA:, sha-256=:{sha}:"}
    assert rest.http.put(path("plain"), content=b"abc", headers=good).status_code == 201


@pytest.mark.parametrize(
    ("ns", "content", "headers", "status", "code"),
    [
        ("laid", b"x", {}, 409, "wrong_layout"),
        ("laid", bytes(LAYOUT_BYTES + 1), {}, 409, "wrong_layout"),
        ("laid", bytes(LAYOUT_BYTES), {"KVTier-Layout": "00" * 32}, 409, "wrong_layout"),
        ("plain", b"x", {"KVTier-Layout": "00" * 32}, 409, "wrong_layout"),
        ("laid", bytes(LAYOUT_BYTES), {"KVTier-Part": "1"}, 409, "wrong_layout"),
        ("plain", b"x", {"KVTier-Part": "-1"}, 400, "invalid"),
        ("plain", b"x", {"KVTier-Depth": "-2"}, 400, "invalid"),
        ("plain", b"x", {"KVTier-Depth": "1"}, 409, "conflict"),
        ("plain", b"x", {"KVTier-Depth": "0", "KVTier-Parent": KEYS[1]}, 409, "conflict"),
        ("plain", b"x", {"KVTier-Parent": "xy" * 16}, 400, "invalid"),
        ("plain", b"x", {"KVTier-Exact": "yes"}, 400, "invalid"),
        ("plain", b"x", {"KVTier-Format": "bitsplit"}, 400, "invalid"),
        ("plain", b"x", {"Content-Encoding": "gzip"}, 400, "invalid"),
        ("plain", b"x", {"KVTier-Digest": "md5=00"}, 400, "invalid"),
        ("plain", b"x", {"Content-Digest": "sha-256=:AAAA:"}, 400, "invalid"),
        ("plain", b"x", {"If-None-Match": '"a"'}, 400, "invalid"),
        ("plain", b"", {}, 400, "invalid"),
        ("plain", bytes((256 << 10) + 1), {}, 413, "too_large"),
        ("nowhere", b"x", {}, 404, "unknown_namespace"),
    ],
)
def test_refused_puts_store_nothing(rest, ns, content, headers, status, code):
    refused = rest.http.put(path(ns), content=content, headers=headers)
    assert (refused.status_code, error_of(refused)["code"]) == (status, code)
    if ns != "nowhere":
        assert rest.http.get(path(ns)).status_code == 404


@pytest.mark.parametrize(
    ("ns", "pieces", "status", "code"),
    [
        ("plain", [], 400, "invalid"),
        ("plain", [bytes(100_000)] * 3, 413, "too_large"),
        ("laid", [b"x"], 409, "wrong_layout"),
        ("laid", [bytes(LAYOUT_BYTES), b"x"], 413, "too_large"),
    ],
)
def test_bodies_of_unknown_length(rest, ns, pieces, status, code):
    refused = rest.http.put(path(ns), content=iter(pieces))
    assert (refused.status_code, error_of(refused)["code"]) == (status, code)
    assert rest.http.get(path(ns)).status_code == 404
    assert rest.http.put(path(ns), content=iter([bytes(LAYOUT_BYTES - 1), b"x"])).status_code == 201


def test_a_tenant_without_room_is_told_so(rest):
    # The host tier has 1 MiB; what a lease holds cannot leave.
    assert rest.http.put(path("plain"), content=bytes(256 << 10)).status_code == 201
    for at in range(1, 12):
        assert rest.http.put(path("plain", KEYS[at]), content=bytes(256 << 10)).status_code in (201, 507)


def test_parts_of_a_block_are_put_and_got_one_by_one(rest):
    group = {"kind": "gqa", "layers": [0], "planes": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    layout = {"block_size": 2, "groups": [group, {**group, "layers": [1], "head_dim": 4}], "shards": 2}
    made = rest.http.post("/v1/namespaces", json={"name": "parts", "layout": layout}).json()
    assert (made["parts"], made["block_bytes"]) == (4, [128, 128, 64, 64])
    for part, nbytes in enumerate(made["block_bytes"]):
        where = {"KVTier-Part": str(part)}
        assert rest.http.get(path("parts"), headers=where).status_code == 404
        assert rest.http.put(path("parts"), content=block(part, nbytes), headers=where).status_code == 201
    assert match(rest.http, "parts", keys=[KEY]).json()["blocks"] == 1
    for part, nbytes in enumerate(made["block_bytes"]):
        got = rest.http.get(path("parts"), headers={"KVTier-Part": str(part)})
        assert (got.content, got.headers["KVTier-Part"]) == (block(part, nbytes), str(part))
    out = rest.http.get(path("parts"), headers={"KVTier-Part": "4"})
    assert (out.status_code, error_of(out)["code"]) == (404, "unknown_block")


@pytest.mark.parametrize("key", ["ab", "AB" * 16, "ab" * 33, "zz" * 16, "ab" * 15 + "a", "..%2f" * 6, KEY + "%0a"])
def test_keys_are_hex(rest, key):
    for method in ("GET", "PUT", "DELETE"):
        refused = rest.http.request(method, path("plain", key), content=b"x" if method == "PUT" else None)
        assert refused.status_code in (400, 404)
        assert error_of(refused)["code"] in ("invalid", "unknown_path")
