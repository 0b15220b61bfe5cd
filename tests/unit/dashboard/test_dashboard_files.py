"""The page's files as they are served, and the curves that it draws."""

import re

import pytest
from rest_world import LAYOUT, LAYOUT_BYTES, chain, error_of, put_stream, running, stream

from kvtier.service.cache import Scope, Tokens


@pytest.fixture(scope="module")
def rest():
    with running() as served:
        assert served.http.post("/v1/namespaces", json={"name": "laid", "layout": LAYOUT}).status_code == 201
        yield served


def test_the_page_needs_no_token_and_loads_nothing_from_elsewhere(tmp_path):
    path = tmp_path / "tokens.json"
    Tokens.open(path).create("default", {Scope.READ})
    with running(tokens=path) as rest:
        shown = rest.http.get("/")
        assert (shown.status_code, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
        names = re.findall(r'(?:src|href)="(/[^"]+)"', shown.text)
        parts = {name: rest.http.get(name) for name in names}
        parts |= {
            f"/dashboard/{name}": rest.http.get(f"/dashboard/{name}")
            for part in list(parts.values())
            for name in re.findall(r'from "\./([a-z]+\.js)"', part.text)
        }
        assert {part.headers["content-type"].partition(";")[0] for part in parts.values()} == {
            "text/css",
            "text/javascript",
            "image/svg+xml",
        }
        for part in (shown, *parts.values()):
            assert part.status_code == 200
            policy = part.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|\beval\b|\sstyle=", part.text)
        for wrong in ("/dashboard/", "/dashboard/nothing.js", "/dashboard/..%2fapp.py", "/dashboard/index.html"):
            assert rest.http.get(wrong).status_code == 401
        assert error_of(rest.http.get("/v1/stats"))["code"] == "unauthorized"


def test_history_ends_with_this_moment(rest):
    put_stream(rest.http, "laid", stream(chain(2)))
    told = rest.http.get("/v1/stats/history?seconds=60").json()
    (tenant,) = rest.http.get("/v1/stats").json()["tenants"]
    assert told["in_bytes"][-1] == tenant["in_bytes"] == 2 * LAYOUT_BYTES
    host = told["tiers"]["host"]
    assert (host["bytes"][-1], host["capacity_bytes"][-1]) == (tenant["tiers"]["host"]["bytes"], 1 << 20)
    lengths = {len(column) for column in (*host.values(), *(told[name] for name in told if name != "tiers"))}
    assert lengths == {len(told["times"])}
    assert rest.http.get("/v1/stats/history?tenant=default").json()["in_bytes"][-1] == told["in_bytes"][-1]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ("seconds=0", "invalid"),
        ("seconds=1e9", "invalid"),
        ("seconds=nan", "invalid"),
        ("tenant=nobody", "unknown_tenant"),
        ("tenant=..%2f", "invalid"),
    ],
)
def test_history_refuses(rest, wrong, code):
    assert error_of(rest.http.get(f"/v1/stats/history?{wrong}"))["code"] == code
