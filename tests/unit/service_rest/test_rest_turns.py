"""Routes that wait have threads by tenant, and connections are shared: whoever has many holds up nobody else."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import until
from rest_world import KEYS, error_of, match, raw_error, running

from kvtier.service.cache import Scope, Tokens
from kvtier.service.cache.tenant import Tenant

CALLS = 48
TURNS = 8
WIDE = {
    "block_size": 1,
    "groups": [{"kind": "gqa", "layers": [0], "kv_heads": 4096, "head_dim": 1, "dtype": "int8"}],
    "shards": 4096,
}


def test_a_tenant_that_fills_its_turns_holds_up_nobody_else(tmp_path, monkeypatch):
    tenants, tokens = tmp_path / "tenants.toml", Tokens.open(tmp_path / "tokens.json")
    tenants.write_text('[a]\nhost = "512KiB"\n[b]\nhost = "512KiB"\n')
    one, other = (tokens.create(name, Scope) for name in "ab")
    held, running_now, go = threading.Lock(), [0, 0], threading.Event()
    clear = Tenant.clear

    def slowly(self, space):
        with held:
            running_now[0] += 1
            running_now[1] = max(running_now)
        assert go.wait(30)
        clear(self, space)
        with held:
            running_now[0] -= 1

    monkeypatch.setattr(Tenant, "clear", slowly)
    with (
        running(tokens=tmp_path / "tokens.json", tenants=tenants, request_timeout=20.0) as rest,
        rest.client(one) as busy,
        rest.client(other) as http,
        ThreadPoolExecutor(CALLS) as pool,
    ):
        for client in (busy, http):
            assert client.post("/v1/namespaces", json={"name": "n"}).status_code == 201
        clears = [pool.submit(busy.post, "/v1/namespaces/n:clear") for _ in range(CALLS)]
        try:
            until(lambda: running_now[0] == TURNS)
            assert http.get("/v1/namespaces").status_code == 200
            assert match(http, "n", keys=KEYS[:1]).json()["blocks"] == 0
            assert http.delete(f"/v1/namespaces/n/blocks/{KEYS[0]}").json() == {"deleted": 0}
            # What waits for no thread goes on for the tenant itself.
            assert busy.put(f"/v1/namespaces/n/blocks/{KEYS[0]}", content=b"x").status_code == 201
        finally:
            go.set()
        assert {call.result().status_code for call in clears} == {204}
        assert running_now == [0, TURNS]


def test_tenants_that_fill_all_their_turns_hold_up_no_other_no_admin_and_no_probe(tmp_path, monkeypatch):
    names = "abcdef"
    tenants, tokens = tmp_path / "tenants.toml", Tokens.open(tmp_path / "tokens.json")
    tenants.write_text("".join(f'[{name}]\nhost = "128KiB"\n' for name in [*names, "other"]))
    secrets, admins = [tokens.create(name, [Scope.READ, Scope.WRITE]) for name in names], tokens.create("other", Scope)
    go, held, lock = threading.Event(), [0], threading.Lock()

    def hang(self, space):
        with lock:
            held[0] += 1
        go.wait(30)

    monkeypatch.setattr(Tenant, "clear", hang)
    with contextlib.ExitStack() as stack:
        options = {"tokens": tmp_path / "tokens.json", "tenants": tenants, "request_timeout": 20.0}
        rest = stack.enter_context(running(max_connections=128, **options))
        admin = stack.enter_context(rest.client(admins))
        clients = [stack.enter_context(rest.client(secret)) for secret in secrets]
        pool = stack.enter_context(ThreadPoolExecutor(TURNS * len(names)))
        stack.callback(go.set)
        assert admin.post("/v1/namespaces", json={"name": "n"}).status_code == 201
        for http in clients:
            assert http.post("/v1/namespaces", json={"name": "n"}).status_code == 201
        calls = [pool.submit(http.post, "/v1/namespaces/n:clear") for http in clients for _ in range(TURNS)]
        until(lambda: held[0] == TURNS * len(names))
        assert match(admin, "n", keys=KEYS[:1]).json()["blocks"] == 0
        for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/stats"):
            assert admin.get(path).status_code == 200, path
        for verb in ("drain", "resume", "flush"):
            assert admin.post(f"/v1/admin/{verb}").is_success, verb
        go.set()
        assert {call.result().status_code for call in calls} == {204}


def test_admins_that_wait_hold_up_neither_their_tenant_nor_a_drain(monkeypatch):
    go, held = threading.Event(), threading.Semaphore(0)

    def hang(*_):
        held.release()
        go.wait(30)

    with running(request_timeout=0.3) as rest, ThreadPoolExecutor(TURNS) as pool:
        monkeypatch.setattr(rest.cache._tenants["default"].store, "flush", hang)
        flushes = [pool.submit(rest.http.post, "/v1/admin/flush") for _ in range(TURNS)]
        try:
            assert all(held.acquire(timeout=20) for _ in range(TURNS))
            late = rest.http.post("/v1/admin/compact")
            assert (late.status_code, late.json()["error"]["code"]) == (503, "busy")
            assert rest.http.get("/v1/stats").status_code == 200
            assert rest.http.post("/v1/admin/drain").json() == {"status": "draining"}
            assert rest.http.post("/v1/admin/resume").json() == {"status": "ready"}
        finally:
            go.set()
        assert [flush.result().status_code for flush in flushes] == [204] * TURNS


def test_who_gets_no_turn_in_time_is_told_to_come_back(monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(Tenant, "clear", lambda *_: go.wait(30))
    with running(request_timeout=0.3) as rest, ThreadPoolExecutor(TURNS) as pool:
        assert rest.http.post("/v1/namespaces", json={"name": "n"}).status_code == 201
        clears = [pool.submit(rest.http.post, "/v1/namespaces/n:clear") for _ in range(TURNS)]
        until(lambda: rest.cache.underway == TURNS)
        late = rest.http.get("/v1/namespaces")
        go.set()
        assert (late.status_code, late.json()["error"]["code"], late.headers["Retry-After"]) == (503, "busy", "5")
        assert [call.result().status_code for call in clears] == [204] * TURNS
        assert rest.http.get("/v1/namespaces").status_code == 200


@pytest.mark.parametrize("below", [False, True], ids=["host", "nvme"])
def test_a_namespace_of_thousands_of_parts_is_cleared_as_one(tmp_path, monkeypatch, below):
    with running(host="8MiB", nvme=tmp_path if below else None) as rest:
        assert rest.http.post("/v1/namespaces", json={"name": "wide", "layout": WIDE}).status_code == 201
        host, cleared = rest.cache._tenants["default"].store.host, []
        clear = host.clear
        monkeypatch.setattr(host, "clear", lambda ns: cleared.append(len(ns)) or clear(ns))
        assert rest.http.post("/v1/namespaces/wide:clear").status_code == 204
        assert rest.http.delete("/v1/namespaces/wide").status_code == 204
        assert cleared == [4096] * (4 if below else 2), "again after a tier below, for what came up meanwhile"


def test_a_tenant_with_many_requests_under_way_leaves_places_to_others(tmp_path):
    tenants, tokens = tmp_path / "tenants.toml", Tokens.open(tmp_path / "tokens.json")
    tenants.write_text('[a]\nhost = "512KiB"\n[b]\nhost = "512KiB"\n')
    greedy, other = (tokens.create(name, Scope) for name in "ab")
    with contextlib.ExitStack() as stack:
        rest = stack.enter_context(
            running(tokens=tmp_path / "tokens.json", tenants=tenants, max_connections=16, idle_timeout=20.0)
        )
        one, http = (stack.enter_context(rest.client(secret)) for secret in (greedy, other))
        for _ in range(12):
            followed = stack.enter_context(one.stream("GET", "/v1/events"))
            assert followed.status_code == 200
        refused = one.get("/v1/namespaces")
        assert (refused.status_code, error_of(refused)["code"], refused.headers["Retry-After"]) == (503, "busy", "1")
        assert "has 12 of 16 connections, and 4 are left for all" in error_of(refused)["message"]
        assert http.get("/v1/namespaces").status_code == 200
        for path in ("/healthz", "/metrics"):
            assert one.get(path).status_code == 200, path
        assert one.post("/v1/admin/flush").status_code == 204
        followed.close()
        until(lambda: one.get("/v1/namespaces").status_code == 200)


def test_connections_that_wait_for_a_further_request_make_room():
    with contextlib.ExitStack() as stack:
        rest = stack.enter_context(running(max_connections=8, idle_timeout=20.0))

        def kept():
            line = stack.enter_context(rest.line())
            line.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += line.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            return line

        first, *others = [kept() for _ in range(8)]
        others.append(kept())
        assert first.recv(1) == b"", "the one that waited longest"
        # An answer may be here before its connection waits for a further request.
        until(lambda: all(one.timeout_keep_alive_task is not None for one in rest.server.server_state.connections))
        # Those that have begun to ask stay, and then nobody else comes in.
        for line in others:
            line.sendall(b"GET /hea")
        until(lambda: all(one.timeout_keep_alive_task is None for one in rest.server.server_state.connections))
        assert raw_error(rest.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")) == (503, "busy")
