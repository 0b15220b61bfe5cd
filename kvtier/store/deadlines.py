"""Deadlines: every operation ends, whether its tiers answer or not."""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from kvtier.errors import RequestError
from kvtier.store.lanes import Alarm, Lane, Operation, Steps
from kvtier.store.port import Port

__all__ = ["Deadlines"]

_T = TypeVar("_T")
# Thirty years, in place of infinity: no thread can wait for longer than it can say.
_LONGEST = 1e9


class _Expiring(Protocol):
    @property
    def over(self) -> bool: ...

    def expire(self) -> None: ...


class Deadlines:
    """Starts operations and ends those that are late. Thread-safe.

    Args:
        ports: whose tiers are blamed.
        seconds: deadline of operations that were given none.
    """

    def __init__(self, ports: Sequence[Port], seconds: float) -> None:
        self._port_of = {lane: port for port in ports for lane in (port.lookups, port.loads)}
        self._seconds = seconds
        self._alarm = Alarm()

    def absolute(self, deadline: float | None) -> float:
        """The deadline, or the default one from now, in `time.monotonic()` seconds.

        Raises:
            RequestError: it is no time at all.
        """
        if deadline is not None and math.isnan(deadline):
            raise RequestError(f"deadline {deadline}: expected `time.monotonic()` seconds, or None for the default")
        now = time.monotonic()
        return now + self._seconds if deadline is None else min(deadline, now + _LONGEST)

    def run(self, name: str, steps: Steps[_T], otherwise: Callable[[], _T], deadline: float) -> "Future[_T]":
        """Start an operation; at its deadline its result is `otherwise()`."""
        operation = Operation(steps, otherwise, self.blaming(name, deadline))
        future = operation.start()
        self.watch(operation, deadline)
        return future

    def blaming(self, name: str, deadline: float) -> Callable[[Lane], None]:
        """For an operation that begins now: whom to tell that it was late while it was in a lane, or waited for it."""
        patience = deadline - time.monotonic()

        def blame(lane: Lane) -> None:
            self._port_of[lane].timed_out(name, deadline, patience)

        return blame

    def watch(self, work: _Expiring, deadline: float) -> None:
        """Have something expire at its deadline, if it is still there then."""
        # Not the work itself: what is done early must not live until its deadline.
        later = weakref.ref(work)

        def expire() -> None:
            late = later()
            if late is not None:
                late.expire()

        def wanted() -> _Expiring | None:
            work = later()
            return None if work is None or work.over else work

        self._alarm.at(deadline, expire, wanted)

    def after(self, seconds: float, call: Callable[[], object], wanted: Callable[[], object] = lambda: True) -> None:
        """Call after so many seconds; not at all once closed, and perhaps not once `wanted` says None."""
        self._alarm.at(time.monotonic() + min(seconds, _LONGEST), call, wanted)

    def close(self) -> None:
        """Nothing expires any more. Idempotent."""
        self._alarm.close()
