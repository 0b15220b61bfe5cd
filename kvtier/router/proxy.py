"""One request: choose an engine, send the request, pass on what comes as it comes.

Until the answer begins another engine is tried where one cannot be reached, stops answering or takes nothing more;
after that nothing is repeated: what was passed on cannot be taken back, and is cut short where the rest does not come.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any, TypeVar

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvtier.config import RouterSettings
from kvtier.errors import ConfigError, KVTierError
from kvtier.http.access import note
from kvtier.http.connection import Gone, left, unless, while_connected
from kvtier.router.fleet import Attempt, Engine, Fleet
from kvtier.router.prompts import Prompt
from kvtier.router.telemetry import Telemetry

__all__ = ["Proxy", "refusal"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_BUSY = {429: "full", 503: "unavailable"}
_RETRY_AFTER = 1
# Engines end an idle connection after 5 s, as uvicorn has it: none is taken up when that is about to happen.
_KEPT_SECONDS = 4.0
_PROBES = ("/health", "/readyz", "/v1/models")
# Of the connection, not of the message (RFC 9110, 7.6.1); the length of a body that is read whole is known anew.
_HOP_BY_HOP = frozenset({
    "connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization",
    "proxy-connection", "trailer", "transfer-encoding", "upgrade",
    "te",  # codespell:ignore te
})  # fmt: skip


def refusal(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A refusal in the shape that OpenAI's clients understand."""
    kind = "server_error" if status >= 500 else "authentication_error" if status == 401 else "invalid_request_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}, status, dict(headers or {})
    )


def _unknown_model(name: str | None) -> Response:
    return refusal(404, f"model {name!r:.100}: no engine has it; GET /v1/models lists all", "model_not_found")


class Proxy:
    """Sends requests to engines. `start` and `close` belong to one event loop.

    Args:
        fleet: the engines.
        settings: of the router.
        telemetry: where it counts.

    Raises:
        ConfigError: `router.ca_file` has no certificates.
    """

    def __init__(self, fleet: Fleet, settings: RouterSettings, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._settings = settings
        self._telemetry = telemetry
        self._health: list[asyncio.Task[None]] = []
        # How long an answer takes is the client's matter; whether there is somebody, ours.
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=settings.connect_timeout),
            verify=_authorities(settings.ca_file),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=1024, keepalive_expiry=_KEPT_SECONDS),
            # Those of one client are none of the next one's.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            trust_env=False,
        )

    async def start(self) -> None:
        """Follow the engines' events, look after them once, and from then on now and then."""
        for engine in self._fleet.engines:
            engine.follow()
        await asyncio.gather(*map(self._look, self._fleet.engines))
        self._health = [asyncio.create_task(self._watch(engine)) for engine in self._fleet.engines]

    async def close(self) -> None:
        """Let go of everything."""
        for task in self._health:
            task.cancel()
        await asyncio.gather(*self._health, return_exceptions=True)
        await self.client.aclose()
        await asyncio.to_thread(self._fleet.close)

    # ---- how the engines are

    async def _watch(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._settings.health_interval)
            await self._look(engine)

    async def _look(self, engine: Engine) -> None:
        try:
            health, ready, models = await asyncio.gather(*(self._probe(engine, path) for path in _PROBES))
        except httpx.HTTPError as error:
            self._down(engine, error)
            engine.missed()
            return
        engine.seen()
        if health.status_code != 200:
            self._down(engine, f"GET /health: {health.status_code}")
            return
        # Engines that know no such path are always ready.
        engine.draining = ready.status_code == 503
        adapters = _adapters(models)
        if adapters is not None:
            engine.adapters = adapters
        if not engine.up:
            _log.info("engine is up", extra={"engine": engine.name})
        engine.up = True

    async def _probe(self, engine: Engine, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return await _within(self._settings.connect_timeout, self.client.get(engine.url + path, headers=headers))

    def _down(self, engine: Engine, why: object) -> None:
        if engine.up:
            _log.warning("engine is down", extra={"engine": engine.name, "why": str(why) or type(why).__name__})
        engine.went_down()

    # ---- requests

    async def tokens(self, fields: Mapping[str, Any], headers: Mapping[str, str]) -> list[int]:
        """See `AskTokens`: of the engine that has the least to do."""
        usable = self._fleet.usable(fields.get("model"))
        if not usable:
            raise KVTierError("no engine is up that has this model")
        engine = min(usable, key=lambda one: (one.computing, one.active))
        asked = self.client.post(engine.url + "/tokenize", json=fields, headers=_credentials(headers))
        response = await _within(self._settings.tokenize_timeout, asked)
        try:
            found = response.raise_for_status().json()["tokens"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise KVTierError(f"{engine.name}/tokenize: {error!r}: expected an object with tokens") from error
        if not (isinstance(found, list) and all(type(token) is int for token in found)):
            raise KVTierError(f"{engine.name}/tokenize: expected a list of token ids")
        return found

    async def send(self, request: Request, content: bytes, prompt: Prompt, began: float) -> Response:
        """Have a request answered.

        Args:
            request: as it came.
            content: its body.
            prompt: of it; an empty one goes to whoever has the least to do.
            began: when it came, by `time.perf_counter`.

        Raises:
            Gone: the client went away before an answer began.
        """
        tried: list[Engine] = []
        last: Response | None = None
        while (attempt := self._fleet.begin(prompt, tried)) is not None:
            self._telemetry.sent(attempt, prompt.size, time.perf_counter() - began)
            try:
                answer = await self._try(attempt, request, content)
                if isinstance(answer, httpx.Response):
                    return _Relay(answer, attempt, self._telemetry, began)
            except BaseException:
                attempt.end()
                raise
            attempt.end()
            tried.append(attempt.engine)
            last = answer or last
        if last is not None:
            return last
        return self._nobody(prompt, tried)

    def _nobody(self, prompt: Prompt, tried: Sequence[Engine]) -> Response:
        self._telemetry.refused()
        known = any(one.up and one.serves(prompt.model) for one in self._fleet.engines)
        if any(one.up for one in self._fleet.engines) and not known and not tried:
            return _unknown_model(prompt.model)
        headers = {"Retry-After": str(_RETRY_AFTER)}
        return refusal(503, "no engine takes requests now: try again soon", "no_engine", headers)

    async def _try(self, attempt: Attempt, request: Request, content: bytes) -> httpx.Response | Response | None:
        """The engine's answer as it begins; or what it said instead, if anything, where another may take it."""
        engine = attempt.engine
        outgoing = self.client.build_request(
            request.method,
            httpx.URL(engine.url).copy_with(raw_path=request.scope["raw_path"] + _query(request)),
            headers=[(name, value) for name, value in request.headers.items() if name not in _HOP_BY_HOP],
            content=content,
        )
        try:
            answer = await _unless_lost(engine, self.client.send(outgoing, stream=True), left(request.receive))
            if answer.status_code not in _BUSY:
                return answer
            busy = await _unless_lost(engine, _whole(answer))
        except httpx.TransportError as error:
            self._telemetry.retried(attempt, "unreachable")
            _log.warning("engine does not answer", extra={"engine": engine.name, "why": repr(error)})
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                self._down(engine, error)
            return None
        self._telemetry.retried(attempt, _BUSY[answer.status_code])
        return busy

    async def models(self, headers: Mapping[str, str], name: str | None = None) -> Response:
        """What all engines together have, as each of them tells this caller; or the one model of a name."""
        sent = _credentials(headers)
        up = [engine for engine in self._fleet.engines if engine.up]
        answers = await asyncio.gather(
            *(self._probe(engine, "/v1/models", sent) for engine in up), return_exceptions=True
        )
        good = [one for one in answers if isinstance(one, httpx.Response) and one.status_code == 200]
        refused = next(
            (one for one in answers if isinstance(one, httpx.Response) and one.status_code in (401, 403)), None
        )
        if not good and refused is not None:
            return Response(refused.content, refused.status_code, media_type=refused.headers.get("content-type"))
        rows: dict[str, Any] = {}
        for answer in good:
            rows = {row["id"]: row for row in _rows(answer)} | rows
        if name is None:
            return JSONResponse({"object": "list", "data": list(rows.values())})
        return JSONResponse(rows[name]) if name in rows else _unknown_model(name)


class _Relay(Response):
    """Passes an engine's answer on, piece by piece, until its end or until the client or the engine goes away."""

    def __init__(self, answer: httpx.Response, attempt: Attempt, telemetry: Telemetry, began: float) -> None:
        super().__init__()
        self._answer = answer
        self._attempt = attempt
        self._telemetry = telemetry
        self._began = began

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            if not await while_connected(receive, _unless_lost(self._attempt.engine, self._pass_on(send))):
                note(scope, disconnected=True)
        except httpx.TransportError as error:
            # Too late for another status: that it is cut short, without its end, is all that the client can be told.
            self._telemetry.broken(self._attempt)
            _log.warning("answer broke off", extra={"engine": self._attempt.engine.name, "why": repr(error)})
        finally:
            self._attempt.end()
            with suppress(httpx.HTTPError):
                await self._answer.aclose()
            note(scope, engine=self._attempt.engine.name, reason=self._attempt.reason, matched=sum(self._attempt.found))

    async def _pass_on(self, send: Send) -> None:
        answer = self._answer
        headers = [
            (name.lower(), value) for name, value in answer.headers.raw if name.lower().decode() not in _LEFT_OUT
        ]
        headers.append((b"x-kvtier-engine", self._attempt.engine.name.encode()))
        await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        # As it came over the wire, compressed or not.
        async for piece in answer.aiter_raw():
            if piece:
                # It lives, whatever the looks at it come to.
                self._attempt.engine.seen()
                self._first(answer.status_code)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._first(answer.status_code)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _first(self, status: int) -> None:
        if status < 400 and not self._attempt.is_answered:
            self._telemetry.answered(self._attempt, time.perf_counter() - self._began)
            self._attempt.answered()


# A server adds its own date; its length goes on, so that a client sees where it was cut.
_LEFT_OUT = (_HOP_BY_HOP - {"content-length"}) | {"date", "server", "x-request-id"}


async def _within(seconds: float, work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` to its end: httpx grants its time-outs anew for every piece.

    Raises:
        httpx.ReadTimeout: the end did not come within so many seconds.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no whole answer within {seconds:g} s") from error


async def _unless_lost(engine: Engine, work: Coroutine[Any, Any, _T], *gone: Coroutine[Any, Any, object]) -> _T:
    """Run `work`, which waits for an engine, to its end.

    Raises:
        Gone: one of `gone` ended before.
        httpx.ReadTimeout: the engine was lost before.
    """
    try:
        return await unless(work, engine.lost.wait(), *gone)
    except Gone as error:
        if not engine.lost.is_set():
            raise
        raise httpx.ReadTimeout("nothing comes from it, and it does not answer") from error


def _credentials(headers: Mapping[str, str]) -> dict[str, str]:
    """What an engine knows the client by."""
    return {name: headers[name] for name in ("authorization",) if name in headers}


def _query(request: Request) -> bytes:
    query: bytes = request.scope["query_string"]
    return b"?" + query if query else b""


async def _whole(answer: httpx.Response) -> Response:
    """An answer that is not passed on piece by piece."""
    try:
        content = await answer.aread()
    finally:
        await answer.aclose()
    kept = ("content-type", "retry-after")
    return Response(
        content, answer.status_code, {name: answer.headers[name] for name in kept if name in answer.headers}
    )


def _authorities(path: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ConfigError(f"router.ca_file = {path}: {error}: expected certificates as PEM") from error


def _rows(models: httpx.Response) -> list[dict[str, Any]]:
    try:
        data = models.json()["data"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return (
        [row for row in data if isinstance(row, dict) and isinstance(row.get("id"), str)]
        if isinstance(data, list)
        else []
    )


def _adapters(models: httpx.Response) -> dict[str, str] | None:
    """Model -> LoRA adapter, as vLLM tells it: an adapter's model has a parent. None where the engine does not tell."""
    if models.status_code != 200:
        return None
    return {row["id"]: row["id"] if row.get("parent") else "" for row in _rows(models)}
