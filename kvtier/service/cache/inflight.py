"""InFlight: how many bytes the calls of one tenant hold."""

import threading

from kvtier.service.cache.errors import ServiceError

__all__ = ["InFlight"]

_RETRY_SECONDS = 0.5


class InFlight:
    """A bounded sum. Thread-safe. One per tenant, so that nobody makes another one wait.

    Args:
        limit: bytes; may be set anew, for what is taken from then on.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self.nbytes = 0

    def take(self, nbytes: int) -> None:
        """Add to the sum.

        Raises:
            ServiceError: busy: it would exceed the limit.
        """
        with self._lock:
            if self.nbytes + nbytes > self.limit:
                raise ServiceError(
                    "busy",
                    f"{nbytes} bytes beside {self.nbytes} that are in flight: at most {self.limit}; close readings, "
                    "or try again later",
                    retry_after=_RETRY_SECONDS,
                )
            self.nbytes += nbytes

    def give(self, nbytes: int) -> None:
        """Subtract what was added."""
        with self._lock:
            self.nbytes -= nbytes
