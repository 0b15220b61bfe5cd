"""Over HTTP, on the tiny model: probes, models, tokens, keys, limits, refusals, log, metrics."""

import json
import logging
import socket
from dataclasses import asdict

import httpx
import pytest
from patience import until
from prometheus_client.parser import text_string_to_metric_families
from server_world import RunningServer, tiny_llm

from kvtier.errors import FormatMismatch

GREEDY = {"temperature": 0, "ignore_eos": True}


def error_of(response: httpx.Response) -> dict:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


# ---- what there is to see


def test_probes(server):
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/healthz").status_code == 200
    assert server.get("/readyz").json() == {"status": "ready"}


def test_models(server):
    (row,) = server.get("/v1/models").json()["data"]
    assert (row["id"], row["object"], row["owned_by"], row["max_model_len"]) == ("tiny", "model", "kvtier", 256)
    assert server.get("/v1/models/tiny").json() == row
    missing = server.get("/v1/models/a/b")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


def test_tokens_there_and_back(server):
    text = "naïve 🙂 <eos>\n"
    tokens = server.post("/tokenize", prompt=text).json()
    assert tokens["tokens"] == server.llm.model.tokenizer.encode(text)
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 256)
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    skipped = server.post("/detokenize", tokens=tokens["tokens"], skip_special_tokens=True).json()
    assert skipped == {"prompt": text.replace("<eos>", "")}
    messages = [{"role": "user", "content": "hi"}]
    chat = server.post("/tokenize", messages=messages).json()["tokens"]
    assert server.llm.model.tokenizer.decode(chat) == "user: hi\nassistant:"


def test_the_schema_can_be_read(server):
    paths = server.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/metrics"} <= set(paths)


# ---- refusals


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/completions", {}, 400, "prompt", "missing_parameter"),
        ("/v1/completions", {"prompt": "x", "model": "gpt"}, 404, "model", "model_not_found"),
        ("/v1/completions", {"prompt": "x", "top_p": 2}, 400, "top_p", "invalid_value"),
        ("/v1/completions", {"prompt": "x", "sparse": {}}, 400, "sparse.kind", "missing_parameter"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt", "invalid_value"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "prompt", "invalid_value"),
        ("/v1/completions", {"prompt": "x", "model": "\ud800"}, 404, "model", "model_not_found"),
        ("/v1/completions", {"prompt": "x", "\ud800": 1}, 400, None, None),
        ("/v1/completions", {"prompt": [[1], []]}, 400, "prompt", "invalid_value"),
        ("/v1/completions", {"prompt": [99999]}, 400, None, "invalid_value"),
        ("/v1/completions", {"prompt": [-1]}, 400, None, "invalid_value"),
        ("/v1/completions", {"prompt": "x" * 256}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 256}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": ["x"] * 69}, 400, None, None),
        ("/v1/completions", {"prompt": "x", "n": 69}, 400, None, None),
        ("/v1/chat/completions", {"messages": []}, 400, "messages", "invalid_value"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, 400, "messages.0.role", None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages", None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", None),
        ("/tokenize", {}, 400, "prompt", None),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt", None),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens", None),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens", None),
        ("/nowhere", {}, 404, None, "unknown_path"),
        ("/v1/models", {}, 405, None, "method_not_allowed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(server, path, body, status, param, code, stream):
    if stream and "completions" in path:
        body = {**body, "stream": True}
    response = server.post(path, **body)
    error = error_of(response)
    assert response.status_code == status, error
    assert error["param"] == param or param is None
    assert code is None or error["code"] == code
    server.at_rest()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b"[" * 60_000, b'{"prompt": ' + b"1" * 5000 + b"}"],
)
def test_hostile_bodies(server, content):
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    error_of(response)


def test_a_body_that_is_not_called_json_is_none(server):
    # A web page could send it without asking first.
    response = server.http.post("/v1/completions", content=b'{"prompt": "x"}')
    assert response.status_code == 400
    assert "Content-Type: application/json" in error_of(response)["message"]


def test_a_long_body_is_refused(server):
    response = server.post("/v1/completions", prompt="x" * 70_000)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")

    def chunks():
        for _ in range(20):
            yield b" " * 10_000

    response = server.http.post("/tokenize", content=chunks())
    assert response.status_code == 413


def test_a_client_that_leaves_while_it_sends_disturbs_nobody(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.post("/tokenize", prompt="x").status_code == 200


# ---- keys, origins


def test_keys(monkeypatch, caplog):
    running = RunningServer(
        tiny_llm(monkeypatch, cors_origins="https://a.example, https://b.example"), api_keys=["k1", "kéy2"]
    )
    caplog.set_level(logging.INFO, "kvtier.server.access")
    monkeypatch.setattr(logging.getLogger("kvtier"), "propagate", True)
    try:
        for value, status in [
            (None, 401),
            (b"Bearer k1", 200),
            (b"bearer k1", 200),
            ("Bearer kéy2".encode(), 200),
            (b"Bearer k", 401),
            (b"Bearer k11", 401),
            (b"Bearer", 401),
            (b"Basic k1", 401),
            (b"k1", 401),
        ]:
            headers = {} if value is None else {b"Authorization": value}
            response = running.http.get("/v1/models?key=k1", headers=headers)
            assert response.status_code == status, value
            if status == 401:
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["WWW-Authenticate"] == "Bearer"
        assert running.http.get("/metrics").status_code == 401
        assert running.http.post("/v1/completions", json={}).status_code == 401
        for path in ("/health", "/healthz", "/readyz"):
            assert running.http.get(path).status_code == 200
        _check_origins(running)
        until(lambda: len(caplog.records) >= 14)
        assert "k1" not in caplog.text.replace("Bearer", "")
        assert "kéy2" not in caplog.text
        assert all("k1" not in json.dumps(vars(record), default=str) for record in caplog.records)
    finally:
        running.stop()


def _check_origins(running):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in [("https://b.example", True), ("https://c.example", False)]:
        response = running.http.options("/v1/completions", headers={"Origin": origin, **asks})
        assert (response.headers.get("access-control-allow-origin") == origin) is allowed
        assert (response.status_code == 200) is allowed


def test_without_origins_no_page_may_call(server):
    response = server.get("/v1/models", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


# ---- log and metrics


def test_the_access_log_says_what_happened_and_nothing_of_what_was_said(server, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "kvtier.server.access")
    monkeypatch.setattr(logging.getLogger("kvtier"), "propagate", True)
    response = server.post("/v1/completions?secret=1", prompt="the secret", max_tokens=3, **GREEDY)
    server.get("/x%0aINFO forged")
    until(lambda: len(caplog.records) == 2)
    # A line is written once all of its answer is sent: the next request may be faster.
    forged, record = sorted((vars(one) for one in caplog.records), key=lambda row: str(row["method"]))
    assert (record["method"], record["path"], record["status"]) == ("POST", "/v1/completions", 200)
    assert (record["prompt_tokens"], record["output_tokens"], record["client"]) == (10, 3, "127.0.0.1")
    assert record["request_id"] == response.headers["x-request-id"]
    assert record["response"] == response.json()["id"]
    assert "secret" not in json.dumps(record, default=str)
    assert "\n" not in forged["path"]
    assert forged["status"] == 404


class Figures:
    """The metrics of one moment."""

    def __init__(self, server):
        families = text_string_to_metric_families(server.get("/metrics").text)
        self._samples = [sample for family in families for sample in family.samples]
        self.names = {sample.name for sample in self._samples}

    def __call__(self, name, **labels):
        found = [one for one in self._samples if one.name == name and labels.items() <= one.labels.items()]
        return sum(one.value for one in found)


def test_every_figure_of_the_engine_is_told(server):
    server.at_rest()
    told = Figures(server)
    counters = {
        "steps",
        "preemptions",
        "swaps",
        "device_hit_tokens",
        "loaded_tokens",
        "computed_tokens",
        "draft_tokens",
    }
    counters |= {"accepted_tokens", "draft_errors", "hook_errors"}
    renamed = {
        "accepted_tokens": "accepted_draft_tokens",
        "num_blocks": "device_blocks",
        "free_blocks": "device_blocks_free",
        "kv_waste_total": "kv_waste_whole",
    }
    for name, value in asdict(server.llm.stats()).items():
        title = f"kvtier_{renamed.get(name, name)}" + "_total" * (name in counters)
        assert title in told.names
        assert told(title) == pytest.approx(value), title


@pytest.mark.parametrize("stream", [False, True])
def test_sparse_attention_that_the_model_cannot_have_is_refused(monkeypatch, stream):
    """Of latents, and beside sliding windows."""
    llm = tiny_llm(monkeypatch)
    running = RunningServer(llm)

    def refuses(*_args):
        raise FormatMismatch("sparse attention over a mla pool")

    try:
        monkeypatch.setattr("kvtier.engine.runner.SparseAttention", refuses)
        body = {"prompt": "x", "max_tokens": 3, "stream": stream, **GREEDY}
        refused = running.post("/v1/completions", sparse={"kind": "quest"}, **body)
        assert refused.status_code == 400
        error = error_of(refused)
        assert error["param"] == "sparse"
        assert "not with this model" in error["message"]
        running.at_rest()
        assert running.post("/v1/completions", **body).status_code == 200
    finally:
        running.stop()


def test_metrics(server):
    names = [
        ("kvtier_prompt_tokens_total", {}),
        ("kvtier_output_tokens_total", {}),
        ("kvtier_sequences_total", {"reason": "length"}),
        ("kvtier_cached_tokens_total", {"source": "device"}),
        ("kvtier_time_to_first_token_seconds_count", {}),
        ("kvtier_time_per_output_token_seconds_count", {}),
    ]
    server.at_rest()
    before = Figures(server)
    prompt = "metrics are counted once"
    for _ in range(2):
        assert server.post("/v1/completions", prompt=prompt, max_tokens=5, **GREEDY).status_code == 200
    after = Figures(server)
    grown = [after(name, **labels) - before(name, **labels) for name, labels in names]
    # Of 24 tokens in blocks of 4 all but the last block can be found again.
    assert grown == [48, 10, 2, 20, 2, 2]
    assert after("kvtier_device_blocks") == 64
    assert after("kvtier_running") == after("kvtier_waiting") == after("kvtier_inflight_sequences") == 0
    assert after("kvtier_capacity_bytes", tier="host") == 1 << 20
    # These are counted once the response is out.
    answered = {"path": "/v1/completions", "status": "200"}
    name = "kvtier_http_requests_total"
    until(lambda: Figures(server)(name, **answered) >= before(name, **answered) + 2)
    assert Figures(server)("kvtier_request_seconds_count") > before("kvtier_request_seconds_count") + 2
