"""Work that ends when there is nobody left to do it for, or with."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

__all__ = ["Gone", "unless", "while_connected"]

T = TypeVar("T")


class Gone(Exception):
    """What the work needed is not there any more."""


async def unless(gone: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, or until `gone` ends, which cancels it.

    Raises:
        Gone: it was cancelled.
    """
    job, end = asyncio.create_task(work), asyncio.create_task(gone)
    try:
        await asyncio.wait((job, end), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise Gone
        return job.result()
    finally:
        job.cancel()
        end.cancel()
        await asyncio.gather(job, end, return_exceptions=True)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end, or until the client goes away, which cancels it; returns whether it ended."""
    try:
        await unless(_left(receive), work)
    except Gone:
        return False
    return True


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
