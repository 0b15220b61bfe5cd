"""The application: routes, guards, errors."""

import re
from collections.abc import Sequence
from functools import cache as cache_once
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from kvtier import __version__
from kvtier.config import ServiceSettings
from kvtier.errors import KVTierError, LeaseError, TierUnavailable
from kvtier.http.access import AccessLog
from kvtier.service.cache import Cache, Places, ServiceError, Tokens
from kvtier.service.cache import Scope as TokenScope
from kvtier.service.cache.callers import require
from kvtier.service.rest.admin import admin_routes, figure_routes
from kvtier.service.rest.answers import StateAnswer
from kvtier.service.rest.batches import batch_routes
from kvtier.service.rest.blocks import block_routes
from kvtier.service.rest.calls import CallerOf, Service
from kvtier.service.rest.catalogue import hold_routes, namespace_routes
from kvtier.service.rest.errors import RestError, from_http, from_service, from_validation, refusal
from kvtier.service.rest.events import event_routes
from kvtier.service.rest.guards import BodyGuard, BodyRefused, HeadGuard, PageGuard, TokenGuard
from kvtier.service.rest.memory import BufferPool
from kvtier.service.rest.page import page_routes
from kvtier.service.rest.spec import describe, refusals
from kvtier.service.rest.turns import Turns
from kvtier.wire.blockstream import HEAD_LIMIT

__all__ = ["make_app"]

_JSON_LIMIT = 8 << 20
_RETRY_SECONDS = 5.0
_METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
_ONE = re.compile(r"/v1/namespaces/[^/]*/blocks/[^/]*")
_MANY = re.compile(r"/v1/namespaces/[^/]*/blocks:put")
_DESCRIPTION = "Blocks of KV cache, kept in host memory, NVMe and remote tiers, for every engine on the machine."


def make_app(cache: Cache, tokens: Tokens, settings: ServiceSettings) -> FastAPI:
    """The ASGI application of the REST API.

    Args:
        cache: what it serves.
        tokens: who may call.
        settings: limits.
    """
    # Its pages for people load scripts from elsewhere, and it makes the document while all else waits.
    app = FastAPI(
        title="kvtier",
        version=__version__,
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        # A path is another one, and a client that is sent on may send its token with it.
        redirect_slashes=False,
        generate_unique_id_function=_operation,
    )
    turns = Turns(settings.request_timeout)
    service = Service(
        cache,
        settings,
        BufferPool(settings.inflight_bytes),
        turn=Depends(turns.of_tenant, scope="function"),
        admin_turn=Depends(turns.of_admins, scope="function"),
    )
    requests = _Requests()
    routers = (
        # In the order in which paths are tried: what is asked most comes first.
        block_routes(service),
        batch_routes(service),
        namespace_routes(service),
        hold_routes(service),
        figure_routes(service),
        event_routes(service),
        admin_routes(service),
        _probe_routes(service, requests),
        page_routes(),
    )
    for router in routers:
        app.include_router(router)
    _add_errors(app, [route for router in routers for route in router.routes])
    # The last one added is the outermost.
    app.add_middleware(BodyGuard, limit=_body_limit(settings), patience=settings.idle_timeout)
    app.add_middleware(TokenGuard, tokens=tokens, places=Places(settings.max_connections))
    app.add_middleware(PageGuard, local=not tokens.required)
    app.add_middleware(HeadGuard)
    app.add_middleware(AccessLog, label=_label, answered=requests.answered, log="kvtier.service.access")
    _add_document(app, settings, tokens=tokens.required)
    return app


def _add_document(app: FastAPI, settings: ServiceSettings, *, tokens: bool) -> None:
    described = cache_once(partial(describe, app, settings, tokens=tokens))
    # As FastAPI's own documentation overrides it.
    app.openapi = described  # type: ignore[method-assign]

    @app.get("/openapi.json", include_in_schema=False)
    def document() -> JSONResponse:
        return JSONResponse(described())


def _operation(route: APIRoute) -> str:
    # One function answers both.
    return f"{route.name}_head" if route.methods == {"HEAD"} else route.name


class _Requests:
    """Counts requests by route and status."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._count = Counter(
            "kvtier_http_requests", "HTTP requests, by route and status", ["path", "status"], registry=self._registry
        )

    def answered(self, label: str, status: int, seconds: float) -> None:
        """A request is through."""
        self._count.labels(label, str(status)).inc()

    def text(self) -> bytes:
        """In the text format of Prometheus."""
        return generate_latest(self._registry)


def _label(scope: Scope) -> str:
    route = scope.get("route")
    return "other" if route is None else str(route.path_format)


def _body_limit(settings: ServiceSettings) -> Any:
    heads = (HEAD_LIMIT + 8) * settings.max_batch_keys

    def limit(scope: Scope) -> int:
        path = scope["path"]
        if _ONE.fullmatch(path):
            return settings.max_block
        return settings.max_batch + heads if _MANY.fullmatch(path) else _JSON_LIMIT

    return limit


def _probe_routes(service: Service, requests: _Requests) -> APIRouter:
    router, cache = APIRouter(tags=["probes"]), service.cache

    @router.get("/healthz")
    async def health() -> StateAnswer:
        """Whether the process lives; needs no token."""
        return StateAnswer(status="ok")

    @router.get("/readyz", responses={503: {"model": StateAnswer, "description": "It drains"}})
    async def ready(response: Response) -> StateAnswer:
        """Whether it takes calls; needs no token."""
        draining = cache.draining
        response.status_code = 503 if draining else 200
        return StateAnswer(status="draining" if draining else "ready")

    @router.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}},
            **refusals(),
        },
    )
    def metrics(caller: CallerOf) -> Response:
        """Metrics of the service, its tenants and their tiers; needs the scope admin."""
        require(caller, TokenScope.ADMIN)
        return Response(cache.metrics_text() + requests.text(), media_type="text/plain; version=0.0.4")

    return router


def _methods(routes: Sequence[BaseRoute], scope: Scope) -> list[str]:
    """What the path of a request may be asked with."""

    def takes(method: str) -> bool:
        asked = {**scope, "method": method}
        return any(route.matches(asked)[0] is Match.FULL for route in routes)

    return [method for method in _METHODS if takes(method)]


def _add_errors(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    @app.exception_handler(ServiceError)
    async def refused(_: Request, error: ServiceError) -> JSONResponse:
        return refusal(from_service(error))

    @app.exception_handler(LeaseError)
    @app.exception_handler(TierUnavailable)
    async def ended(_: Request, __: KVTierError) -> JSONResponse:
        # What was under way when the tiers were closed.
        return refusal(
            from_service(ServiceError("draining", "the service stops: ask again", retry_after=_RETRY_SECONDS))
        )

    @app.exception_handler(RestError)
    async def told(_: Request, error: RestError) -> JSONResponse:
        return refusal(error)

    @app.exception_handler(BodyRefused)
    async def body(_: Request, error: BodyRefused) -> JSONResponse:
        return refusal(error.error)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> JSONResponse:
        # For the log alone: nobody is there to read it.
        return refusal(RestError(400, "invalid", "the request ends within its body"))

    @app.exception_handler(RequestValidationError)
    async def misshapen(_: Request, error: RequestValidationError) -> JSONResponse:
        return refusal(from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        asked = f"{request.method} {request.url.path!r}"
        told = from_http(error.status_code, str(error.detail), asked, error.headers)
        if error.status_code == 405:
            # The framework names the methods of one route alone.
            told.headers["Allow"] = ", ".join(_methods(routes, request.scope))
        return refusal(told)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        # The server logs the rest; it may hold what the client should not read.
        return refusal(RestError(500, "internal", f"the service failed: {type(error).__name__}"))
