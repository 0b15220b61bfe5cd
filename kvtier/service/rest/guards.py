"""What every request passes before its route: the size of its head, the page it is from, its token, its body's pace."""

import asyncio
import ipaddress
import re
from collections.abc import Callable
from contextlib import ExitStack

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.http.access import note
from kvtier.service.cache import Caller, Places, ServiceError, Tokens
from kvtier.service.rest.errors import RestError, from_service, refusal
from kvtier.service.rest.page import PAGE_PATHS

__all__ = ["OPEN_PATHS", "BodyGuard", "BodyRefused", "HeadGuard", "PageGuard", "TokenGuard", "caller_of", "still_known"]

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"}) | PAGE_PATHS
"""Served without a token: they show nothing of anybody."""

# What admins need when their tenant has taken all its places; short, and refused to others.
_ALWAYS = ("/metrics", "/v1/admin/")
_CALLER = "kvtier.caller"
_KNOWN = "kvtier.known"
_MOST_HEADERS = 100
_LONGEST_HEAD = 1 << 15
_ADVANCE = 4096
_LENGTH = re.compile(r"[0-9]{1,20}")
_HOST = re.compile(r"(\[[0-9a-f:.]{2,39}\]|[a-z0-9.-]{1,253})(?::[0-9]{1,5})?")
_CLOSE = {"Connection": "close"}


def caller_of(scope: Scope) -> Caller:
    """Whose request it is."""
    caller: Caller = scope[_CALLER]
    return caller


def still_known(scope: Scope) -> bool:
    """Whether the caller's token is what it was when the request began; for answers that take long."""
    known: Callable[[], bool] = scope[_KNOWN]
    return known()


class BodyRefused(HTTPException):
    """Ends a body while it is read. An `HTTPException`, since the framework lets no other out of its reading.

    Args:
        error: what the client is told.
    """

    def __init__(self, error: RestError) -> None:
        super().__init__(error.status)
        self.error = error


class HeadGuard:
    """Refuses what is long before it is looked at.

    Args:
        app: the application within.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            headers = scope["headers"]
            size = len(scope["raw_path"]) + len(scope["query_string"])
            size += sum(len(name) + len(value) for name, value in headers)
            if len(headers) > _MOST_HEADERS or size > _LONGEST_HEAD:
                message = (
                    f"a head of {len(headers)} headers and {size} bytes: expected at most {_MOST_HEADERS} and "
                    f"{_LONGEST_HEAD}"
                )
                await refusal(RestError(431, "too_large", message, headers=_CLOSE))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class PageGuard:
    """Refuses what a web page of somebody else's makes a browser on this machine ask.

    A page may send simple requests anywhere (their `Origin` is not this service), and may come to have any address by
    the name that it is served under (its `Host` is none of this machine). Without tokens either would be served.

    Args:
        app: the application within.
        local: whether every caller is on this machine, so that it must call it by a name of this machine.
    """

    def __init__(self, app: ASGIApp, *, local: bool) -> None:
        self._app = app
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        wrong = self._wrong(scope) if scope["type"] == "http" and scope["path"] not in OPEN_PATHS else None
        if wrong is not None:
            await refusal(wrong)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _wrong(self, scope: Scope) -> RestError | None:
        host, origin = _header(scope, b"host"), _header(scope, b"origin")
        if origin is not None and origin.partition("://")[2] != host:
            text = "the request is from a web page of another origin: call from none"
            return RestError(403, "forbidden", text, param="Origin", headers=_CLOSE)
        if self._local and host is not None and not _is_loopback(host):
            text = "without tokens this service answers to localhost, 127.0.0.1 and [::1] alone: call it by one of them"
            return RestError(403, "forbidden", text, param="Host", headers=_CLOSE)
        return None


class TokenGuard:
    """Finds out who calls; refuses who is nobody, and whose tenant has as many requests under way as it may.

    Args:
        app: the application within.
        tokens: of the service.
        places: of requests under way.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, places: Places) -> None:
        self._app = app
        self._tokens = tokens
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        secret = _secret(scope)
        with ExitStack() as held:
            try:
                caller = self._tokens.caller(secret)
                note(scope, token=caller.token, tenant=caller.tenant)
                if not scope["path"].startswith(_ALWAYS):
                    held.enter_context(self._places.taken(caller.tenant))
            except ServiceError as error:
                told = from_service(error)
                told.headers.update(_CLOSE)
                await refusal(told)(scope, receive, send)
                return
            scope[_CALLER] = caller
            scope[_KNOWN] = lambda: self._knows(secret, caller)
            await self._app(scope, receive, send)

    def _knows(self, secret: str | None, caller: Caller) -> bool:
        try:
            return self._tokens.caller(secret) == caller
        except ServiceError:
            return False


class BodyGuard:
    """Refuses a body that is announced too long, grows too long, or does not advance.

    A body has to advance by 4 KiB, or to its end, within every `patience` seconds.

    Args:
        app: the application within.
        limit: told a request's scope, gives the bytes that its body may have.
        patience: seconds.
    """

    def __init__(self, app: ASGIApp, limit: Callable[[Scope], int], patience: float) -> None:
        self._app = app
        self._limit = limit
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit(scope)
        if _announced(scope) > limit:
            await refusal(_too_large(limit))(scope, receive, send)
            return
        body = _Body(receive, limit, self._patience)
        await self._app(scope, body.receive, send)


class _Body:
    """The body of one request, as far as it has come."""

    def __init__(self, receive: Receive, limit: int, patience: float) -> None:
        self._receive = receive
        self._limit = limit
        self._patience = patience
        self._size = 0
        self._ended = False
        self._left = patience
        self._goal = _ADVANCE

    async def receive(self) -> Message:
        """The next piece; after the last, what comes then."""
        if self._ended:
            return await self._receive()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._left):
                message = await self._receive()
        except TimeoutError:
            told = f"the body came to {self._size} bytes and does not advance: send it within {self._patience} s"
            raise BodyRefused(RestError(408, "request_timeout", told, headers=_CLOSE)) from None
        # What the application does between two pieces is not the client's time.
        self._left -= loop.time() - began
        self._size += len(message.get("body", b""))
        self._ended = not message.get("more_body", False)
        if self._size >= self._goal:
            self._left, self._goal = self._patience, self._size + _ADVANCE
        if self._size > self._limit:
            raise BodyRefused(_too_large(self._limit))
        return message


def _too_large(limit: int) -> RestError:
    message = f"the body is larger than the {limit} bytes that may be sent here: send a smaller one"
    # What is left of the body would be taken for the next request.
    return RestError(413, "too_large", message, headers=_CLOSE)


def _announced(scope: Scope) -> int:
    length = _header(scope, b"content-length") or ""
    return int(length) if _LENGTH.fullmatch(length) else 0


def _secret(scope: Scope) -> str | None:
    scheme, _, secret = (_header(scope, b"authorization") or "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None


def _is_loopback(host: str) -> bool:
    match = _HOST.fullmatch(host.lower())
    name = match[1].strip("[]") if match else ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _header(scope: Scope, wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)
