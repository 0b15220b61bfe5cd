"""The time of a replay: the trace's, not the machine's."""

import time

from kvtier.errors import ConfigError

__all__ = ["TraceClock"]


class TraceClock:
    """A clock that policies, hints and simulated tiers read, in seconds since the trace began.

    Args:
        scale: how many times faster than the trace the replay runs, by sleeping; None: as fast as it can.
    """

    def __init__(self, scale: float | None = None) -> None:
        if scale is not None and not scale > 0:
            raise ConfigError(f"time-scale {scale:g}: expected a factor above 0; 1 is the trace's own pace")
        self._scale = scale
        self._begin = time.monotonic()
        self._now = 0.0

    def __call__(self) -> float:
        """Seconds since the trace began."""
        return self._now

    def advance(self, at: float) -> None:
        """It is now `at`, if it was not later already."""
        if self._scale is not None:
            time.sleep(max(0.0, self._begin + at / self._scale - time.monotonic()))
        self._now = max(self._now, at)
