"""Work that ends when the client goes away."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive

__all__ = ["while_connected"]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end, or until the client goes away, which cancels it; returns whether it ended."""
    job, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((job, gone), return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            job.result()
        return job.done()
    finally:
        job.cancel()
        gone.cancel()
        await asyncio.gather(job, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
