"""`HttpCaller` for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx

from kvtier.client.errors import ClientError, DeadlineExceeded
from kvtier.client.exchange import Call, pieces, refusal
from kvtier.client.http import Session, translated
from kvtier.client.line import Line
from kvtier.client.retrying import Attempts

__all__ = ["AsyncHttpCaller"]

_T = TypeVar("_T")


class AsyncHttpCaller:
    """Makes calls, each within its deadline.

    Args:
        session: address, token, options.
        transport: instead of the network.
    """

    def __init__(self, session: Session, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._options = session.options
        self._http = httpx.AsyncClient(transport=transport, **session.arguments())
        self.line = Line(session.url, session.options)

    async def run(self, call: Call[_T], timeout: float | None = None) -> _T:
        """Make a call; see `HttpCaller.run`."""
        attempts = Attempts(self._options, timeout, idempotent=call.idempotent)
        while True:
            try:
                return await self._attempt(call, attempts)
            except ClientError as error:
                await asyncio.sleep(attempts.pause(error))

    async def _attempt(self, call: Call[_T], attempts: Attempts) -> _T:
        left = attempts.remaining()
        with self.line.attempt(attempts.timeout), translated(self.line.address):
            try:
                async with asyncio.timeout(left):
                    return await self._exchange(call, left)
            except TimeoutError as error:
                raise DeadlineExceeded(f"{self.line.address} did not answer within {attempts.timeout} s") from error

    async def _exchange(self, call: Call[_T], timeout: float) -> _T:
        content = _pieces(call) if call.body else None
        response = await self._http.send(call.request(self._http, timeout, content), stream=True)
        try:
            reader = call.answer(response.status_code, response.headers)
            async for piece in response.aiter_raw():
                reader.take(piece)
            return reader.result()
        finally:
            await response.aclose()

    @asynccontextmanager
    async def stream(self, path: str, params: Mapping[str, str], silence: float) -> AsyncIterator[httpx.Response]:
        """An answer that does not end by itself; see `HttpCaller.stream`."""
        with self.line.attempt(silence), translated(self.line.address):
            async with self._http.stream("GET", path, params=params, timeout=silence) as response:
                if response.status_code != httpx.codes.OK:
                    raise refusal(response.status_code, response.headers, await response.aread())
                yield response

    async def close(self) -> None:
        """End its connections. Idempotent."""
        await self._http.aclose()


async def _pieces(call: Call[_T]) -> AsyncIterator[memoryview]:
    for piece in pieces(call.body):
        yield piece
