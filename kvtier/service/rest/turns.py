"""Turns: how many calls wait in threads at a time, for whom, and how many threads that takes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio.to_thread import current_default_thread_limiter
from fastapi import Request

from kvtier.service.cache import ServiceError
from kvtier.service.rest.guards import caller_of

__all__ = ["Turns"]

_MOST = 8
# For what takes no turn, since it waits for no tier: metrics, the document.
_OTHER_THREADS = 8
_ADMINS = ""  # no tenant's name
_RETRY_SECONDS = 5.0


class Turns:
    """Dependencies of routes that wait in a thread: each tenant has some of its own, and so have all admins together.

    The framework has one pool of threads for all routes, which is made as large as that takes. So whatever tenants
    wait for holds up no other tenant, no admin and no metrics. A call beyond the eighth waits in the loop. For one
    event loop.

    Args:
        patience: seconds that a call waits for its turn.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def of_tenant(self, request: Request) -> AsyncIterator[None]:
        """Hold a turn of the caller's tenant while the route runs.

        Raises:
            ServiceError: busy.
        """
        async with self._held(caller_of(request.scope).tenant, "this tenant"):
            yield

    async def of_admins(self) -> AsyncIterator[None]:
        """Hold one of the admins' turns while the route runs.

        Raises:
            ServiceError: busy.
        """
        async with self._held(_ADMINS, "admins"):
            yield

    @asynccontextmanager
    async def _held(self, whose: str, shown: str) -> AsyncIterator[None]:
        turn = self._turns.get(whose)
        if turn is None:
            turn = self._turns[whose] = asyncio.Semaphore(_MOST)
            current_default_thread_limiter().total_tokens = _OTHER_THREADS + _MOST * len(self._turns)
        try:
            async with asyncio.timeout(self._patience):
                await turn.acquire()
        except TimeoutError:
            raise ServiceError(
                "busy",
                f"{_MOST} calls of {shown} wait for tiers already: at most so many at a time; try again later",
                retry_after=_RETRY_SECONDS,
            ) from None
        try:
            yield
        finally:
            turn.release()
