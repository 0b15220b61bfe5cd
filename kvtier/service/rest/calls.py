"""What routes have in common: the service behind them, the caller, futures of the cache, deadlines."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

from fastapi import Depends, Path, Request, params
from starlette.convertors import StringConvertor, register_url_convertor  # codespell:ignore convertors

from kvtier.config import ServiceSettings
from kvtier.service.cache import Cache, Caller, Reading
from kvtier.service.rest.guards import caller_of
from kvtier.service.rest.heads import KEY_PATTERN, NAME_PATTERN
from kvtier.service.rest.memory import BufferPool

__all__ = ["CallerOf", "Id", "Key", "Ns", "Service", "deadline", "opened", "settled"]

_T = TypeVar("_T")


class _Part(StringConvertor):
    """A name in a path, which a verb may follow after a colon."""

    regex = "[^/:]+"


# Routes write it `{ns:part}`.
register_url_convertor("part", _Part())


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes serve.

    Args:
        cache: does it.
        settings: its limits.
        pool: memory of bodies on their way in.
        turn, admin_turn: dependencies of routes that wait in a thread, see `Turns`.
    """

    cache: Cache
    settings: ServiceSettings
    pool: BufferPool
    turn: params.Depends
    admin_turn: params.Depends


async def _caller(request: Request) -> Caller:
    return caller_of(request.scope)


CallerOf: TypeAlias = Annotated[Caller, Depends(_caller)]
Ns: TypeAlias = Annotated[str, Path(pattern=NAME_PATTERN, description="A namespace", examples=["smollm2"])]
Key: TypeAlias = Annotated[
    str,
    Path(pattern=KEY_PATTERN, description="A chain key in hex", examples=["3f1ae6c08d6c5f4b9d0c5f0e7b1a2c3d"]),
]
Id: TypeAlias = Annotated[str, Path(pattern=NAME_PATTERN, description="As it was given out")]


def deadline(timeout: float | None) -> float | None:
    """Absolute seconds, from those that a client gave."""
    return None if timeout is None else time.monotonic() + timeout


async def opened(future: "Future[Reading]") -> Reading:
    """The reading, once it is there; it is closed if nobody waits for it any more."""
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        future.add_done_callback(_close)
        raise


def _close(future: "Future[Reading]") -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


async def settled(future: "Future[_T]", then: Callable[[], None]) -> _T:
    """What a future comes to; `then` is called once it is over, also where nobody waits for it any more."""
    loop = asyncio.get_running_loop()
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    finally:
        if future.done():
            then()
        else:
            future.add_done_callback(lambda _: loop.call_soon_threadsafe(then))
