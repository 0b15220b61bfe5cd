"""Results of the store's futures, for callers that must never see an exception."""

import logging
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

__all__ = ["done", "settled", "settles"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_U = TypeVar("_U")


def done(result: _T) -> "Future[_T]":
    """A future that has it already."""
    future: Future[_T] = Future()
    future.set_result(result)
    return future


def settled(future: "Future[_T]", otherwise: _U) -> "_T | _U":
    """The result of a finished future; `otherwise`, with a logged traceback, if its work died."""
    error = future.exception()
    if error is None:
        return future.result()
    _log.error("store operation failed and counts as a miss", exc_info=error)
    return otherwise


def settles(future: "Future[_T]", seconds: float) -> bool:
    """Whether a future is finished, or will be within so many seconds, for which it is waited."""
    if not future.done() and seconds > 0:
        with suppress(TimeoutError):
            future.exception(seconds)
    return future.done()
