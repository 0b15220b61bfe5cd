"""Who is let in: a bounded number of sequences, and none while the server drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.server.errors import ApiError

__all__ = ["Admission"]

_RETRY_SECONDS = 1


class Admission:
    """Counts the sequences under way. For one event loop.

    Args:
        limit: sequences that may be under way at a time, running and waiting ones together.
        drain_seconds: how long draining may take; what a client is told to wait before it comes back.
    """

    def __init__(self, limit: int, drain_seconds: float) -> None:
        self.limit = limit
        self.refused = 0
        self._drain_seconds = drain_seconds
        self._draining = False
        self._inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """Whether nobody is let in any more."""
        return self._draining

    @property
    def inflight(self) -> int:
        """Sequences under way."""
        return self._inflight

    @contextmanager
    def hold(self, sequences: int) -> Iterator[None]:
        """Room for a request's sequences, as long as the context lasts.

        Raises:
            ApiError: 503 while draining, 429 while there is no room, 400 where there never will be.
        """
        self.check(sequences)
        self._inflight += sequences
        self._idle.clear()
        try:
            yield
        finally:
            self._inflight -= sequences
            if not self._inflight:
                self._idle.set()

    def check(self, sequences: int) -> None:
        """Whether there is room now, before anything is done for a request.

        Raises:
            ApiError: as `hold` does.
        """
        if self._draining:
            raise ApiError(
                503,
                "this server is shutting down: send the request to another one",
                code="draining",
                headers={"Retry-After": str(round(self._drain_seconds) or 1)},
            )
        if sequences > self.limit:
            raise ApiError(
                400, f"{sequences} sequences (prompts times n): this server takes {self.limit}; split the request"
            )
        if self._inflight + sequences > self.limit:
            self.refused += 1
            raise ApiError(
                429,
                f"{self._inflight} of {self.limit} places are taken, {sequences} more do not fit: try again later",
                code="queue_full",
                headers={"Retry-After": str(_RETRY_SECONDS)},
            )

    async def drain(self) -> None:
        """Let nobody in; returns when all that are under way have ended."""
        self._draining = True
        await self._idle.wait()
