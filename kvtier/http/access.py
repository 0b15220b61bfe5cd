"""The access log: one line for each request, with its id. Plain ASGI."""

import logging
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["AccessLog", "note"]

_RECORD = "kvtier.record"
_LONGEST_PATH = 200


def note(scope: Scope, **fields: Any) -> None:
    """Add fields to the request's line in the access log."""
    scope[_RECORD].update(fields)


class AccessLog:
    """One line for each request, without its query, its headers or its body: nothing of them is anyone's business.

    Args:
        app: the application within.
        label: the name by which a request is counted, asked once it is over; few names, or there is no end of them.
        answered: told label, status and seconds of each request.
        log: name of the logger.
    """

    def __init__(
        self,
        app: ASGIApp,
        label: Callable[[Scope], str],
        answered: Callable[[str, int, float], None],
        log: str,
    ) -> None:
        self._app = app
        self._label = label
        self._answered = answered
        self._log = logging.getLogger(log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        request_id = f"req-{uuid4().hex}"
        fields: dict[str, Any] = {}
        scope[_RECORD] = fields
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
        self._answered(self._label(scope), status, seconds)
        self._log.info(
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
