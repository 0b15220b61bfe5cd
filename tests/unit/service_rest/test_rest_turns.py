"""Tenants share the threads of routes that wait: none of them has them all."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import until
from rest_world import KEYS, running

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
            assert http.post("/v1/namespaces/n/blocks:match", json={"keys": KEYS[:1]}).json()["blocks"] == 0
            assert http.delete(f"/v1/namespaces/n/blocks/{KEYS[0]}").json() == {"deleted": 0}
            # What waits for no thread goes on for the tenant itself.
            assert busy.put(f"/v1/namespaces/n/blocks/{KEYS[0]}", content=b"x").status_code == 201
        finally:
            go.set()
        assert {call.result().status_code for call in clears} == {204}
        assert running_now == [0, TURNS]


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
