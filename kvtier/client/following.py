"""Following: the event stream, resumed where it broke, with what was lost said."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator

from kvtier.client.async_http import AsyncHttpCaller
from kvtier.client.errors import Busy, ClientError, DeadlineExceeded, Interrupted, ProtocolError, Unreachable
from kvtier.client.http import HttpCaller
from kvtier.client.options import ClientOptions
from kvtier.client.results import Event, Gap
from kvtier.client.sse import Message, Messages

__all__ = ["Following"]

_PATH = "/v1/events"


class Following:
    """One follower: where it is, and how long it waits before it comes back.

    Args:
        options: see `ClientOptions`.
        since: id of the last event that is known; None: from now on.
        patience: seconds without a connection after which it gives up.
    """

    def __init__(self, options: ClientOptions, since: str | None, patience: float) -> None:
        self._options = options
        self._last = since
        self._patience = patience
        self._failures = 0
        self._lost_at = time.monotonic()

    def events(self, caller: HttpCaller, silence: float) -> Iterator[Event | Gap]:
        """What becomes of blocks, for ever."""
        while True:
            try:
                with caller.stream(_PATH, self._params(), silence) as response:
                    messages = self._begin()
                    for line in response.iter_lines():
                        yield from self._take(messages, line)
            except ClientError as error:
                time.sleep(self._pause(error))
            else:
                time.sleep(self._pause(Interrupted("the event stream ended")))

    async def async_events(self, caller: AsyncHttpCaller, silence: float) -> AsyncIterator[Event | Gap]:
        """The same, for asyncio."""
        while True:
            try:
                async with caller.stream(_PATH, self._params(), silence) as response:
                    messages = self._begin()
                    async for line in response.aiter_lines():
                        for event in self._take(messages, line):
                            yield event
            except ClientError as error:
                await asyncio.sleep(self._pause(error))
            else:
                await asyncio.sleep(self._pause(Interrupted("the event stream ended")))

    def _params(self) -> dict[str, str]:
        return {} if self._last is None else {"since": self._last}

    def _begin(self) -> Messages:
        self._failures = 0
        return Messages()

    def _take(self, messages: Messages, line: str) -> Iterator[Event | Gap]:
        try:
            for message in messages.take(line):
                self._last = message.id or self._last
                yield _event(message)
        except (ValueError, LookupError, TypeError) as error:
            raise ProtocolError(f"an event that is none ({error}): is this a kvtier service?") from error

    def _pause(self, error: ClientError) -> float:
        """Seconds until it comes back; raises `error` where that would be in vain."""
        if not isinstance(error, Busy | DeadlineExceeded | Interrupted | Unreachable):
            raise error
        now = time.monotonic()
        if not self._failures:
            self._lost_at = now
        elif now - self._lost_at > self._patience:
            raise error
        self._failures += 1
        widest = min(self._options.backoff * 2.0 ** min(self._failures, 16), self._options.longest_backoff)
        asked = error.retry_after if isinstance(error, Busy) else None
        return random.random() * widest + (asked or 0.0)  # noqa: S311 - spreads load, keeps no secret


def _event(message: Message) -> Event | Gap:
    data = json.loads(message.data)
    if message.event == "gap":
        return Gap(message.id, int(data["sequence"]))
    return Event(
        id=message.id,
        sequence=int(data["sequence"]),
        time=float(data["time"]),
        kind=message.event,
        tier=data["tier"],
        namespace=data.get("namespace"),
        part=int(data.get("part") or 0),
        keys=tuple(bytes.fromhex(key) for key in data["keys"]),
        reason=data["reason"],
    )
