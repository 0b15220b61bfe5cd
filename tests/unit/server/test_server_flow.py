"""Generations over HTTP on the tiny model: whole and streamed, several sequences, queue, drain, disconnect, failure."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest
from patience import PATIENCE, until
from server_world import RunningServer, slow_down, tiny_llm
from tiny_model import TinyModel

from kvtier import SamplingParams
from kvtier.engine import Engine, EngineOptions
from kvtier.engine.sparse import Sparse
from kvtier.server.admission import Admission
from kvtier.server.errors import ApiError

GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 200}


def events(response):
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def stream(server, path, **body):
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def joined(chunks, index, name="text"):
    return "".join(
        choice.get(name) or choice.get("delta", {}).get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def alone(server, prompt, params):
    """What the engine says by itself: the texts of a prompt's sequences."""
    engine = Engine(server.llm.model, EngineOptions(block_size=4, num_blocks=64))
    engine.add("alone", server.llm.model.tokenizer.encode(prompt), params)
    texts = {}
    while engine.has_work:
        texts |= {output.index: output.text for output in engine.step()}
    return texts


@pytest.fixture
def fresh(monkeypatch):
    """A server of the test's own, whose steps can be slowed down."""
    started = []

    def start(**settings):
        started.append(RunningServer(tiny_llm(monkeypatch, **settings)))
        return started[-1]

    yield start
    for running in started:
        running.stop()


# ---- what comes out


def test_completions_are_what_the_engine_alone_says(server):
    texts = ["one", "two and a half", "three"]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [alone(server, text, params)[0] for text in texts]
    body = server.post("/v1/completions", prompt=texts, max_tokens=12, **GREEDY).json()
    assert body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (22, 36, 58)
    ids = [server.llm.model.tokenizer.encode(text) for text in texts]
    assert server.post("/v1/completions", prompt=ids, max_tokens=12, **GREEDY).json()["choices"] == body["choices"]


def test_streams_say_the_same_piece_by_piece(server):
    ask = {"prompt": ["ab", "cd"], "n": 2, "seed": 5, "max_tokens": 9, "logprobs": 2, "echo": True}
    whole = server.post("/v1/completions", **ask).json()
    chunks = stream(server, "/v1/completions", **ask, stream_options={"include_usage": True})
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == whole["usage"][name]
    for choice in whole["choices"]:
        index = choice["index"]
        assert joined(chunks, index) == choice["text"]
        parts = [one["logprobs"] for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        told = {name: [value for part in parts for value in part[name]] for name in choice["logprobs"]}
        assert told["tokens"] == choice["logprobs"]["tokens"]
        assert told["text_offset"] == choice["logprobs"]["text_offset"]
        (none, *scores), (nothing, *expected) = told["token_logprobs"], choice["logprobs"]["token_logprobs"]
        assert none is nothing is None
        assert scores == pytest.approx(expected, abs=1e-4)
        reasons = [one["finish_reason"] for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert [reason for reason in reasons if reason] == [choice["finish_reason"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["choices"][0]["text"] != whole["choices"][1]["text"]


def test_a_chat_stream_begins_with_who_speaks(server):
    ask = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 1, "max_tokens": 6, "ignore_eos": True}
    whole = server.post("/v1/chat/completions", **ask, logprobs=True, top_logprobs=2).json()
    chunks = stream(server, "/v1/chat/completions", **ask, logprobs=True, top_logprobs=2)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert [chunk["choices"][0]["index"] for chunk in chunks[:2]] == [0, 1]
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    for choice in whole["choices"]:
        assert joined(chunks, choice["index"]) == choice["message"]["content"]
        assert choice["message"]["role"] == "assistant"
        entries = choice["logprobs"]["content"]
        assert len(entries) == 6
        assert (
            b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
            == (choice["message"]["content"])
        )
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        parts = [one["logprobs"] for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert [entry["token"] for part in parts if part for entry in part["content"]] == [
            entry["token"] for entry in entries
        ]


def test_echo_repeats_the_prompt_and_scores_it(server):
    ask = {"prompt": "score me", "logprobs": 1, "echo": True, **GREEDY}
    scored = server.post("/v1/completions", **ask, max_tokens=0).json()
    (choice,) = scored["choices"]
    assert (choice["text"], scored["usage"]["completion_tokens"]) == ("score me", 0)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("score me")
    assert logprobs["text_offset"] == list(range(8))
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    longer = server.post("/v1/completions", **ask, max_tokens=3).json()["choices"][0]
    assert longer["text"].startswith("score me")
    assert len(longer["logprobs"]["tokens"]) == 11
    assert longer["logprobs"]["token_logprobs"][1:8] == pytest.approx(logprobs["token_logprobs"][1:], abs=1e-4)
    streamed = stream(server, "/v1/completions", **ask, max_tokens=0)
    assert joined(streamed, 0) == "score me"
    ids = server.llm.model.tokenizer.encode("score me")
    assert server.post("/v1/completions", **{**ask, "prompt": ids}, max_tokens=0).json()["choices"] == scored["choices"]


def test_best_of_gives_the_best(server):
    ask = {"prompt": "x", "seed": 3, "max_tokens": 8, "temperature": 1.5, "ignore_eos": True}
    every = server.post("/v1/completions", **ask, n=5, logprobs=0).json()["choices"]
    means = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / 8 for choice in every}
    best = sorted(means, key=means.__getitem__, reverse=True)[:2]
    chosen = server.post("/v1/completions", **ask, n=2, best_of=5).json()
    assert [choice["text"] for choice in chosen["choices"]] == best
    assert [choice["index"] for choice in chosen["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in chosen["choices"])
    assert chosen["usage"]["completion_tokens"] == 40


def test_sparse_requests_are_what_the_engine_alone_says(server):
    prompt = "a prompt of several blocks, most of which are not looked at"
    dense = alone(server, prompt, SamplingParams(max_tokens=12, ignore_eos=True))[0]
    for kind in ("streaming", "h2o", "quest"):
        expected = alone(server, prompt, SamplingParams(max_tokens=12, ignore_eos=True, sparse=Sparse(kind, 0.2)))[0]
        assert expected != dense
        sparse = {"kind": kind, "share": 0.2}
        body = server.post("/v1/completions", prompt=prompt, max_tokens=12, sparse=sparse, **GREEDY).json()
        assert body["choices"][0]["text"] == expected
    body = server.post("/v1/completions", prompt=prompt, max_tokens=12, **GREEDY).json()
    assert body["choices"][0]["text"] == dense


def test_beams_are_what_the_engine_alone_finds(server):
    expected = alone(server, "beams", SamplingParams(max_tokens=6, beam_width=3, n=2))
    ask = {"prompt": "beams", "max_tokens": 6, "beam_width": 3, "n": 2}
    found = server.post("/v1/completions", **ask).json()["choices"]
    assert [choice["text"] for choice in found] == [expected[0], expected[1]]
    chunks = stream(server, "/v1/completions", **ask)
    assert [joined(chunks, index) for index in (0, 1)] == [expected[0], expected[1]]


def test_seeds_reproduce_and_hints_change_nothing(server):
    ask = {"prompt": "seeded", "max_tokens": 12, "temperature": 1.0}
    first = server.post("/v1/completions", **ask, seed=11).json()["choices"]
    assert server.post("/v1/completions", **ask, seed=11).json()["choices"] == first
    assert server.post("/v1/completions", **ask, seed=12).json()["choices"] != first
    hints = {"session": "s", "priority": 2.0, "ttl": 10.0, "reuse": "likely", "end_of_session": True}
    assert server.post("/v1/completions", **ask, seed=11, kv_hints=hints).json()["choices"] == first


def test_cached_tokens_are_told_with_their_source(server):
    prompt = "the same prefix again and again"
    cold, warm = (server.post("/v1/completions", prompt=prompt, max_tokens=2, **GREEDY).json() for _ in range(2))
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    details = warm["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 28, "device_tokens": 28, "loaded_tokens": 0}
    assert warm["choices"] == cold["choices"]
    beams = server.post("/v1/completions", prompt=prompt, max_tokens=4, beam_width=3, n=2).json()
    assert beams["usage"]["prompt_tokens_details"] == details


def test_what_left_the_device_is_loaded_and_told(fresh):
    server = fresh()
    ask = {"prompt": "the first of several prompts, which the device forgets", "max_tokens": 2, **GREEDY}
    cold = server.post("/v1/completions", **ask).json()
    until(lambda: server.llm.store.metrics.value("put_blocks_total", outcome="stored") >= 13)
    for number in range(6):
        server.post("/v1/completions", prompt=f"{number} " * 60, max_tokens=2, **GREEDY)
    warm = server.post("/v1/completions", **ask).json()
    assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": 52, "device_tokens": 0, "loaded_tokens": 52}
    assert warm["choices"] == cold["choices"]


# ---- too many, too late, gone


def test_a_full_queue_refuses_and_recovers(fresh, monkeypatch):
    server = fresh(max_waiting=2)
    hurry = slow_down(monkeypatch, server.llm)
    assert server.served.admission.limit == 6
    with ThreadPoolExecutor(6) as pool:
        ask = {**LONG, "prompt": "x"}
        running = [pool.submit(server.post, "/v1/completions", **ask) for _ in range(6)]
        until(lambda: server.served.admission.inflight == 6)
        for asked_for in ({}, {"stream": True}):
            refused = server.post("/v1/completions", prompt="x", **asked_for)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["Retry-After"]) >= 1
        assert "kvtier_refused_requests_total 2.0" in server.get("/metrics").text
        # What cannot ever fit is no matter of waiting.
        assert server.post("/v1/completions", prompt=["x"] * 7).status_code == 400
        assert server.get("/health").status_code == 200
        hurry.set()
        assert {future.result().status_code for future in running} == {200}
    assert server.post("/v1/completions", prompt="x").status_code == 200
    server.at_rest()


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(fresh, monkeypatch, streaming):
    server = fresh()
    slow_down(monkeypatch, server.llm)
    body = {"prompt": ["abcdefgh", "x"], "n": 2, "stream": streaming, **LONG}
    if streaming:
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            seen = set()
            for line in response.iter_lines():
                seen |= {choice["index"] for choice in json.loads(line[6:] or "{}").get("choices", ())}
                if len(seen) == 4:
                    break
            assert server.llm.stats().running == 4
    else:
        url = httpx.URL(server.url)
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        with socket.create_connection((url.host, url.port)) as line:
            line.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
            until(lambda: server.llm.stats().running == 4)
    server.at_rest()
    told = server.get("/metrics").text
    # None of them came to its end; those are counted of which something was heard.
    assert 'kvtier_sequences_total{reason="length"}' not in told
    assert not streaming or 'kvtier_sequences_total{reason="abort"} 4.0' in told


def test_a_signal_lets_what_runs_end_and_nobody_in(fresh, monkeypatch):
    server = fresh()
    hurry = slow_down(monkeypatch, server.llm)
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=PATIENCE, verify=False) as line:
        future = pool.submit(server.post, "/v1/completions", prompt="x", **LONG)
        until(lambda: server.served.admission.inflight == 1)
        assert line.get("/readyz").status_code == 200
        server.signal()
        until(lambda: server.served.admission.draining)
        assert line.get("/readyz").status_code == 503
        assert line.get("/health").status_code == 200
        refused = line.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["Retry-After"] == "30"
        hurry.set()
        (choice,) = future.result().json()["choices"]
        assert choice["finish_reason"] == "length"
    server.join()
    with pytest.raises(httpx.ConnectError):
        server.get("/health")


def test_who_takes_too_long_to_end_is_aborted(fresh, monkeypatch):
    server = fresh(drain_timeout=0.3)
    slow_down(monkeypatch, server.llm)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.post, "/v1/completions", prompt="x", **LONG)
        until(lambda: server.llm.stats().running == 1)
        server.signal()
        (choice,) = future.result().json()["choices"]
        assert choice["finish_reason"] == "abort"
    server.join()


def test_a_second_signal_does_not_wait(fresh, monkeypatch):
    server = fresh()
    slow_down(monkeypatch, server.llm)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.post, "/v1/completions", prompt="x", **LONG)
        until(lambda: server.llm.stats().running == 1)
        server.signal()
        until(lambda: server.served.admission.draining)
        server.signal()
        # 200 tokens would take twenty seconds.
        began = time.monotonic()
        server.join()
        assert time.monotonic() - began < 15
        with suppress(httpx.TransportError):
            assert future.result().status_code == 500


def test_a_failing_engine_is_told_and_passes(fresh):
    server = fresh()
    model = server.llm.model.model
    assert isinstance(model, TinyModel)
    model.fails = True
    for ask in ({}, {"stream": True}):
        response = server.post("/v1/completions", prompt="x", **ask)
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    model.fails = False
    assert server.post("/v1/completions", prompt="x").status_code == 200
    server.at_rest()


def test_a_request_of_nonsense_is_told_alone(fresh, monkeypatch):
    """Its logits are no numbers: nobody else's tokens, and nothing that is stored, has to do with it."""
    server, ask = fresh(), {"prompt": [1, 2, 3], "max_tokens": 30, **GREEDY}
    server.llm.model.model.embedding[251] = float("nan")

    def puts():
        return server.llm.store.metrics.value("put_blocks_total", outcome="stored")

    expected = server.post("/v1/completions", **ask).json()["choices"]
    # All of 3 + 30 tokens but the last were computed, in blocks of 4; the last save may come after the answer.
    until(lambda: puts() == 8)
    hurry = slow_down(monkeypatch, server.llm)
    with ThreadPoolExecutor(1) as pool:
        victim = pool.submit(server.post, "/v1/completions", **ask)
        until(lambda: server.llm.stats().running == 1)
        for asked in ({}, {"stream": True}, {"n": 2}):
            response = server.post("/v1/completions", prompt=[251] * 9, max_tokens=4, **asked)
            assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert not victim.done()
        assert puts() == 8
        hurry.set()
        assert victim.result().json()["choices"] == expected
    server.at_rest()


HOSTILE = [
    {"temperature": 1e-320},
    {"temperature": 1e30},
    {"presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 0.01},
    {"logit_bias": {str(token): -100 for token in range(257)}},
    {"top_k": 2**70, "top_p": 1e-320, "min_p": 1e-320},
    {"temperature": 5.0, "top_k": 2, "top_p": 5e-324, "seed": 1},
    {"priority": 2**63, "ttft_target": 1e-320, "tpot_target": 86_400},
    {"stop": ["\ud800", "\x00"], "stop_token_ids": list(range(257))},
    {"beam_width": 4, "temperature": 0, "length_penalty": -10},
    {"n": 60},
    {"kv_hints": {"priority": float("inf"), "ttl": 1e308, "dead_from_depth": 10**30, "session": "\x00"}},
]


def test_hostile_numbers_hurt_nobody_else(server):
    ask = {"prompt": "victim", "max_tokens": 150, **GREEDY}
    expected = server.post("/v1/completions", **ask).json()["choices"]
    with ThreadPoolExecutor(1) as pool:
        victim = pool.submit(server.post, "/v1/completions", **ask)
        for body in HOSTILE:
            response = server.post("/v1/completions", **{"prompt": "hostile", "max_tokens": 4, **body})
            assert response.status_code == 200, response.text
        assert victim.result().json()["choices"] == expected
    for param, value in (("beam_width", 5), ("temperature", 1e308)):
        assert server.post("/v1/completions", **{"prompt": "x", param: value}).json()["error"]["param"] == param
    server.at_rest()


def test_a_stream_that_breaks_off_says_so(fresh, monkeypatch):
    server = fresh()
    slow_down(monkeypatch, server.llm)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0)
    chunks = client.completions.create(model="tiny", prompt="x", stream=True, max_tokens=200, temperature=0)
    next(chunks)
    server.llm.model.model.fails = True
    with pytest.raises(openai.APIError, match="the engine failed"):
        list(chunks)
    server.llm.model.model.fails = False
    server.at_rest()


def test_many_clients_at_once_get_their_own(server):
    prompts = [f"client {number}" for number in range(16)]
    ask = {"max_tokens": 6, **GREEDY}
    expected = [server.post("/v1/completions", prompt=prompt, **ask).json()["choices"] for prompt in prompts]
    barrier = threading.Barrier(8)

    def one(prompt):
        if prompt in prompts[:8]:
            barrier.wait(PATIENCE)
        return server.post("/v1/completions", prompt=prompt, **ask).json()["choices"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, prompts)) == expected
    server.at_rest()


def test_admission_counts_what_fails_too():
    admission = Admission(2, 5.0)
    with pytest.raises(ApiError), admission.hold(1), admission.hold(2):
        pass
    assert (admission.inflight, admission.refused) == (0, 1)
