"""Prefetch: blocks are brought into host before a request needs them, and leased by nobody afterwards."""

from collections.abc import Callable
from concurrent.futures import Future

from kvtier.metrics import Metrics
from kvtier.store.lanes import Lane, Operation, Steps
from kvtier.store.lease import Lease
from kvtier.store.leasing import Leases
from kvtier.store.promotion import Promoter
from kvtier.store.results import Deferred, PrefetchResult
from kvtier.tiers import expired

__all__ = ["Prefetch", "prefetch_steps"]


class Prefetch:
    """A prefetch under way. Thread-safe.

    Args:
        steps: the work, see `prefetch_steps`.
        arrived: how many blocks are in host so far.
        metrics: counts outcomes.
        expired: told the lane that it was in when its deadline passed.
    """

    def __init__(
        self,
        steps: Steps[PrefetchResult],
        arrived: Callable[[], int],
        metrics: Metrics,
        expired: Callable[[Lane], None],
    ) -> None:
        self._arrived = arrived
        self._metrics = metrics
        # An operation that finds its lanes closed ends by itself.
        self._reason: Deferred = "closed"
        self._operation = Operation(steps, self._cut_short, expired)
        self.future: Future[PrefetchResult] = self._operation.future

    def start(self) -> None:
        """Begin; for the store."""
        self._operation.start()

    def _cut_short(self) -> PrefetchResult:
        self._metrics.prefetches.labels(self._reason).inc()
        return PrefetchResult(self._arrived(), self._reason)

    @property
    def over(self) -> bool:
        """Whether the result is there, or about to be."""
        return self._operation.over

    def expire(self) -> None:
        """Its deadline has passed; for the store."""
        self._reason = "timeout"
        self._operation.expire()

    def cancel(self) -> None:
        """Stop before the next batch. What has arrived stays in host, without a lease."""
        self._reason = "cancelled"
        self._operation.end()

    def done(self) -> bool:
        """Whether the result is there."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> PrefetchResult:
        """Wait for it.

        Raises:
            TimeoutError: `timeout` seconds passed.
        """
        return self.future.result(timeout)


def prefetch_steps(
    lease: Lease,
    keys: list[bytes],
    leases: Leases,
    promoter: Promoter,
    metrics: Metrics,
    deadline: float | None,
    depth: int = 0,
) -> Steps[PrefetchResult]:
    """Lease what there is, bring it into host, let go of it."""
    try:
        # It may be cancelled before it reads: a request's trial would be used up for nothing.
        yield from leases.steps(lease, keys, deadline, depth, trial=False)
        away = promoter.away(lease)
        fits = yield from promoter.steps(lease, 0, len(lease), deadline)
        arrived = promoter.in_host(lease, 0, len(lease))
        deferred: Deferred | None = None if fits else "no_space"
        if fits and expired(deadline) and arrived < len(keys) // lease.parts:
            deferred = "timeout"
        metrics.prefetches.labels(deferred or "done").inc()
        metrics.prefetched_blocks.inc(away - promoter.away(lease))
        return PrefetchResult(arrived if fits else 0, deferred)
    finally:
        leases.release(lease)
