"""What every request passes before its route: the access log, the API key, the size of its body. Plain ASGI."""

import hmac
import logging
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.errors import ConfigError
from kvtier.server.errors import ApiError

__all__ = ["OPEN_PATHS", "AccessLog", "ApiKeys", "BodyLimit", "note", "read_api_keys", "refusal"]

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz"})
"""Served without a key: whoever asks them has none."""

_log = logging.getLogger("kvtier.server.access")
_RECORD = "kvtier.record"
_LONGEST_PATH = 200


def note(scope: Scope, **fields: Any) -> None:
    """Add fields to the request's line in the access log."""
    scope[_RECORD].update(fields)


def refusal(error: ApiError) -> JSONResponse:
    """The response that tells an error."""
    return JSONResponse(error.body(), error.status, error.headers)


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Keys of a file, one a line; empty lines and those that begin with # are none.

    Raises:
        ConfigError: it cannot be read, or holds no key.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.api_key_file {path}: {error}: name a readable text file") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"server.api_key_file {path}: expected at least one key, one a line")
    return keys


class AccessLog:
    """One line for each request, without its query, its headers or its body: nothing of them is anyone's business.

    Args:
        app: the application within.
        paths: those that are counted by name; all else is `other`, or there would be no end of names.
        answered: told path, status and seconds of each request.
    """

    def __init__(self, app: ASGIApp, paths: Container[str], answered: Callable[[str, int, float], None]) -> None:
        self._app = app
        self._paths = paths
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        fields: dict[str, Any] = {}
        scope[_RECORD] = fields
        request_id = f"req-{uuid4().hex}"
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            status = status or 500
            raise
        finally:
            # Without a status the client went away before there was one: as nginx writes it.
            self._tell(scope, request_id, status or 499, time.perf_counter() - began, fields)

    def _tell(self, scope: Scope, request_id: str, status: int, seconds: float, fields: dict[str, Any]) -> None:
        path = scope["path"]
        self._answered(path if path in self._paths else "other", status, seconds)
        _log.info(
            "request",
            extra={
                "method": scope["method"],
                # As it was sent, percent-encoded: no line break of a client's gets into the log.
                "path": scope["raw_path"].decode("latin-1")[:_LONGEST_PATH],
                "status": status,
                "seconds": round(seconds, 4),
                "client": scope["client"][0] if scope.get("client") else None,
                "request_id": request_id,
                **fields,
            },
        )


class ApiKeys:
    """Lets in who knows a key. Compares in constant time, and with every key.

    Args:
        app: the application within.
        keys: `Authorization: Bearer KEY` opens; none: everybody is let in.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or not self._keys or self._knows(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "no valid API key: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(error)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


class BodyLimit:
    """Reads the body before the application does, and refuses a long one without reading it to its end.

    Args:
        app: the application within.
        limit: bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, size, more = bytearray(), _announced(scope), True
        while more and size <= self._limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            size, more = max(size, len(body)), message.get("more_body", False)
        if size > self._limit:
            await self._refuse(scope, receive, send)
            return
        pending = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is larger than the {self._limit} bytes that this server takes: send a smaller one"
        # What is left of the body would be taken for the next request.
        error = ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
        await refusal(error)(scope, receive, send)


def _announced(scope: Scope) -> int:
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(length) if length.isdigit() else 0
