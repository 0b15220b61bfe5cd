"""What every request passes before its route: the API key, the size of its body. Plain ASGI."""

from collections.abc import Sequence

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.http.keys import knows_key
from kvtier.server.errors import ApiError

__all__ = ["OPEN_PATHS", "ApiKeys", "BodyLimit", "refusal"]

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz"})
"""Served without a key: whoever asks them has none."""


def refusal(error: ApiError) -> JSONResponse:
    """The response that tells an error."""
    return JSONResponse(error.body(), error.status, error.headers)


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
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or not self._keys or knows_key(scope, self._keys):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "no valid API key: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(error)(scope, receive, send)


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
