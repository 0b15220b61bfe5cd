"""Whether a call is tried again, and when. No sockets, no sleeping: both clients do that their own way."""

import random
import time
from collections.abc import Callable

from kvtier.client.errors import (
    Busy,
    ClientError,
    DeadlineExceeded,
    Interrupted,
    ServerTimeout,
    Unreachable,
    WrongDigest,
)
from kvtier.client.options import ClientOptions

__all__ = ["Attempts"]


class Attempts:
    """One call's attempts.

    Args:
        options: see `ClientOptions`.
        timeout: seconds that the call may take; None: as the options say.
        idempotent: whether the call may be made twice.
        clock: monotonic seconds.
        chance: uniform in [0, 1).
    """

    def __init__(
        self,
        options: ClientOptions,
        timeout: float | None = None,
        *,
        idempotent: bool,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._options = options
        self._left = options.attempts if idempotent else 1
        self._made = 0
        self._damaged = False
        self._clock = clock
        self._chance = chance
        self.timeout = options.timeout if timeout is None else timeout
        self.deadline = clock() + self.timeout

    def remaining(self) -> float:
        """Seconds that are left of the call.

        Raises:
            DeadlineExceeded: none.
        """
        left = self.deadline - self._clock()
        if left <= 0:
            raise DeadlineExceeded(
                f"no answer within {self.timeout} s: give the call more time, or look at the service"
            )
        return left

    def pause(self, error: ClientError) -> float:
        """Seconds to wait after an attempt that failed; raises `error` where another would be in vain.

        A server that says when to come back (Retry-After) is taken at its word; else the pause is drawn from
        [0, backoff * 2^n), so that clients that failed together do not come back together.
        """
        self._made += 1
        if self._made >= self._left or not self._worth(error):
            raise error
        widest = min(self._options.backoff * 2.0 ** (self._made - 1), self._options.longest_backoff)
        seconds = self._chance() * widest
        if isinstance(error, Busy) and error.retry_after is not None:
            seconds += error.retry_after
        if self._clock() + seconds >= self.deadline:
            raise error
        return seconds

    def _worth(self, error: ClientError) -> bool:
        if isinstance(error, WrongDigest):
            # Damage on the way is rare and goes; damage that stays is the service's.
            again, self._damaged = not self._damaged, True
            return again
        return isinstance(error, Busy | Interrupted | ServerTimeout | Unreachable)
