"""Hostile clients of the REST API: each gets the documented error, or the end of its connection; nothing is stored,
held or leaked.
"""

import base64
import json
import logging
import re
import socket
import struct

import pytest
from patience import until
from rest_world import (
    KEYS,
    LAYOUT,
    LAYOUT_BYTES,
    block,
    chain,
    descriptors,
    error_of,
    match,
    put_stream,
    raw_error,
    read_all,
    running,
    stream,
)

from kvtier.service.cache import Scope, Tokens
from kvtier.wire.blockstream import MEDIA_TYPE

ONE = f"/v1/namespaces/plain/blocks/{KEYS[0]}"


@pytest.fixture(scope="module")
def rest():
    with running(max_connections=24, send_buffer=4096) as served:
        for name, layout in (("plain", None), ("laid", LAYOUT)):
            assert served.http.post("/v1/namespaces", json={"name": name, "layout": layout}).status_code == 201
        yield served


@pytest.fixture(scope="module")
def impatient():
    """Another one, that does not wait long."""
    with running(idle_timeout=1.0, send_buffer=4096) as served:
        assert served.http.post("/v1/namespaces", json={"name": "plain"}).status_code == 201
        yield served


@pytest.fixture(autouse=True)
def _nothing_is_left(rest, caplog):
    rest.http.get("/healthz")
    until(lambda: len(rest.server.server_state.connections) <= 1)
    before = descriptors()
    yield
    for name in ("plain", "laid"):
        found = match(rest.http, name, keys=KEYS[:1]).json()
        assert found["blocks"] == 0, f"something was stored in {name}"
    rest.at_rest()
    until(lambda: len(rest.server.server_state.connections) <= 1)
    until(lambda: descriptors() <= before)
    # What a client does is no failure of the service.
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def put_head(length, *headers, path=ONE):
    lines = [f"PUT {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


# ---- cut off


def test_a_put_half_closed_at_every_byte_is_told_or_ended(rest):
    whole = put_head(3) + b"abc"
    for length in range(len(whole)):
        answer = rest.raw(whole[:length])
        if length:
            assert raw_error(answer) == (400, "invalid"), length
        else:
            assert answer == b""


def test_a_stream_half_closed_at_every_byte(rest):
    body = stream([({"key": KEYS[0]}, b"abc")])
    head = put_head(len(body), f"Content-Type: {MEDIA_TYPE}", path="/v1/namespaces/plain/blocks:put")
    head = head.replace(b"PUT", b"POST", 1)
    for length in range(len(body)):
        assert raw_error(rest.raw(head + body[:length])) == (400, "invalid"), length


def test_a_chunked_put_that_is_cut_off_at_every_byte(rest):
    head = f"PUT {ONE} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    body = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    for length in range(len(body)):
        assert raw_error(rest.raw(head + body[:length])) == (400, "invalid"), length


def test_a_put_reset_at_every_byte_of_its_body(rest):
    whole = put_head(8) + b"abcdefgh"
    for length in range(len(whole) - 8, len(whole)):
        with rest.line() as line:
            line.sendall(whole[:length])
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_client_that_has_sent_all_and_closes_its_half_is_answered(rest):
    answer = rest.raw(f"GET {ONE} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert raw_error(answer) == (404, "unknown_block")


# ---- too much


def test_an_announced_body_is_refused_before_it_comes(rest):
    for length in (256 * 1024 + 1, 1 << 40, (1 << 63) - 1):
        with rest.line() as line:
            line.sendall(put_head(length))
            assert raw_error(read_all(line)) == (413, "too_large")
    with rest.line() as line:
        line.sendall(put_head("9" * 40))
        assert raw_error(read_all(line)) == (400, "invalid")


def test_a_body_that_grows_too_long(rest):
    refused = rest.http.put(ONE, content=(bytes(50_000) for _ in range(8)))
    assert (refused.status_code, error_of(refused)["code"]) == (413, "too_large")
    refused = rest.http.post(
        "/v1/match",
        content=(b" " * 500_000 for _ in range(20)),
        headers={"Content-Type": "application/json"},
    )
    assert (refused.status_code, error_of(refused)["code"]) == (413, "too_large")


def test_a_record_that_claims_too_much_takes_no_memory(rest):
    head = json.dumps({"key": KEYS[0]}).encode()
    data = b"KVTB\1\0\0\0" + struct.pack("<II", len(head), (1 << 32) - 1) + head
    refused = put_stream(rest.http, "plain", data)
    assert (refused.status_code, error_of(refused)["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: y\r\n" % at for at in range(200)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 40_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % at for at in range(20_000)),
        b"GET /" + b"a" * 200_000,
    ],
)
def test_header_bombs(rest, head):
    with rest.line() as line:
        # The server may hang up before it has taken all of it.
        try:
            line.sendall(head)
            line.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        assert raw_error(read_all(line)) == (431, "too_large")


def test_more_connections_than_there_may_be(rest):
    lines = [socket.create_connection(("127.0.0.1", rest.port), timeout=20) for _ in range(24)]
    try:
        until(lambda: len(rest.server.server_state.connections) >= 24)
        with rest.line() as line:
            answer = read_all(line)
        assert raw_error(answer) == (503, "busy")
        assert b"retry-after: 1" in answer
    finally:
        for line in lines:
            line.close()
    until(lambda: len(rest.server.server_state.connections) <= 1)
    assert rest.http.get("/healthz").status_code == 200


# ---- too slow


@pytest.mark.parametrize("sent", [b"", b"GET / HT", put_head(3)[:-2]])
def test_a_head_that_does_not_come(impatient, sent):
    with impatient.line() as line:
        line.sendall(sent)
        assert raw_error(read_all(line)) == (408, "request_timeout")


def test_a_body_that_does_not_come(impatient):
    with impatient.line() as line:
        line.sendall(put_head(10_000) + b"abc")
        assert raw_error(read_all(line)) == (408, "request_timeout")


def test_a_body_that_trickles(impatient):
    with impatient.line() as line:
        line.sendall(put_head(10_000))
        line.settimeout(0.05)
        answer = b""
        # Ten times as long as it may last.
        for _ in range(200):
            try:
                line.sendall(b"x")
                answer = line.recv(65536)
                break
            except TimeoutError:
                continue
        assert raw_error(answer) == (408, "request_timeout")


def test_an_idle_connection_is_closed(impatient):
    with impatient.line() as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_all(line).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_loses_its_lease(impatient):
    rest = impatient
    for at, key in enumerate(KEYS[:2]):
        assert rest.http.put(f"/v1/namespaces/plain/blocks/{key}", content=block(at, 240_000)).status_code == 201
    body = json.dumps({"keys": KEYS[:2]}).encode()
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", rest.port))
        head = b"POST /v1/namespaces/plain/blocks:get HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        line.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: rest.leases() > 0)
        rest.at_rest()
        # The end of the connection tells the client that it has not got all of it.
        assert b"HTTP/1.1 200" in (answer := read_all(line))
        assert len(answer) < 480_000
    rest.http.post("/v1/namespaces/plain:clear")


# ---- other people's


def test_web_pages_of_others_are_refused(rest):
    def asked(**headers):
        return rest.http.post("/v1/namespaces/plain:clear", headers=headers)

    own = f"127.0.0.1:{rest.port}"
    assert asked(Origin=f"http://{own}").status_code == 204
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://{own}.evil.example"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": f"evil.example:{rest.port}"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost@evil.example"},
        {"Host": ""},
    ):
        refused = asked(**headers)
        assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden"), headers
    for host in ("localhost", "LOCALHOST:7700", "127.1.2.3", "[::1]", f"[::1]:{rest.port}"):
        assert asked(Host=host).status_code == 204, host
    assert rest.http.get("/healthz", headers={"Host": "10.0.0.7"}).status_code == 200


# ---- one after another


def test_what_follows_a_request_does_not_cut_its_answer_off(impatient):
    rest = impatient
    data = block(1, 200_000)
    assert rest.http.put(ONE, content=data).status_code == 201
    whole = f"GET {ONE} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    for after in (b"GARBAGE\r\n\r\n", b"GET / HT", b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000):
        answer = rest.raw(whole + after, close=False)
        assert answer.partition(b"\r\n\r\n")[2][:200_000] == data
    rest.http.post("/v1/namespaces/plain:clear")


def test_requests_in_a_row_are_answered_in_order(rest):
    one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    other = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = rest.raw((one + other) * 10)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"404"] * 10


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_a_token_opens_the_one_request_that_it_comes_with(tmp_path, size):
    path = tmp_path / "tokens.json"
    secret = Tokens.open(path).create("default", Scope)
    wrong = secret[:-1] + ("1" if secret[-1] == "0" else "0")
    paths = [f"/v1/namespaces/plain/blocks/{key}" for key in KEYS]
    good = [put_head(3, f"Authorization: Bearer {secret}", path=one) + b"abc" for one in paths]
    chunked = put_head(0, "Transfer-Encoding: chunked", path=paths[1]).replace(b"Content-Length: 0\r\n", b"")
    bad = [
        put_head(3, path=paths[1]) + b"abc",
        put_head(3, f"Authorization: Bearer {wrong}", path=paths[1]) + b"abc",
        put_head(3, f"Authorization: Basic {secret}", path=paths[1]) + b"abc",
        put_head(3, f"Authorization: Bearer {wrong}", f"Authorization: Bearer {secret}", path=paths[1]) + b"abc",
        # In the trailer, and in the body.
        chunked + f"3\r\nabc\r\n0\r\nAuthorization: Bearer {secret}\r\n\r\n".encode(),
        put_head(len(good[1]), path=paths[1]) + good[1],
    ]
    with running(tokens=path) as rest, rest.client(secret) as http:
        for name, layout in (("plain", None), ("laid", LAYOUT)):
            assert http.post("/v1/namespaces", json={"name": name, "layout": layout}).status_code == 201
        # Refused before its body is read, which then is none of the next request's.
        ahead = "/v1/namespaces/laid/blocks/" + KEYS[0]
        early = put_head(len(good[1]), f"Authorization: Bearer {secret}", path=ahead) + good[1]
        for before, status in ((good[0], rb"20[01]"), (early, rb"409")):
            for refused in bad:
                with rest.line() as line:
                    sent = before + refused + good[2]
                    for at in range(0, len(sent), size):
                        try:
                            line.sendall(sent[at : at + size])
                        except OSError:  # it hung up
                            break
                    answer = read_all(line)
                assert re.fullmatch(status + rb" 401", b" ".join(re.findall(rb"HTTP/1.1 (\d+)", answer))), answer
        found = [http.head(one).status_code for one in paths[:3]]
        assert found == [200, 404, 404]
        rest.http.headers["Authorization"] = f"Bearer {secret}"
        rest.at_rest()


# ---- and names


def test_paths_that_are_none(rest):
    for path in [
        "/v1/namespaces/../../etc/passwd/blocks/" + KEYS[0],
        "/v1/namespaces/%2e%2e%2f%2e%2e%2fetc/blocks/" + KEYS[0],
        "/v1/namespaces/plain%00/blocks/" + KEYS[0],
        "/v1/namespaces/plain/blocks/..%2f..%2f" + KEYS[0],
        "/v1/namespaces/plain/blocks/" + KEYS[0] + "%0d%0aX-Evil:%201",
        "/v1/namespaces/plain/blocks/" + KEYS[0] + "/",
        "//v1/namespaces",
        "/v1/namespaces/" + "a" * 129 + "/blocks/" + KEYS[0],
        "/v1/namespaces/plain/blocks/" + "AB" * 16,
        "/v1/namespaces/pl%c3%a4in/blocks/" + KEYS[0],
    ]:
        with rest.line() as line:
            body = b"abc"
            line.sendall(put_head(len(body), "Connection: close", path=path) + body)
            answer = read_all(line)
        assert raw_error(answer)[0] in (400, 404), path
        assert b"X-Evil" not in answer.partition(b"\r\n\r\n")[0]
    assert rest.http.get("/v1/namespaces").json()["namespaces"][-1]["name"] == "plain"


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PUT " + ONE.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"PUT "
        + ONE.encode()
        + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX\x00Y: 1\r\n\r\n",
    ],
)
def test_what_is_no_http(rest, data):
    assert raw_error(rest.raw(data)) == (400, "invalid")


def test_wrong_digests_and_layouts(rest):
    sha = base64.b64encode(bytes(32)).decode()
    for ns, headers, status, code in [
        ("plain", {"KVTier-Digest": "xxh3-128=" + "0" * 32}, 422, "wrong_digest"),
        ("plain", {"Content-Digest": f"sha-256=:{sha}:"}, 422, "wrong_digest"),
        ("laid", {}, 409, "wrong_layout"),
        ("laid", {"KVTier-Layout": "0" * 64}, 409, "wrong_layout"),
    ]:
        refused = rest.http.put(f"/v1/namespaces/{ns}/blocks/{KEYS[0]}", content=b"abc", headers=headers)
        assert (refused.status_code, error_of(refused)["code"]) == (status, code)
    records = chain(3)
    records[2] = (records[2][0] | {"digest": "0" * 32}, records[2][1])
    assert error_of(put_stream(rest.http, "laid", stream(records)))["code"] == "wrong_digest"
    records[2] = (chain(3)[2][0], bytes(LAYOUT_BYTES - 1))
    assert error_of(put_stream(rest.http, "laid", stream(records)))["code"] == "wrong_layout"


def test_a_tenant_sees_nothing_of_another(tmp_path):
    tokens = Tokens.open(tmp_path / "tokens.json")
    table = tmp_path / "tenants.toml"
    table.write_text('[a]\nhost = "512KiB"\n[b]\nhost = "512KiB"\n')
    secrets = [tokens.create(name, [Scope.READ, Scope.WRITE]) for name in ("a", "b")]
    with running(tokens=tmp_path / "tokens.json", tenants=table) as rest:
        with rest.client(secrets[0]) as one, rest.client(secrets[1]) as other:
            for http in (one, other):
                assert http.post("/v1/namespaces", json={"name": "n"}).status_code == 201
            path = f"/v1/namespaces/n/blocks/{KEYS[0]}"
            assert one.put(path, content=b"secret").status_code == 201
            pin = one.post("/v1/namespaces/n/pins", json={"keys": KEYS[:1], "ttl": 60}).json()["id"]
            ahead = one.post("/v1/namespaces/n/prefetches", json={"keys": KEYS[:1]}).json()["id"]
            assert other.get(path).status_code == 404
            assert other.head(path).status_code == 404
            assert match(other, "n", keys=KEYS[:1]).json()["blocks"] == 0
            assert other.delete(path).json() == {"deleted": 0}
            assert other.delete(f"/v1/pins/{pin}").status_code == 404
            assert other.get(f"/v1/prefetches/{ahead}").status_code == 404
            assert other.put(path, content=b"mine").json() == {"outcome": "stored"}
            assert other.post("/v1/namespaces/n:clear").status_code == 204
            # A full tenant moves nothing of another.
            for at, key in enumerate(KEYS[1:9]):
                other.put(f"/v1/namespaces/n/blocks/{key}", content=block(at, 200_000))
            assert one.get(path).content == b"secret"
            assert [row["name"] for row in other.get("/v1/tenants").json()["tenants"]] == ["b"]
            rest.http.headers["Authorization"] = f"Bearer {secrets[0]}"
        rest.at_rest()
