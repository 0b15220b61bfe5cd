"""Namespaces, pins, prefetches, probes, figures and admin verbs over HTTP; tokens and what they open."""

import logging
import time
from concurrent.futures import Future

import pytest
from patience import until
from prometheus_client.parser import text_string_to_metric_families
from rest_world import KEYS, LAYOUT, LAYOUT_BYTES, chain, error_of, match, put_stream, running, stream

from kvtier.errors import LeaseError, TierUnavailable
from kvtier.service.cache import Reading, Scope, Tokens
from kvtier.service.cache.namespaces import layout_from_data


def test_namespaces(rest):
    body = {"name": "made", "layout": LAYOUT, "model": "m", "numerics": "n", "lora": "l"}
    made = rest.http.post("/v1/namespaces", json=body)
    assert made.status_code == 201
    row = made.json()
    assert {name: row[name] for name in ("name", "model", "numerics", "lora")} == {
        name: body[name] for name in ("name", "model", "numerics", "lora")
    }
    assert row["fingerprint"] == layout_from_data(LAYOUT).fingerprint.hex()
    assert (row["parts"], row["block_bytes"]) == (1, [LAYOUT_BYTES])
    assert rest.http.post("/v1/namespaces", json=body).json()["created"] == row["created"]
    other = rest.http.post("/v1/namespaces", json={**body, "model": "x"})
    assert (other.status_code, error_of(other)["code"]) == (409, "conflict")
    assert "namespace made is there with another model:" in error_of(other)["message"]
    assert [one["name"] for one in rest.http.get("/v1/namespaces").json()["namespaces"]] == ["laid", "made", "plain"]
    put_stream(rest.http, "made", stream(chain(2)))
    row = rest.http.get("/v1/namespaces/made").json()
    assert (row["stored"], row["stored_bytes"], row["host_blocks"]) == (2, 2 * LAYOUT_BYTES, 2)
    assert rest.http.post("/v1/namespaces/made:clear").status_code == 204
    assert rest.http.get("/v1/namespaces/made").json()["host_blocks"] == 0
    assert rest.http.delete("/v1/namespaces/made").status_code == 204
    for method, path in [("GET", ""), ("DELETE", ""), ("POST", ":clear")]:
        gone = rest.http.request(method, f"/v1/namespaces/made{path}")
        assert (gone.status_code, error_of(gone)["code"]) == (404, "unknown_namespace")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": ""},
        {"name": "a/b"},
        {"name": ".." * 65},
        {"name": "a\n"},
        {"name": "x", "secret": 1},
        {"name": "x", "model": "m" * 2000},
        {"name": "x", "layout": {}},
        {"name": "x", "layout": {**LAYOUT, "shards": 0}},
        {"name": "x", "layout": {**LAYOUT, "groups": []}},
        {"name": "x", "layout": {**LAYOUT, "groups": [{**LAYOUT["groups"][0], "planes": 1}]}},
        {"name": "x", "layout": {**LAYOUT, "groups": [{**LAYOUT["groups"][0], "dtype": "int3"}]}},
        {"name": "x", "layout": {**LAYOUT, "groups": [{**LAYOUT["groups"][0], "layers": ["0"]}]}},
    ],
)
def test_namespaces_that_cannot_be(rest, body):
    refused = rest.http.post("/v1/namespaces", json=body)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid")


@pytest.mark.parametrize("name", ["model", "scheme", "name"])
def test_texts_that_are_none(rest, name):
    # httpx does not write lone surrogates.
    body = f'{{"name": "x", "{name}": "\\ud800"}}'
    refused = rest.http.post("/v1/namespaces", content=body, headers={"Content-Type": "application/json"})
    assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid")


def test_pins(rest):
    put_stream(rest.http, "laid", stream(chain(2)))
    pinned = rest.http.post("/v1/namespaces/laid/pins", json={"keys": KEYS[:4], "ttl": 60})
    assert pinned.status_code == 201
    pin = pinned.json()
    assert pin["blocks"] == 2
    assert 50 < pin["expires"] - time.time() < 70
    assert rest.http.delete(f"/v1/pins/{pin['id']}").status_code == 204
    for name in (pin["id"], "..", "%2e%2e%2fetc"):
        gone = rest.http.delete(f"/v1/pins/{name}")
        assert gone.status_code in (400, 404, 405)
        error_of(gone)
    for body in ({"keys": KEYS[:1]}, {"keys": KEYS[:1], "ttl": 0}, {"keys": KEYS[:1], "ttl": 1e9}):
        assert rest.http.post("/v1/namespaces/laid/pins", json=body).status_code == 400
    nothing = rest.http.post("/v1/namespaces/laid/pins", json={"keys": KEYS[9:10], "ttl": 1})
    assert error_of(nothing)["code"] == "unknown_block"


def test_prefetches(rest):
    put_stream(rest.http, "laid", stream(chain(2)))
    begun = rest.http.post("/v1/namespaces/laid/prefetches", json={"keys": KEYS[:4], "timeout": 5})
    assert begun.status_code == 202
    path = f"/v1/prefetches/{begun.json()['id']}"
    until(lambda: rest.http.get(path).json()["state"] == "done")
    assert rest.http.get(path).json()["blocks"] == 2
    assert rest.http.delete(path).json()["state"] == "done"
    for gone in (path, "/v1/prefetches/none"):
        assert error_of(rest.http.get(gone))["code"] == "unknown_prefetch"


def test_probes_and_unknown_paths(rest):
    assert rest.http.get("/healthz").json() == {"status": "ok"}
    assert rest.http.get("/readyz").json() == {"status": "ready"}
    for method, path, status, code in [
        ("GET", "/v2", 404, "unknown_path"),
        ("GET", "/v1/namespaces/plain/../../../etc/passwd", 404, "unknown_path"),
        ("PATCH", "/v1/namespaces", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
    ]:
        refused = rest.http.request(method, path)
        assert (refused.status_code, error_of(refused)["code"]) == (status, code)
    allowed = {
        "/v1/namespaces": "GET, POST",
        "/v1/namespaces/plain": "DELETE, GET",
        "/v1/namespaces/plain:clear": "POST",
        f"/v1/namespaces/plain/blocks/{KEYS[0]}": "DELETE, GET, HEAD, PUT",
        "/v1/namespaces/plain/blocks:get": "POST",
    }
    for path, methods in allowed.items():
        refused = rest.http.options(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, methods)


def test_a_failure_is_told_without_what_failed(rest, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the secret")

    monkeypatch.setattr(rest.cache, "match", fail)
    failed = match(rest.http, "plain", keys=KEYS[:1])
    assert (failed.status_code, error_of(failed)["code"]) == (500, "internal")
    assert "secret" not in failed.text


@pytest.mark.parametrize("error", [LeaseError("its owner is gone"), TierUnavailable("closed")])
def test_what_is_under_way_when_the_tiers_close_is_told_to_come_back(rest, monkeypatch, error):
    failed: Future[Reading] = Future()
    failed.set_exception(error)
    monkeypatch.setattr(rest.cache, "read", lambda *_, **__: failed)
    refused = rest.http.get(f"/v1/namespaces/plain/blocks/{KEYS[0]}")
    assert (refused.status_code, error_of(refused)["code"]) == (503, "draining")
    assert refused.headers["retry-after"] == "5"


def test_figures(rest):
    put_stream(rest.http, "laid", stream(chain(2)))
    stats = rest.http.get("/v1/stats").json()
    (tenant,) = stats["tenants"]
    assert (tenant["name"], tenant["quotas"]["host"]) == ("default", 1 << 20)
    assert tenant["tiers"]["host"]["blocks"] >= 2
    assert any(verb["verb"] == "put" for verb in stats["verbs"])
    (row,) = rest.http.get("/v1/tenants").json()["tenants"]
    assert (row["name"], row["quotas"]) == ("default", tenant["quotas"])
    assert 2 * LAYOUT_BYTES <= row["occupied"]["host"] <= 1 << 20
    families = {family.name: family for family in text_string_to_metric_families(rest.http.get("/metrics").text)}
    assert {"kvtier_service_calls", "kvtier_http_requests", "kvtier_occupied_bytes"} <= set(families)
    paths = {sample.labels["path"] for sample in families["kvtier_http_requests"].samples}
    assert "/v1/namespaces/{ns}/blocks:put" in paths
    assert all("laid" not in path for path in paths)


def test_admin_verbs(tmp_path):
    with running(nvme=tmp_path / "nvme") as rest:
        rest.http.post("/v1/namespaces", json={"name": "n"})
        rest.http.put(f"/v1/namespaces/n/blocks/{KEYS[0]}", content=b"abc")
        assert rest.http.post("/v1/admin/flush").status_code == 204
        assert rest.http.post("/v1/admin/compact").json().keys() == {"tenants"}
        smaller = rest.http.post("/v1/admin/capacity", json={"tenant": "default", "tier": "host", "bytes": 512 << 10})
        assert smaller.json() == {"bytes": 512 << 10}
        assert rest.http.get("/v1/tenants").json()["tenants"][0]["quotas"]["host"] == 512 << 10
        assert rest.http.post("/v1/admin/policy", json={"tenant": "default", "policy": "arc"}).status_code == 204
        for body in ({"tenant": "default", "policy": "os:system"}, {"tenant": "../x", "policy": "lru"}):
            assert rest.http.post("/v1/admin/policy", json=body).status_code == 400
        assert rest.http.post("/v1/admin/drain").json() == {"status": "draining"}
        assert rest.http.get("/readyz").status_code == 503
        late = rest.http.get(f"/v1/namespaces/n/blocks/{KEYS[0]}")
        assert (late.status_code, error_of(late)["code"]) == (503, "draining")
        assert int(late.headers["Retry-After"]) >= 1
        assert rest.http.post("/v1/admin/resume").json() == {"status": "ready"}
        assert rest.http.get(f"/v1/namespaces/n/blocks/{KEYS[0]}").content == b"abc"


# ---- tokens


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A service with tokens, by what they may do."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    tokens = Tokens.open(path)
    made = {
        "read": tokens.create("default", [Scope.READ]),
        "write": tokens.create("default", [Scope.WRITE]),
        "admin": tokens.create("default", Scope),
        "some": tokens.create("default", [Scope.READ, Scope.WRITE], ["a-*"]),
    }
    with running(tokens=path) as rest:
        clients = {name: rest.client(token) for name, token in made.items()}
        for name in ("a-1", "b-1"):
            assert clients["admin"].post("/v1/namespaces", json={"name": name}).status_code == 201
        yield rest, clients, made
        for client in clients.values():
            client.close()


def test_without_a_token_there_is_nothing(guarded):
    rest, _, made = guarded
    for path in ("/v1/namespaces", "/v1/stats", "/metrics", "/v1/events", "/v1/nowhere"):
        for header in (
            None,
            "Bearer",
            "Bearer x",
            f"Bearer {made['read'][:-1]}",
            f"Basic {made['read']}",
            made["read"],
        ):
            refused = rest.http.get(path, headers={} if header is None else {"Authorization": header})
            assert (refused.status_code, error_of(refused)["code"]) == (401, "unauthorized")
            assert refused.headers["WWW-Authenticate"] == "Bearer"
    for path in ("/healthz", "/readyz", "/openapi.json"):
        assert rest.http.get(path).status_code == 200


def test_scopes(guarded):
    _, clients, _ = guarded
    path = f"/v1/namespaces/a-1/blocks/{KEYS[0]}"
    assert clients["write"].put(path, content=b"abc").status_code == 201
    assert clients["read"].get(path).content == b"abc"
    for name, method, asked in [
        ("read", "PUT", path),
        ("read", "DELETE", path),
        ("read", "POST", "/v1/namespaces/a-1:clear"),
        ("write", "GET", path),
        ("write", "GET", "/metrics"),
        ("read", "POST", "/v1/admin/drain"),
        ("some", "POST", "/v1/admin/flush"),
    ]:
        refused = clients[name].request(method, asked, content=b"x" if method == "PUT" else None)
        assert (refused.status_code, error_of(refused)["code"]) == (403, "forbidden"), (name, asked)
    assert clients["admin"].get("/metrics").status_code == 200


def test_a_token_of_some_namespaces_knows_no_others(guarded):
    _, clients, _ = guarded
    names = [one["name"] for one in clients["some"].get("/v1/namespaces").json()["namespaces"]]
    assert names == ["a-1"]
    told = []
    for other in ("b-1", "b-2"):  # one that is there, one that is not
        refused = clients["some"].get(f"/v1/namespaces/{other}/blocks/{KEYS[0]}")
        told.append((refused.status_code, refused.text.replace(other, "")))
    assert told[0] == told[1]
    assert told[0][0] in (403, 404)
    assert clients["some"].post("/v1/namespaces", json={"name": "b-3"}).status_code == 403


def test_the_log_tells_who_and_no_secret(guarded, caplog, monkeypatch):
    rest, clients, made = guarded
    caplog.set_level(logging.INFO, "kvtier.service.access")
    monkeypatch.setattr(logging.getLogger("kvtier"), "propagate", True)
    answer = clients["read"].get("/v1/stats?token=hunter2")
    rest.http.get("/x%0aINFO forged", headers={"Authorization": "Bearer hidden"})
    until(lambda: len([one for one in caplog.records if one.name == "kvtier.service.access"]) >= 2)
    records = [vars(one) for one in caplog.records if one.name == "kvtier.service.access"]
    assert records[0]["request_id"] == answer.headers["x-request-id"]
    assert (records[0]["tenant"], records[0]["path"], records[0]["status"]) == ("default", "/v1/stats", 200)
    assert records[0]["token"] == made["read"].split("_")[1]
    assert "\n" not in records[1]["path"]
    told = repr(records)
    assert made["read"].split("_")[2] not in told
    assert "hunter2" not in told
    assert "hidden" not in told
