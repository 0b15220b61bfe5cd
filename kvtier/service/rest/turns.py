"""Turns: how many calls of one tenant run at a time in the threads that all tenants share."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

from fastapi import Request

from kvtier.service.cache import ServiceError
from kvtier.service.rest.guards import caller_of

__all__ = ["Turns"]

# Of the 40 threads that the framework has for routes that wait.
_MOST = 8
_RETRY_SECONDS = 5.0


class Turns:
    """A dependency of routes that wait in a thread, so that no tenant has all of these. For one event loop.

    A call beyond the eighth of its tenant waits in the loop, where it holds up nobody else.

    Args:
        patience: seconds that a call waits for its turn.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._tenants: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_MOST))

    async def __call__(self, request: Request) -> AsyncIterator[None]:
        """Hold a turn while the route runs.

        Raises:
            ServiceError: busy.
        """
        turn = self._tenants[caller_of(request.scope).tenant]
        try:
            async with asyncio.timeout(self._patience):
                await turn.acquire()
        except TimeoutError:
            raise ServiceError(
                "busy",
                f"{_MOST} calls of this tenant wait for tiers already: at most so many at a time; try again later",
                retry_after=_RETRY_SECONDS,
            ) from None
        try:
            yield
        finally:
            turn.release()
