"""GET /v1/events: changes of the tenant's tiers as server-sent events (WHATWG HTML, section 9.2)."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.types import Receive, Scope, Send

from kvtier.service.cache import Cache
from kvtier.service.cache.events import BlockEvent, TenantEvents
from kvtier.service.rest.calls import CallerOf, Service
from kvtier.service.rest.guards import still_known
from kvtier.service.rest.spec import refusals

__all__ = ["EventReply", "event_routes"]

_AT_ONCE = 256
_TICK_SECONDS = 1.0
_BEAT_TICKS = 15
_ID_PATTERN = r"^(?:[0-9a-f]{16}-)?[0-9]{1,18}$"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_EVENT = {
    "description": "One event, its fields as clients of server-sent events read them",
    "type": "object",
    "required": ["id", "event", "data"],
    "properties": {
        "id": {"type": "string", "pattern": r"^[0-9a-f]{16}-[0-9]{1,18}$"},
        "event": {"enum": ["stored", "removed", "cleared", "gap"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
_EXAMPLE = (
    'id: 5d2f1c0a9b8e7d6f-17\nevent: stored\ndata: {"sequence":17,"time":1790000000.5,"tier":"host",'
    '"namespace":"smollm2","part":0,"keys":["3f1ae6c08d6c5f4b9d0c5f0e7b1a2c3d"],"parents":[null],"depths":[0],'
    '"reason":""}\n\n'
)


def event_routes(service: Service) -> APIRouter:
    """The route of events."""
    router, cache = APIRouter(tags=["figures"]), service.cache

    @router.get(
        "/v1/events",
        response_class=Response,
        responses={
            200: {
                "description": "Events without end, each with an id from which to resume; `gap` where some were missed",
                "content": {"text/event-stream": {"schema": _EVENT, "example": _EXAMPLE}},
            },
            **refusals(),
        },
    )
    async def events(
        request: Request,
        caller: CallerOf,
        since: Annotated[
            str | None, Query(pattern=_ID_PATTERN, description="An event's id or number; those after it come first")
        ] = None,
        last_event_id: Annotated[
            str | None, Header(alias="Last-Event-ID", pattern=_ID_PATTERN, description="As `since`, and goes before it")
        ] = None,
    ) -> Response:
        """Follow what the tiers hold, from now on or from an earlier event on."""
        log = cache.events(caller)
        ended = partial(_ended, cache, request.scope)
        return EventReply(log, _after(log, last_event_id or since), ended)

    return router


def _ended(cache: Cache, scope: Scope) -> bool:
    return cache.draining or not still_known(scope)


def _after(log: TenantEvents, since: str | None) -> int:
    """Sequence number after which the client wants events; -1, which no event has, for one of another log."""
    if since is None:
        return log.last
    epoch, _, sequence = since.rpartition("-")
    return int(sequence) if epoch in ("", log.epoch) else -1


class EventReply(Response):
    """Events of a log until the client goes away, its token ends, or the service drains.

    Args:
        log: the tenant's.
        after: sequence number.
        ended: whether it is time to end.
    """

    def __init__(self, log: TenantEvents, after: int, ended: Callable[[], bool]) -> None:
        super().__init__()
        self._log = log
        self._at = after
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if scope["method"] != "HEAD":
            gone = asyncio.create_task(_gone(receive))
            try:
                await self._follow(send, gone)
            finally:
                gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self, send: Send, gone: "asyncio.Task[None]") -> None:
        changed = _Changed()
        end = self._log.listen(changed.tell)
        gone.add_done_callback(lambda _: changed.tell())
        try:
            await _send(send, b"retry: 1000\n\n")
            ticks = 0
            while not gone.done() and not self._ended():
                before, data = self._at, self._next()
                ticks = 0 if data else ticks + 1
                if ticks == _BEAT_TICKS:
                    data, ticks = b": still here\n\n", 0
                if data:
                    await _send(send, data)
                elif self._at == before:
                    await changed.wait(_TICK_SECONDS)
        finally:
            end()

    def _next(self) -> bytes:
        """What comes after the latest that was sent."""
        found, epoch = self._log.since(self._at, _AT_ONCE), self._log.epoch
        parts = [_message(event.kind, f"{epoch}-{event.sequence}", _data(event)) for event in found.events]
        if found.gap:
            # To resume from here is to miss nothing more.
            first = found.events[0].sequence - 1 if found.events else found.last
            parts.insert(0, _message("gap", f"{epoch}-{first}", {"after": self._at, "sequence": first}))
        self._at = found.last
        return b"".join(parts)


class _Changed:
    """Wakes a loop from other threads, once for all changes until it looks."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._told = False

    def tell(self) -> None:
        """Something changed; from any thread."""
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, seconds: float) -> None:
        """Until something changed, `seconds` at most."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return
        # In this order: what changes in between wakes once more.
        self._event.clear()
        self._told = False


def _data(event: BlockEvent) -> dict[str, Any]:
    return {
        "sequence": event.sequence,
        "time": event.time,
        "tier": event.tier,
        "namespace": event.namespace,
        "part": event.part,
        "keys": [key.hex() for key in event.keys],
        "parents": [None if parent is None else parent.hex() for parent in event.parents],
        "depths": list(event.depths),
        "reason": event.reason,
    }


def _message(kind: str, name: str, data: dict[str, Any]) -> bytes:
    return f"id: {name}\nevent: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
