"""Reply: runs a generation and answers with it, in one piece or as server-sent events.

All of it happens while the response is sent, inside one stack of contexts: whatever ends it (the last token, an
error, a client that goes away, a cancelled server) aborts what runs and gives its places back.
"""

import json
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvtier.engine import RequestOutput, SamplingParams
from kvtier.errors import KVTierError
from kvtier.hints import RequestHints
from kvtier.http.access import note
from kvtier.http.connection import while_connected
from kvtier.server.errors import as_api_error
from kvtier.server.generation import Event, Generation
from kvtier.server.responses import Writer, usage_of
from kvtier.server.served import Served

__all__ = ["Job", "Reply"]

_DONE = b"data: [DONE]\n\n"
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, slots=True)
class Job:
    """What a request asks for.

    Args:
        prompts: token ids of each.
        params, hints: for all of them.
        sequences: of all prompts together.
        stream: answer with events.
        include_usage: the last event says what was used.
        hidden: output tokens of each sequence that the client did not ask for.
    """

    prompts: list[list[int]]
    params: SamplingParams
    hints: RequestHints | None
    sequences: int
    stream: bool
    include_usage: bool
    hidden: int = 0


class Reply(Response):
    """The response of one job.

    Args:
        served: who does it.
        job: what is to be done.
        writer: how it is told.
    """

    def __init__(self, served: Served, job: Job, writer: Writer) -> None:
        super().__init__()
        self._served = served
        self._job = job
        self._writer = writer
        self._finals: dict[tuple[int, int], RequestOutput] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        if not await while_connected(receive, self._answer(scope, receive, send)):
            note(scope, disconnected=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._served.admission.hold(self._job.sequences):
            try:
                await self._generate(send)
            finally:
                self._account(scope)
        if not self._job.stream:
            await JSONResponse(self._whole())(scope, receive, send)

    async def _generate(self, send: Send) -> None:
        job = self._job
        streams = [self._served.start(tokens, job.params, job.hints) for tokens in job.prompts]
        async with Generation(streams) as generation:
            if job.stream:
                await self._send_events(generation, send)
                return
            async for event in generation.events():
                self._saw(event)

    def _saw(self, event: Event) -> None:
        self._finals[event.prompt, event.output.index] = event.output

    def _whole(self) -> dict[str, Any]:
        usage = usage_of(self._finals, hidden=self._job.hidden)
        return self._writer.whole(self._finals) | {"usage": usage.body()}

    async def _send_events(self, generation: Generation, send: Send) -> None:
        events = generation.events()
        # A refusal raises here, while the status can still say so.
        first = await anext(events)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        for body in self._writer.opening():
            await self._send(send, body)
        await self._send_event(send, first)
        try:
            async for event in events:
                await self._send_event(send, event)
            if self._job.include_usage:
                usage = usage_of(self._finals, hidden=self._job.hidden)
                head = self._writer.head.of(self._writer.chunk_kind, [])
                await _send_data(send, head | {"usage": usage.body()})
        except KVTierError as error:
            await _send_data(send, as_api_error(error).body())
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def _send_event(self, send: Send, event: Event) -> None:
        self._saw(event)
        body = self._writer.chunk(event)
        if body is not None:
            await self._send(send, body)

    async def _send(self, send: Send, body: dict[str, Any]) -> None:
        # With usage asked for, every event has the field.
        await _send_data(send, body | {"usage": None} if self._job.include_usage else body)

    def _account(self, scope: Scope) -> None:
        self._served.telemetry.generated(self._finals)
        usage = usage_of(self._finals, hidden=self._job.hidden)
        note(
            scope,
            response=self._writer.head.id,
            prompt_tokens=usage.prompt,
            output_tokens=usage.output,
            cached_tokens=usage.device + usage.loaded,
        )


async def _send_data(send: Send, body: dict[str, Any]) -> None:
    data = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
