"""Events over HTTP: followed, resumed, and gaps told."""

import json
import socket
from contextlib import contextmanager

import pytest
from patience import until
from rest_world import KEYS, chain, error_of, put_stream, running, stream

from kvtier.service.cache import Scope, Tokens


class Follower:
    """Reads one stream of events."""

    def __init__(self, response):
        self._lines = response.iter_lines()
        self.headers = response.headers

    def next(self, count):
        """That many events, as (id, name, data)."""
        events, fields = [], {}
        while len(events) < count:
            line = next(self._lines)
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                events.append((fields["id"], fields["event"], json.loads(fields["data"])))
                fields = {}
        return events


@contextmanager
def follow(http, since=None, **headers):
    params = {} if since is None else {"since": since}
    with http.stream("GET", "/v1/events", params=params, headers=headers) as response:
        assert response.status_code == 200
        yield Follower(response)


def path(ns, key):
    return f"/v1/namespaces/{ns}/blocks/{key}"


@pytest.fixture(autouse=True)
def _empty(rest):
    assert rest.http.post("/v1/namespaces/laid:clear").status_code == 204


def test_what_is_put_and_removed_is_told(rest):
    with rest.client() as http, follow(http) as follower:
        assert follower.headers["content-type"].startswith("text/event-stream")
        put_stream(rest.http, "laid", stream(chain(2)))
        rest.http.delete(path("laid", KEYS[1]))
        seen = follower.next(2)
        while seen[-1][1] != "removed":
            seen += follower.next(1)
    stored = [data for _, kind, data in seen if kind == "stored"]
    assert [key for data in stored for key in data["keys"]] == KEYS[:2]
    assert [parent for data in stored for parent in data["parents"]] == [None, KEYS[0]]
    assert {(data["namespace"], data["part"], data["tier"]) for data in stored} == {("laid", 0, "host")}
    assert [depth for data in stored for depth in data["depths"]] == [0, 1]
    assert seen[-1][2]["keys"] == [KEYS[1]]
    sequences = [data["sequence"] for _, _, data in seen]
    assert sequences == list(range(sequences[0], sequences[0] + len(seen)))


def test_a_follower_resumes_where_it_was(rest):
    with rest.client() as http, follow(http) as follower:
        for at in range(3):
            rest.http.put(path("laid", KEYS[at]), content=chain(3)[at][1])
        seen = follower.next(3)
    with rest.client() as http, follow(http, **{"Last-Event-ID": seen[0][0]}) as follower:
        assert follower.next(2) == seen[1:]
    with rest.client() as http, follow(http, since=str(seen[0][2]["sequence"])) as follower:
        assert follower.next(2) == seen[1:]
    with rest.client() as http, follow(http, since="0") as follower:
        ids = [name for name, _, _ in follower.next(3)]
        assert ids != [name for name, _, _ in seen]


def test_a_dropped_namespace_is_told_to_its_end(rest):
    def ends(seen):
        return [kind for _, kind, data in seen if data["namespace"] == "dropped" and kind in ("removed", "cleared")]

    with rest.client() as http, follow(http) as follower:
        for _ in range(20):
            assert rest.http.post("/v1/namespaces", json={"name": "dropped"}).status_code == 201
            assert rest.http.put(path("dropped", KEYS[0]), content=b"x").status_code == 201
            last = follower.next(1)
            assert [(kind, data["namespace"]) for _, kind, data in last] == [("stored", "dropped")]
            assert rest.http.delete("/v1/namespaces/dropped").status_code == 204
            live = follower.next(1)
            assert ends(live) == ["cleared"]
    with rest.client() as http, follow(http, since=last[0][0]) as later:
        assert later.next(1) == live


def test_a_number_of_another_log_is_a_gap(rest):
    rest.http.put(path("laid", KEYS[0]), content=chain(1)[0][1])
    with rest.client() as http, follow(http, since="0123456789abcdef-1") as follower:
        (name, kind, data) = follower.next(1)[0]
        assert (kind, data["sequence"]) == ("gap", 0)
        assert follower.next(1)[0][2]["sequence"] == 1
    with rest.client() as http, follow(http, since=name) as follower:
        assert follower.next(1)[0][1] != "gap"


def test_events_that_are_not_kept_are_a_gap():
    with running(max_events=4) as rest:
        rest.http.post("/v1/namespaces", json={"name": "n"})
        for key in KEYS[:8]:
            rest.http.put(path("n", key), content=b"x")
        with rest.client() as http, follow(http, since="1") as follower:
            (_, kind, data), (_, _, first) = follower.next(2)
            assert kind == "gap"
            assert first["sequence"] == data["sequence"] + 1 > 2


@pytest.mark.parametrize("since", ["x", "-1", "1-2", "0123456789ABCDEF-1", "1" * 30])
def test_ids_that_cannot_be(rest, since):
    for refused in (
        rest.http.get("/v1/events", params={"since": since}),
        rest.http.get("/v1/events", headers={"Last-Event-ID": since}),
    ):
        assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid")


def test_a_follower_that_leaves_holds_nothing(rest):
    with rest.line() as line:
        line.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: rest.server.server_state.tasks)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    rest.at_rest()


def test_a_follower_that_does_not_read_is_cut_off():
    with running(host="8MiB", idle_timeout=1.0, send_buffer=4096) as rest, socket.socket() as line:
        rest.http.post("/v1/namespaces", json={"name": "n"})
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        line.connect(("127.0.0.1", rest.port))
        line.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: rest.server.server_state.tasks)
        many = stream([({"key": f"{at:032x}"}, b"x") for at in range(1000)])
        for _ in range(5):
            assert put_stream(rest.http, "n", many).status_code == 200
            rest.http.post("/v1/namespaces/n:clear")
        rest.at_rest()


def test_followers_leave_when_the_service_drains():
    with running() as rest, rest.client() as http, http.stream("GET", "/v1/events") as response:
        rest.http.post("/v1/admin/drain")
        assert "".join(response.iter_text()).startswith("retry: 1000")
        rest.http.post("/v1/admin/resume")


def test_a_follower_whose_token_is_revoked_is_told_nothing_more(tmp_path):
    tokens = Tokens.open(tmp_path / "tokens.json")
    secret = tokens.create("default", Scope)
    with running(tokens=tmp_path / "tokens.json") as rest, rest.client(secret) as http:
        with http.stream("GET", "/v1/events") as response:
            Tokens.open(tmp_path / "tokens.json").revoke(secret.split("_")[1])
            rest.tokens.reload()
            assert "".join(response.iter_text()) == "retry: 1000\n\n"
        assert http.get("/v1/events").status_code == 401


def test_events_of_other_tenants_and_namespaces_are_not_told(tmp_path):
    tokens = Tokens.open(tmp_path / "tokens.json")
    whole, some = tokens.create("default", Scope), tokens.create("default", [Scope.READ], ["a"])
    with running(tokens=tmp_path / "tokens.json") as rest, rest.client(whole) as all_of, rest.client(some) as reader:
        for name in ("a", "b"):
            assert all_of.post("/v1/namespaces", json={"name": name}).status_code == 201
        with follow(reader) as follower:
            for name, key in [("b", KEYS[0]), ("a", KEYS[1]), ("b", KEYS[2]), ("a", KEYS[3])]:
                assert all_of.put(path(name, key), content=b"x").status_code == 201
            seen = follower.next(2)
        assert [data["keys"] for _, _, data in seen] == [[KEYS[1]], [KEYS[3]]]
