"""Work that ends when there is nobody left to do it for, or with."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

__all__ = ["Gone", "left", "unless", "while_connected"]

T = TypeVar("T")


class Gone(Exception):
    """What the work needed is not there any more."""


async def unless(work: Coroutine[Any, Any, T], *gone: Coroutine[Any, Any, object]) -> T:
    """Run `work` to its end, or until one of `gone` ends, which cancels it.

    Raises:
        Gone: it was cancelled.
    """
    job = asyncio.create_task(work)
    tasks = [job, *map(asyncio.create_task, gone)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise Gone
        return job.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end, or until the client goes away, which cancels it; returns whether it ended."""
    try:
        await unless(work, left(receive))
    except Gone:
        return False
    return True


async def left(receive: Receive) -> None:
    """Wait until the client goes away, which has sent its whole request."""
    while (await receive())["type"] != "http.disconnect":
        pass
