"""Line: an address and its breaker."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier.breaker import Breaker
from kvtier.client.errors import ClientError, DeadlineExceeded, Interrupted, Unreachable
from kvtier.client.options import ClientOptions

__all__ = ["Line"]

# Nobody is left alone for not answering in no time.
_PATIENCE = 0.05


class Line:
    """An address and its breaker."""

    def __init__(self, address: str, options: ClientOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self.breaker = Breaker(options.breaker_failures, options.breaker_pause, clock)
        self._failure = ""

    @contextmanager
    def attempt(self, patience: float) -> Iterator[None]:
        """One attempt, of whose end the breaker learns.

        A refusal is an answer, and so is damage: somebody is there.

        Args:
            patience: seconds that the call has.

        Raises:
            Unreachable: the address is being left alone.
        """
        if not self.breaker.allows():
            raise Unreachable(
                f"{self.address} failed lately and is left alone for a while; the last time: {self._failure}"
            )
        try:
            yield
        except (Interrupted, Unreachable) as error:
            self._failed(error)
            raise
        except DeadlineExceeded as error:
            if patience >= _PATIENCE:
                self._failed(error)
            raise
        except ClientError:
            self.breaker.succeeded()
            raise
        self.breaker.succeeded()

    def _failed(self, error: ClientError) -> None:
        self._failure = str(error)
        self.breaker.failed()
