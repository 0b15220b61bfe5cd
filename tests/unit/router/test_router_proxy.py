"""The router in front of engines that misbehave, each a real server whose answers the test decides."""

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import uvicorn
from patience import PATIENCE, until
from router_world import RunningRouter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvtier.http.listening import listen
from kvtier.router import proxy
from kvtier.router.fleet import LOST_AFTER, Address


class ScriptedEngine:
    """Answers as `answer` says; counts what it got."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answer: Any = lambda request: JSONResponse({"from": name})
        self.health = self.ready = 200
        self.rows: list[dict[str, Any]] = [{"id": "m"}, {"id": f"only-{name}"}]
        self.requests: list[Request] = []
        self.gone = threading.Event()
        self.release = threading.Event()
        app = Starlette(
            routes=[
                Route("/health", lambda _: Response(status_code=self.health)),
                Route("/readyz", lambda _: Response(status_code=self.ready)),
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/{path:path}", self._serve, methods=["POST"]),
            ]
        )
        config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        taken = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        self.label = self.url[7:]
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [taken]}, daemon=True)
        self._thread.start()
        until(lambda: self.server.started)

    async def _models(self, request: Request) -> Response:
        if request.headers.get("authorization") == "Bearer wrong":
            return JSONResponse({"error": {"message": "no"}}, 401)
        return JSONResponse({"object": "list", "data": self.rows})

    async def _tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": list((await request.json())["prompt"].encode())})

    async def _serve(self, request: Request) -> Response:
        await request.body()
        self.requests.append(request)
        return self.answer(request)

    def stop(self) -> None:
        self.server.should_exit = True
        self.release.set()
        self._thread.join(PATIENCE)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def engines() -> Iterator[list[ScriptedEngine]]:
    running = [ScriptedEngine("a"), ScriptedEngine("b")]
    yield running
    for engine in running:
        engine.stop()


@pytest.fixture
def pair(engines: list[ScriptedEngine]) -> list[ScriptedEngine]:
    for engine in engines:
        engine.answer = lambda request, engine=engine: JSONResponse({"from": engine.name})
        engine.health = engine.ready = 200
        engine.requests.clear()
        engine.gone.clear()
        engine.release.clear()
    return engines


def routed(stack: ExitStack, engines: list[ScriptedEngine], *keys: str, **settings: Any) -> RunningRouter:
    router = RunningRouter([Address(engine.url) for engine in engines], keys, **settings)
    stack.callback(router.stop)
    return router


def home_of(router: RunningRouter, engines: list[ScriptedEngine], prompt: str) -> tuple[ScriptedEngine, ScriptedEngine]:
    """The engine that gets a prompt, and the other one."""
    name = router.complete(prompt).json()["from"]
    home = next(engine for engine in engines if engine.name == name)
    return home, next(engine for engine in engines if engine is not home)


PROMPT = "once upon a time " * 20


@pytest.mark.parametrize("tokenizer", ["engine", "text"])
def test_engines_that_tell_nothing_are_known_by_what_was_sent_there(
    stack: ExitStack, pair: list[ScriptedEngine], tokenizer: str
) -> None:
    router = routed(stack, pair, tokenizer=tokenizer)
    for name in "abcdef":
        home, _ = home_of(router, pair, name * 2000)
        # Even if that one has more to do now.
        busy = next(one for one in router.fleet.engines if one.url == home.url)
        busy.active += 1
        assert router.complete(name * 2000 + "and more").json()["from"] == home.name
        busy.active -= 1
    assert router.value("untokenized_total") == 0


@pytest.mark.parametrize(("status", "why"), [(429, "full"), (503, "unavailable")])
def test_who_takes_nothing_more_is_passed_over(
    stack: ExitStack, pair: list[ScriptedEngine], status: int, why: str
) -> None:
    router = routed(stack, pair)
    home, other = home_of(router, pair, PROMPT)
    home.answer = lambda request: JSONResponse({"error": "busy"}, status, {"Retry-After": "7"})
    assert router.complete(PROMPT).json() == {"from": other.name}
    assert router.value("retries_total", engine=home.label, why=why) == 1
    other.answer = home.answer
    last = router.http.post("/v1/completions", json={"prompt": PROMPT})
    assert (last.status_code, last.json(), last.headers["retry-after"]) == (status, {"error": "busy"}, "7")
    router.at_rest()


def test_other_errors_are_the_client_s(stack: ExitStack, pair: list[ScriptedEngine]) -> None:
    router = routed(stack, pair)
    home, other = home_of(router, pair, PROMPT)
    home.answer = lambda request: JSONResponse({"error": "mine"}, 500)
    before = len(other.requests)
    answer = router.http.post("/v1/completions", json={"prompt": PROMPT})
    assert (answer.status_code, answer.json()) == (500, {"error": "mine"})
    assert len(other.requests) == before, "a request that failed is not repeated"


def test_an_answer_that_breaks_off_is_not_repeated_and_seen_as_broken(
    stack: ExitStack, pair: list[ScriptedEngine]
) -> None:
    router = routed(stack, pair)
    home, other = home_of(router, pair, PROMPT)

    async def half() -> AsyncIterator[bytes]:
        yield b"data: one\n\n"
        raise ConnectionResetError("the engine dies")

    home.answer = lambda request: StreamingResponse(half(), media_type="text/event-stream")
    before = len(other.requests)
    with router.http.stream("POST", "/v1/completions", json={"prompt": PROMPT}) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: one\n\n"
        with pytest.raises(httpx.RemoteProtocolError):
            next(pieces)
    assert len(other.requests) == before
    until(lambda: router.value("broken_total", engine=home.label) == 1)
    router.at_rest()


def test_pieces_arrive_while_the_engine_still_computes(stack: ExitStack, pair: list[ScriptedEngine]) -> None:
    router = routed(stack, pair)
    home, _ = home_of(router, pair, PROMPT)

    async def slow() -> AsyncIterator[bytes]:
        import asyncio

        try:
            yield b"data: one\n\n"
            while not home.release.is_set():
                await asyncio.sleep(0.01)
            yield b"data: two\n\n"
        finally:
            home.gone.set()

    home.answer = lambda request: StreamingResponse(slow(), media_type="text/event-stream")
    with router.http.stream("POST", "/v1/completions", json={"prompt": PROMPT}) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: one\n\n"
        engine = next(one for one in router.fleet.engines if one.url == home.url)
        assert (engine.active, engine.computing) == (1, 0), "the prompt is computed, the request goes on"
        home.release.set()
        assert b"".join(pieces) == b"data: two\n\n"
    assert home.gone.wait(PATIENCE)
    home.release.clear()
    home.gone.clear()
    with router.http.stream("POST", "/v1/completions", json={"prompt": PROMPT}) as answer:
        next(answer.iter_raw())
    assert home.gone.wait(PATIENCE), "the engine learns that the client left"
    router.at_rest()


def test_headers_bodies_and_compression_pass_unchanged(stack: ExitStack, pair: list[ScriptedEngine]) -> None:
    router = routed(stack, pair)
    packed = gzip.compress(b'{"ok": 1}')
    headers = {"content-encoding": "gzip", "x-own": "1", "connection": "close"}
    for engine in pair:
        engine.answer = lambda request: Response(packed, 200, headers, "application/json")
    sent = b'{ "prompt" : "a" , "odd":1}'
    answer = router.http.post(
        "/v1/completions?x=%2F1",
        content=sent,
        headers={"Authorization": "Bearer secret", "X-Mine": "2", "Content-Type": "application/json"},
    )
    assert answer.json() == {"ok": 1}
    assert answer.headers["x-own"] == "1"
    assert "close" not in answer.headers.get("connection", "")
    [request] = [request for engine in pair for request in engine.requests]
    assert request._body == sent
    assert request.url.query == "x=%2F1"
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["x-mine"] == "2"
    assert request.headers["host"] in [engine.label for engine in pair]


def test_health_and_draining_are_followed(stack: ExitStack, pair: list[ScriptedEngine]) -> None:
    router = routed(stack, pair, health_interval=0.05)
    pair[0].health = 500
    until(lambda: router.http.get("/readyz").json()["engines"] == 1)
    assert {router.complete(f"{at}").json()["from"] for at in range(8)} == {"b"}
    pair[1].ready = 503
    until(lambda: router.http.get("/readyz").json()["engines"] == 0)
    assert router.http.get("/readyz").status_code == 503
    refused = router.http.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "no_engine"
    pair[0].health = 200
    until(lambda: router.http.get("/readyz").json()["engines"] == 1)
    assert router.complete("a").json()["from"] == "a"


def test_an_answer_whose_pieces_come_goes_on_whatever_looks_at_its_engine_come_to(
    stack: ExitStack, pair: list[ScriptedEngine]
) -> None:
    router = routed(stack, pair, health_interval=0.05, connect_timeout=0.5)
    home, _ = home_of(router, pair, PROMPT)
    looks = 0

    async def hang(request: Request) -> Response:
        nonlocal looks
        looks += 1
        while not home.release.is_set():
            await asyncio.sleep(0.01)
        return Response()

    async def pieces() -> AsyncIterator[bytes]:
        while not home.release.is_set():
            yield b"."
            await asyncio.sleep(0.01)
        yield b"end"

    home.answer = lambda request: StreamingResponse(pieces())
    routes = home.server.config.app.router.routes
    kept = list(routes)
    try:
        with router.http.stream("POST", "/v1/completions", json={"prompt": PROMPT}) as answer:
            routes[:] = [Route("/health", hang), *kept[1:]]
            read = b""
            for piece in answer.iter_raw():
                read += piece
                if looks > 2 * LOST_AFTER:
                    home.release.set()
    finally:
        home.release.set()
        routes[:] = kept
    assert read.endswith(b"end")
    until(lambda: all(engine.up for engine in router.fleet.engines))
    router.at_rest()


def test_an_engine_computes_nothing_for_who_left_before_its_answer_began(
    stack: ExitStack, pair: list[ScriptedEngine]
) -> None:
    router = routed(stack, pair)
    home, other = home_of(router, pair, PROMPT)

    async def never(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        home.gone.set()

    home.answer = lambda request: never
    before, body = len(other.requests), json.dumps({"prompt": PROMPT}).encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(router.url).port)) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: len(home.requests) == 2)
    assert home.gone.wait(PATIENCE)
    until(lambda: router.router.underway == 0)
    router.at_rest()
    assert len(other.requests) == before, "nobody is asked in its place"


def test_cookies_are_those_of_one_client(stack: ExitStack, pair: list[ScriptedEngine]) -> None:
    router = routed(stack, pair[:1])
    pair[0].answer = lambda request: Response("{}", headers={"set-cookie": "session=mine"})
    assert router.complete("a").headers["set-cookie"] == "session=mine"
    router.http.cookies.clear()
    router.complete("a")
    assert [request.headers.get("cookie") for request in pair[0].requests] == [None, None]


def test_a_model_goes_to_who_has_it(stack: ExitStack, pair: list[ScriptedEngine]) -> None:
    router = routed(stack, pair)
    for engine in pair * 3:
        assert router.complete("a", model=f"only-{engine.name}").json()["from"] == engine.name
    listed = router.http.get("/v1/models").json()
    assert sorted(row["id"] for row in listed["data"]) == ["m", "only-a", "only-b"]
    assert router.http.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert router.http.get("/v1/models/only-b").json() == {"id": "only-b"}
    assert router.http.get("/v1/models/huge").json()["error"]["code"] == "model_not_found"


def test_its_own_keys_open_it_and_go_on_to_the_engines(stack: ExitStack, pair: list[ScriptedEngine]) -> None:
    router = routed(stack, pair, "sesame", "other")
    for key in ("", "Bearer", "Bearer wrong", "Basic sesame", "Bearer sesam", "Bearer sesame2"):
        refused = router.http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": key})
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
    with socket.create_connection(("127.0.0.1", httpx.URL(router.url).port)) as line:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: router\r\nTransfer-Encoding: chunked\r\n\r\n"
        line.sendall(head + b"2\r\n{}\r\n0\r\nAuthorization: Bearer sesame\r\n\r\n")
        assert line.makefile("rb").readline().split()[1] == b"401", "what follows a body is no header"
    assert router.http.get("/metrics").status_code == 401
    assert router.http.get("/healthz").status_code == 200
    assert not pair[0].requests + pair[1].requests
    answer = router.http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer sesame"})
    assert answer.status_code == 200
    assert [r.headers["authorization"] for e in pair for r in e.requests] == ["Bearer sesame"]


def test_draining_lets_what_runs_end(stack: ExitStack, pair: list[ScriptedEngine]) -> None:
    router = RunningRouter([Address(engine.url) for engine in pair])
    home, _ = home_of(router, pair, PROMPT)

    def slowly(request: Request) -> Response:
        home.release.wait(PATIENCE)
        return JSONResponse({"late": True})

    home.answer = slowly
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(router.complete(PROMPT)))
    thread.start()
    until(lambda: router.router.underway == 1)
    router.server.handle_exit(15, None)
    until(lambda: router.router.draining)
    with httpx.Client(base_url=router.url, timeout=PATIENCE, trust_env=False, verify=False) as another:
        refused = another.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert another.get("/readyz").status_code == 503
    home.release.set()
    thread.join()
    assert answers[0].json() == {"late": True}
    router._thread.join(PATIENCE)
    assert not router._thread.is_alive()


def test_a_tokenizer_that_hangs_or_lies_costs_no_request(stack: ExitStack, pair: list[ScriptedEngine]) -> None:
    router = routed(stack, pair, tokenize_timeout=0.1)

    async def hang(request: Request) -> Response:
        await asyncio.sleep(30)
        return JSONResponse({})

    async def lie(request: Request) -> Response:
        return JSONResponse({"tokens": ["a"]})

    kept = [engine.server.config.app.routes[3] for engine in pair]
    try:
        for count, wrong in enumerate((hang, lie), 1):
            for engine in pair:
                engine.server.config.app.router.routes[3] = Route("/tokenize", wrong, methods=["POST"])
            began = time.monotonic()
            router.complete("some text")
            assert time.monotonic() - began < 15
            assert router.value("untokenized_total") == count
    finally:
        for engine, route in zip(pair, kept, strict=True):
            engine.server.config.app.router.routes[3] = route
    assert pair[0].requests or pair[1].requests


def test_a_connection_that_its_engine_may_be_ending_is_not_taken_up(
    stack: ExitStack, pair: list[ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert proxy._KEPT_SECONDS < pair[0].server.config.timeout_keep_alive
    monkeypatch.setattr(proxy, "_KEPT_SECONDS", 0.05)
    router = routed(stack, pair[:1], tokenizer="text", health_interval=3600.0)
    for _ in range(2):
        router.complete("a")
        time.sleep(0.1)
    first, second = (request.client for request in pair[0].requests)
    assert first != second


def test_paths_that_lead_elsewhere_are_refused(stack: ExitStack, pair: list[ScriptedEngine]) -> None:
    router = routed(stack, pair)
    for path in ("/v1/../admin", "/v1/a/%2e%2e/b", "/v1//x", "/v1/a b", "/v1/", "/admin"):
        with httpx.Client(trust_env=False, verify=False) as client:
            url = httpx.URL(router.url).copy_with(raw_path=path.replace(" ", "%20").encode())
            assert client.send(client.build_request("POST", url, json={})).status_code in (404, 405)
    assert not pair[0].requests + pair[1].requests
    assert router.http.post("/v1/embeddings", json={"input": "x"}).status_code == 200
    assert json.loads(router.http.post("/detokenize", content=b"{}").content)["from"] in "ab"
