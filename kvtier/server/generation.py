"""Generation: the sequences of one HTTP request, as one stream of events."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from kvtier.engine import RequestOutput
from kvtier.errors import KVTierError

__all__ = ["Event", "Generation"]


class Event(NamedTuple):
    """Something new of one sequence. prompt: which of the request's prompts it answers."""

    prompt: int
    output: RequestOutput


class Generation:
    """Merges the streams of several prompts. An async context; leaving it aborts what still runs.

    Args:
        streams: one for each prompt.

    Invariant: once the context is left, no stream is open.
    """

    def __init__(self, streams: Sequence[AsyncIterator[RequestOutput]]) -> None:
        self._streams = streams
        self._events: asyncio.Queue[Event | KVTierError | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._pump(at, stream)) for at, stream in enumerate(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def events(self) -> AsyncIterator[Event]:
        """All events, as they come.

        Raises:
            KVTierError: a prompt was refused, or the engine failed.
        """
        running = len(self._streams)
        while running:
            item = await self._events.get()
            if isinstance(item, KVTierError):
                raise item
            if item is None:
                running -= 1
            else:
                yield item

    async def _pump(self, prompt: int, stream: AsyncIterator[RequestOutput]) -> None:
        # A cancellation arrives in the stream's own await: it aborts its request.
        try:
            async for output in stream:
                self._events.put_nowait(Event(prompt, output))
            self._events.put_nowait(None)
        except KVTierError as error:
            self._events.put_nowait(error)
