"""Places: connections and requests, shared among tenants so that some are left for whoever has none."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.service.cache.errors import ServiceError

__all__ = ["Places"]

_SHARE = 3
_RETRY_SECONDS = 1.0


class Places:
    """Thread-safe.

    A tenant gets one place more while it has fewer than three times as many as are free (Choudhury and Hahne, "Dynamic
    queue length thresholds for shared-memory packet switches", 1998). So a tenant that is alone has three quarters of
    them, of k tenants that want all each has 3 of 3 k + 1, and the rest is for those that have none.

    Args:
        most: places.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Have a place.

        Raises:
            ServiceError: busy.
        """
        with self._lock:
            own, free = self._taken[tenant], self._most - self._taken.total()
            if free <= 0 or own >= _SHARE * free:
                raise ServiceError(
                    "busy",
                    f"this tenant has {own} of {self._most} connections, and {free} are left for all: close some, or "
                    "raise service.max_connections",
                    retry_after=_RETRY_SECONDS,
                )
            self._taken[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[tenant] -= 1
                if not self._taken[tenant]:
                    del self._taken[tenant]
