"""A circuit breaker: a tier or server that does not answer in time is left alone for a while."""

import math
import threading
from collections.abc import Callable

__all__ = ["Breaker"]

_LONGEST_PAUSE = 16


class Breaker:
    """Closed, until `threshold` failures in a row open it; then one trial per pause until one succeeds.

    Args:
        threshold: failures in a row that open it; infinity: nothing does.
        pause: seconds until the first trial; doubled at every failed one, up to sixteen times as long.
        clock: monotonic seconds.
    """

    def __init__(self, threshold: float, pause: float, clock: Callable[[], float]) -> None:
        self._threshold = threshold
        self._first_pause = pause
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = pause
        self._next_trial = 0.0
        self._on_trial = False

    @property
    def is_open(self) -> bool:
        """Whether it is being left alone, trials excepted."""
        return self._failures >= self._threshold

    @property
    def due(self) -> bool:
        """Whether it is closed, or a trial is due: worth an index probe, which is no trial itself."""
        return not self.is_open or self._clock() >= self._next_trial

    def allows(self) -> bool:
        """Whether to use it now. While open, one call per pause is told yes: the trial."""
        with self._lock:
            now = self._clock()
            if not self.is_open:
                return True
            if now < self._next_trial:
                return False
            self._next_trial = now + self._pause
            self._on_trial = True
            return True

    def failed(self) -> bool:
        """It did not answer in time. Returns whether that opened the breaker.

        What was under way when it opened, and what uses it without asking, puts no trial off.
        """
        with self._lock:
            was_open, now = self.is_open, self._clock()
            self._failures += 1
            if was_open and (self._on_trial or now >= self._next_trial):
                self._pause = min(2 * self._pause, _LONGEST_PAUSE * self._first_pause)
            elif was_open or not self.is_open:
                return False
            self._on_trial = False
            self._next_trial = now + self._pause
            return not was_open

    def answered(self) -> None:
        """It answers, which says nothing of its bytes so far: closed until one more failure, the pause as it was."""
        with self._lock:
            if self.is_open:
                self._failures = math.ceil(self._threshold) - 1
                self._on_trial = False

    def succeeded(self) -> None:
        """It did its work in time."""
        if self._failures:
            with self._lock:
                self._failures = 0
                self._on_trial = False
                self._pause = self._first_pause
