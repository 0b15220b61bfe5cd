"""Calls: what is under way, how it ends, and the refusal of what comes while the service drains."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from kvtier.errors import BlocksRemain, ConfigError, FormatMismatch, LeaseError, RequestError, TierUnavailable
from kvtier.service.cache.callers import Caller
from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.telemetry import Telemetry

__all__ = ["Calls"]

_T = TypeVar("_T")
_RETRY_SECONDS = 5.0
_SOON_SECONDS = 1.0


class Calls:
    """Every call of every port passes here. Thread-safe.

    Args:
        telemetry: counts them.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._changed = threading.Condition()
        self.underway = 0
        self.draining = False

    @contextmanager
    def call(self, verb: str, caller: Caller, *, always: bool = False) -> Iterator[None]:
        """One call that ends with the block; `always`: while draining, too.

        Raises:
            ServiceError: draining; invalid, for what the store refuses of a caller's values; timeout or unavailable,
                where blocks that were to go remain in a tier.
        """
        start = time.perf_counter()
        outcome = "ok"
        self._begin(verb, caller, always=always)
        try:
            yield
        except BaseException as error:
            told = _told(error)
            outcome = _outcome(told)
            if told is error:
                raise
            raise told from error
        finally:
            self._end(verb, caller, outcome, start)

    def future(self, verb: str, caller: Caller, start: Callable[[], "Future[_T]"]) -> "Future[_T]":
        """One call that ends with the future that `start` returns.

        Raises:
            ServiceError: see `call`; of the future: what it ends with.
        """
        began = time.perf_counter()
        self._begin(verb, caller, always=False)
        try:
            future = start()
        except BaseException as error:
            told = _told(error)
            self._end(verb, caller, _outcome(told), began)
            if told is error:
                raise
            raise told from error
        future.add_done_callback(partial(self._done, verb, caller, began))
        return future

    def _done(self, verb: str, caller: Caller, began: float, future: "Future[object]") -> None:
        error = future.exception()
        self._end(verb, caller, "ok" if error is None else _outcome(error), began)

    def _begin(self, verb: str, caller: Caller, *, always: bool) -> None:
        with self._changed:
            if self.draining and not always:
                self._telemetry.called(verb, "draining", caller.tenant, 0.0)
                raise ServiceError(
                    "draining", "the service is about to stop: ask another one, or later", retry_after=_RETRY_SECONDS
                )
            self.underway += 1

    def _end(self, verb: str, caller: Caller, outcome: str, began: float) -> None:
        self._telemetry.called(verb, outcome, caller.tenant, time.perf_counter() - began)
        with self._changed:
            self.underway -= 1
            self._changed.notify_all()

    def drain(self) -> None:
        """Refuse what comes."""
        with self._changed:
            self.draining = True

    def resume(self) -> None:
        """Undo `drain`."""
        with self._changed:
            self.draining = False

    def wait(self, timeout: float) -> bool:
        """Until nothing is under way, `timeout` seconds at most; whether nothing is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.underway, timeout)


def _told(error: BaseException) -> BaseException:
    """The error as a caller is told it."""
    if isinstance(error, RequestError | FormatMismatch | ConfigError):
        return ServiceError("invalid", str(error))
    if isinstance(error, TierUnavailable):
        return ServiceError("draining", str(error), retry_after=_RETRY_SECONDS)
    if isinstance(error, BlocksRemain):
        return ServiceError("timeout" if error.late else "unavailable", str(error), retry_after=_SOON_SECONDS)
    return error


def _outcome(error: BaseException) -> str:
    if isinstance(error, LeaseError):
        # Whoever it was for has gone, and what it held with it.
        return "gone"
    return error.code if isinstance(error, ServiceError) else "error"
