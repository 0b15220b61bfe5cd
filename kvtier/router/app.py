"""The router's application: its routes, who may call, and what is answered here."""

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvtier.config import RouterSettings
from kvtier.http.access import AccessLog, note
from kvtier.http.connection import Gone
from kvtier.http.keys import knows_key
from kvtier.router.fleet import Address, Fleet
from kvtier.router.prompts import EngineTokens, LocalTokens, NoTokens, Prompt, Tokens, prompt_of
from kvtier.router.proxy import Proxy, refusal
from kvtier.router.telemetry import Telemetry

__all__ = ["Router", "make_app"]

_PROMPTED = frozenset({"/v1/completions", "/v1/chat/completions"})
_OPEN = frozenset({"/health", "/healthz", "/readyz"})
# Nothing that a proxy further on could take for a way out of /v1.
_PATH = re.compile(rb"(/v1/[A-Za-z0-9_\-]+(/[A-Za-z0-9_\-.:]+)*)|/(de)?tokenize")
_DRAIN_POLL_SECONDS = 0.05


class Router:
    """Everything behind the routes. Implements `kvtier.http.draining.Drainable`.

    Args:
        places: of the engines.
        settings: of the router.

    Raises:
        ModelError: there is no tokenizer in the directory that `router.tokenizer` names.
        ConfigError: `router.ca_file` has no certificates.
    """

    def __init__(self, places: Sequence[Address], settings: RouterSettings) -> None:
        self.settings = settings
        self.drain_timeout = settings.drain_timeout
        self.draining = False
        self.fleet = Fleet(places, settings)
        self.telemetry = Telemetry(self.fleet)
        self.proxy = Proxy(self.fleet, settings, self.telemetry)
        self.tokens = self._tokens()
        self._under_way = 0

    def _tokens(self) -> Tokens:
        match self.settings.tokenizer:
            case "engine":
                return EngineTokens(self.proxy.tokens, self.telemetry.untokenized)
            case "text":
                return NoTokens()
            case directory:
                return LocalTokens(Path(directory).expanduser(), self.telemetry.untokenized)

    async def start(self) -> None:
        """Look after the engines from now on.

        Raises:
            ConfigError: an endpoint of events is none.
        """
        await self.proxy.start()

    async def close(self) -> None:
        """Let go of everything."""
        await self.proxy.close()

    @property
    def underway(self) -> int:
        """Requests that are being answered."""
        return self._under_way

    async def drain(self) -> None:
        """See `Drainable`."""
        self.draining = True
        while self._under_way:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)

    def abandon(self) -> None:
        """See `Drainable`: the server cancels what runs."""

    # ---- routes

    async def forward(self, request: Request) -> Response:
        """Whatever an engine answers."""
        began = time.perf_counter()
        if not _PATH.fullmatch(request.scope["raw_path"]):
            return refusal(404, f"{request.url.path!r:.100}: no such path", "unknown_path")
        if self.draining:
            return refusal(503, "the router shuts down: try another one", "draining", {"Retry-After": "1"})
        content = await _body(request, self.settings.max_body)
        if content is None:
            message = f"the body is larger than the {self.settings.max_body} bytes that this router takes"
            return refusal(413, message, "body_too_large", {"Connection": "close"})
        self._under_way += 1
        try:
            prompt = Prompt(None, None, "")
            if request.url.path in _PROMPTED:
                prompt = await prompt_of(content, request.headers, self.tokens)
            answer = await self.proxy.send(request, content, prompt, began)
        except BaseException:
            self._under_way -= 1
            raise
        return _Counted(answer, self)

    def ended(self) -> None:
        """A request that was forwarded is over."""
        self._under_way -= 1

    async def models(self, request: Request) -> Response:
        """Those of all engines, or one of them."""
        return await self.proxy.models(request.headers, request.path_params.get("name"))

    async def health(self, _: Request) -> Response:
        """The router itself is alive."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Whether a request would find an engine."""
        usable = len(self.fleet.usable(None))
        status = "draining" if self.draining else "ready" if usable else "no engine"
        return JSONResponse({"status": status, "engines": usable}, 200 if status == "ready" else 503)

    async def metrics(self, _: Request) -> Response:
        """For Prometheus."""
        return Response(self.telemetry.text(), media_type="text/plain; version=0.0.4")

    async def engines(self, _: Request) -> Response:
        """What the router thinks of its engines."""
        return JSONResponse({"engines": [_shown(self.fleet, at) for at in range(len(self.fleet.engines))]})


def make_app(router: Router, api_keys: Sequence[str] = ()) -> Starlette:
    """The ASGI application.

    Args:
        router: what it serves; started and closed by whoever runs it.
        api_keys: that open it; none: the engines judge by themselves. `Authorization` goes on to them in any case.
    """
    routes = [
        Route("/health", router.health),
        Route("/healthz", router.health),
        Route("/readyz", router.ready),
        Route("/metrics", router.metrics),
        Route("/router/engines", router.engines),
        Route("/v1/models", router.models),
        Route("/v1/models/{name:path}", router.models),
        Route("/v1/{path:path}", router.forward, methods=["POST"]),
        Route("/tokenize", router.forward, methods=["POST"]),
        Route("/detokenize", router.forward, methods=["POST"]),
    ]
    known = {route.path for route in routes} | _PROMPTED

    def label(scope: Scope) -> str:
        path: str = scope["path"]
        return path if path in known else "other"

    return Starlette(
        routes=routes,
        middleware=[
            Middleware(AccessLog, label=label, answered=router.telemetry.over, log="kvtier.router.access"),
            Middleware(_Keys, keys=api_keys),
        ],
        exception_handlers={ClientDisconnect: _left, Gone: _left},
    )


class _Keys:
    """Lets in who knows a key, if there are any."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        shut = scope["type"] == "http" and self._keys and scope["path"] not in _OPEN
        if shut and not knows_key(scope, self._keys):
            message = "no valid API key: send it as `Authorization: Bearer KEY`"
            answer = refusal(401, message, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _Counted(Response):
    """A response that counts as under way until it is sent."""

    def __init__(self, inner: Response, router: Router) -> None:
        super().__init__()
        self._inner = inner
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await self._inner(scope, receive, send)
        finally:
            self._router.ended()


async def _left(request: Request, _: Exception) -> Response:
    # For the log alone: nobody is there to read it.
    note(request.scope, disconnected=True)
    return Response(status_code=499)


async def _body(request: Request, limit: int) -> bytes | None:
    """All of it, or None as soon as it is too long."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        return None
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            return None
    return bytes(body)


def _shown(fleet: Fleet, at: int) -> dict[str, Any]:
    engine = fleet.engines[at]
    counts = engine.index.counts()
    return {
        "url": engine.url,
        "up": engine.up,
        "draining": engine.draining,
        "models": None if engine.adapters is None else sorted(engine.adapters),
        "active": engine.active,
        "computing_tokens": engine.computing,
        "block_size": engine.index.block_size or None,
        "blocks": dict(zip(("device", "host", "storage", "remote"), counts.blocks, strict=True)),
        "events": {"connected": engine.hears, **engine.heard._asdict()},
    }
