"""A tier as the store uses it: in its own threads, with a breaker, a speed meter and counters; failures are misses."""

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from kvtier.breaker import Breaker
from kvtier.cost import SpeedMeter
from kvtier.errors import KVTierError, TierError, TierTimeout
from kvtier.metrics import Metrics
from kvtier.store.gateway import GatewayTier
from kvtier.store.lanes import Lane
from kvtier.store.lookup import present
from kvtier.store.options import StoreOptions
from kvtier.store.staging import Staging
from kvtier.tiers import USED_ELSEWHERE, Handle, Owner, Status, Tier, expired

__all__ = ["Port"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Loads of one tier at a time. More only queue inside the tier.
_LOAD_THREADS = 4
_LOOKUP_THREADS = 2
# Asked for at a time: as many as a server that lives answers for within `TierCaps.probe`, also one written in Python.
_ROUND_TRIP_KEYS = 256
_QUIET_SECONDS = 10.0


class Port:
    """One tier of a store. Thread-safe.

    Args:
        tier: what it guards.
        options, metrics, clock: the store's.
        memory: the tier again, if it is host memory: what it acquires it has read and verified; it does not hang, and
            nothing works without it.
    """

    def __init__(
        self,
        tier: Tier,
        options: StoreOptions,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        memory: GatewayTier | None = None,
    ) -> None:
        self.tier = tier
        self.name = tier.name
        # Look-ups have threads of their own: a disk that hangs does not keep anybody from learning what is there.
        self.lookups = Lane(f"kvtier-lookup-{tier.name}", _LOOKUP_THREADS)
        self.loads = Lane(f"kvtier-load-{tier.name}", _LOAD_THREADS)
        self.breaker = Breaker(
            math.inf if memory is not None else options.breaker_timeouts, options.breaker_pause, clock
        )
        self.reads = SpeedMeter()
        self.writes = SpeedMeter()
        self.staging = Staging(options.staging_bytes)
        self._memory = memory
        self._probed = _ROUND_TRIP_KEYS if tier.caps.remote else sys.maxsize
        self._missed: deque[float] = deque(maxlen=64)
        self._quiet_until: dict[str, float] = {}
        self._metrics = metrics
        self._patience = options.load_deadline

    def usable(self, *, trial: bool = True) -> bool:
        """Whether to look here now; a refusal is counted.

        Args:
            trial: it is a request's own work, which may be the trial of a tier that is being left alone.
        """
        allowed = self.breaker.allows() if trial else not self.breaker.is_open
        if not allowed:
            self._metrics.skipped.labels(self.name).inc()
        return allowed

    def present(self, keys: Sequence[bytes], *, exact: bool) -> list[bool]:
        """Which keys are here: an index probe in the caller's thread; a tier that is being left alone has none.

        Of a remote tier that is a round trip, or several for many keys, each of which has `TierCaps.probe`.
        """
        memory = self._memory
        if memory is not None:
            # In one step, without a ticket.
            return self.attempt(
                "match",
                lambda: [ref is not None and (ref.exact or not exact) for ref in memory.refs(keys)],
                [False] * len(keys),
            )
        here: list[bool] = []
        while len(here) < len(keys) and self.breaker.due:
            some = keys[len(here) : len(here) + self._probed]
            here += self._probe(some, exact=exact)
        return here + [False] * (len(keys) - len(here))

    def _probe(self, keys: Sequence[bytes], *, exact: bool) -> list[bool]:
        return self.attempt(
            "match", lambda: present(self.tier, keys, self.tier.caps.probe, exact=exact), [False] * len(keys)
        )

    def acquire(
        self,
        keys: Sequence[bytes],
        owner: Owner,
        deadline: float | None = None,
        *,
        exact: bool = False,
        checked: bool = True,
    ) -> tuple[Handle, ...]:
        """Lease the leading run; see `Tier.acquire` and, where it need not be checked here, `GatewayTier.lease`."""
        if expired(deadline):
            return ()
        start = time.perf_counter()
        memory = self._memory
        take = self.tier.acquire if checked or memory is None else memory.lease
        done = self.attempt("acquire", lambda: take(keys, owner, deadline, exact=exact).wait(), None)
        if done is None:
            return ()
        if memory is not None and checked:
            self.reads.observe(sum(handle.nbytes for handle in done.handles), time.perf_counter() - start)
        if Status.TIMEOUT in done.statuses:
            self.timed_out("acquire", deadline, time.perf_counter() - start)
        elif done.handles and self.tier.caps.remote:
            # The server has answered, even if nobody goes on to read. Of a disk, only the index has.
            self.breaker.answered()
        return done.handles

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None) -> tuple[Status, ...]:
        """Copy leased records; waits for the tier, however long that takes: the buffers are its until then."""
        if expired(deadline):
            return (Status.TIMEOUT,) * len(items)
        start = time.perf_counter()
        statuses = self.tier.read(items, deadline).wait().statuses
        if Status.TIMEOUT in statuses:
            self.timed_out("read", deadline, time.perf_counter() - start)
        if Status.OK in statuses:
            arrived = zip(items, statuses, strict=True)
            nbytes = sum(handle.nbytes for (handle, _), status in arrived if status is Status.OK)
            self.reads.observe(nbytes, time.perf_counter() - start)
            if Status.TIMEOUT not in statuses:
                self.breaker.succeeded()
        return statuses

    def release(self, handles: Sequence[Handle]) -> None:
        """End leases; a tier that failed meanwhile has ended them already."""
        if handles:
            self.attempt("release", lambda: self.tier.release(handles), None)

    def renew(self, keys: Sequence[bytes]) -> tuple[Handle, ...]:
        """The leading run was used elsewhere: leased and given back, it is recent, and nobody's hit. What there is."""
        if not self.breaker.due:
            return ()
        found = self.acquire(keys, USED_ELSEWHERE, checked=False)
        self.release(found)
        return found

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Drop records; which of them were there.

        Raises:
            KVTierError: the tier failed, or did not answer in time, which is counted: any of them may still be there.
        """
        try:
            statuses = self.tier.remove(keys).wait(self._patience).statuses
            _require_answers("remove", statuses)
        except KVTierError as error:
            self._failed("remove", error)
            raise
        return [status is Status.OK for status in statuses]

    def take_back(self, keys: Sequence[bytes]) -> None:
        """Drop what arrived although it was deleted on its way; a failure is counted."""
        if keys:
            with suppress(KVTierError):
                self.remove(keys)

    def clear(self, ns: int | Collection[int] | None) -> None:
        """Remove every record of one or several namespaces, or of all (None).

        Raises:
            KVTierError: see `remove`.
        """
        error = self.patiently("clear", lambda: _require_answers("clear", self.tier.clear(ns).wait().statuses))
        if error is not None:
            raise error

    def timed_out(self, operation: str, deadline: float | None = None, patience: float = math.inf) -> None:
        """An operation on this tier missed its deadline; whoever notices it first says so.

        Args:
            operation: what it did.
            deadline: which one it was.
            patience: seconds that it had. A tier that nobody could have answered for in time is not skipped for it.
        """
        if deadline is not None:
            if deadline in self._missed:
                return
            self._missed.append(deadline)
        self._metrics.timeouts.labels(self.name, operation).inc()
        if patience >= self.tier.caps.probe and self.breaker.failed():
            self._metrics.breaker_trips.labels(self.name).inc()
            _log.warning("tier %s did not answer in time and is skipped for a while", self.name)

    def fell_back(self, what: str) -> None:
        """Count a slower or larger way that was taken."""
        self._metrics.fallbacks.labels(self.name, what).inc()

    def close(self, timeout: float) -> bool:
        """End its threads; False: the tier hangs. Idempotent."""
        return self.lookups.close(timeout) and self.loads.close(timeout)

    def patiently(self, operation: str, call: Callable[[], object]) -> KVTierError | None:
        """Make a rare call that may hang, in a thread of its own, and wait for it as long as for any load.

        Returns:
            Why it was not done, which is counted; None: it was.
        """
        errors: list[KVTierError | None] = []

        def run() -> None:
            try:
                call()
            except KVTierError as error:
                self._failed(operation, error)
                errors.append(error)
            else:
                errors.append(None)

        thread = threading.Thread(target=run, name=f"kvtier-{operation}-{self.name}", daemon=True)
        thread.start()
        thread.join(self._patience)
        if thread.is_alive():
            self.timed_out(operation)
            return TierTimeout(f"{operation} not done within {self._patience:g} s; it goes on")
        # A defect of the tier ended the thread, which told it.
        return errors[0] if errors else TierError(f"{operation} died")

    def attempt(self, operation: str, call: Callable[[], _T], otherwise: _T) -> _T:
        """The call's result, or `otherwise` if the tier fails, which is counted."""
        try:
            return call()
        except KVTierError as error:
            self._failed(operation, error)
        return otherwise

    def _failed(self, operation: str, error: KVTierError) -> None:
        if isinstance(error, TierTimeout):
            self.timed_out(operation)
            return
        self._metrics.errors.labels(self.name, operation).inc()
        _log.log(self._loudness(operation), "%s on tier %s failed: %s", operation, self.name, error)

    def _loudness(self, operation: str) -> int:
        """A tier that keeps failing is worth a warning now and then; the counter has them all."""
        now = time.monotonic()
        if now < self._quiet_until.get(operation, 0.0):
            return logging.DEBUG
        self._quiet_until[operation] = now + _QUIET_SECONDS
        return logging.WARNING

    def drop(self, reason: str, count: int) -> None:
        """Count blocks that this tier did not take."""
        if count:
            self._metrics.dropped_blocks.labels(self.name, reason).inc(count)


def _require_answers(operation: str, statuses: Sequence[Status]) -> None:
    if Status.TIMEOUT in statuses:
        raise TierTimeout(f"{operation} not done in time")
