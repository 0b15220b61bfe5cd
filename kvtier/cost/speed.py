"""How fast a tier is, learned from the transfers that it serves anyway."""

import threading
from typing import NamedTuple

__all__ = ["UNMEASURED", "SpeedMeter", "TierSpeed"]

# Transfers that differ by less than this share of their mean size tell nothing about latency.
_SPREAD = 0.05
# Two transfers in a row that are both slower, or both faster, than expected by this factor: the tier has changed.
_SURPRISE = 2.0


class TierSpeed(NamedTuple):
    """One moment's view of a tier.

    bytes_per_second: None until a transfer was measured. latency_seconds: what a transfer costs beside its bytes.
    queued_bytes: transfers that were started and have not ended.
    """

    bytes_per_second: float | None
    latency_seconds: float
    queued_bytes: int

    def seconds(self, nbytes: int) -> float | None:
        """Expected time of a transfer that starts now, behind what is queued; None if nothing was measured."""
        if self.bytes_per_second is None:
            return None
        return self.latency_seconds + (self.queued_bytes + nbytes) / self.bytes_per_second


UNMEASURED = TierSpeed(None, 0.0, 0)


class _Surprise(NamedTuple):
    """A transfer that took much longer, or shorter, than expected."""

    nbytes: int
    seconds: float
    slower: bool


class SpeedMeter:
    """Measures one tier: seconds = latency + bytes / speed, fitted over a moving window. Thread-safe.

    The fit is least squares with exponentially fading weights. Where two transfers in a row contradict it in the same
    sense, the past before them is forgotten: otherwise a tier that was slow for a while would long be thought to be.
    Latency is only told from speed where sizes differ; otherwise all time counts as transfer.

    Args:
        weight: of the latest transfer, 0..1; 0.2 forgets half of the past within three transfers.
    """

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self._lock = threading.Lock()
        self._queued = 0
        self._surprise: _Surprise | None = None
        self._forget()

    def _forget(self) -> None:
        self._total = 0.0  # sum of the weights; 0: nothing measured
        self._x = self._y = self._xx = self._xy = 0.0

    def started(self, nbytes: int) -> None:
        """A transfer was queued."""
        with self._lock:
            self._queued += nbytes

    def ended(self, nbytes: int) -> None:
        """A queued transfer ended, well or not."""
        with self._lock:
            self._queued -= nbytes

    def observe(self, nbytes: int, seconds: float) -> None:
        """A transfer took so long, without the time that it was queued. Of no bytes or no time: ignored."""
        if nbytes <= 0 or seconds <= 0:
            return
        with self._lock:
            before, self._surprise = self._surprise, self._surprising(nbytes, seconds)
            if before and self._surprise and before.slower == self._surprise.slower:
                self._forget()
                self._add(before.nbytes, before.seconds)
                self._surprise = None
            self._add(nbytes, seconds)

    def _surprising(self, nbytes: int, seconds: float) -> _Surprise | None:
        expected = self._fit()._replace(queued_bytes=0).seconds(nbytes)
        if expected is None or expected / _SURPRISE <= seconds <= expected * _SURPRISE:
            return None
        return _Surprise(nbytes, seconds, seconds > expected)

    def _add(self, nbytes: int, seconds: float) -> None:
        keep = 1 - self._weight
        self._total = keep * self._total + self._weight
        self._x = keep * self._x + self._weight * nbytes
        self._y = keep * self._y + self._weight * seconds
        self._xx = keep * self._xx + self._weight * nbytes * nbytes
        self._xy = keep * self._xy + self._weight * nbytes * seconds

    def snapshot(self) -> TierSpeed:
        """What is known now."""
        with self._lock:
            return self._fit()

    def _fit(self) -> TierSpeed:
        if not self._total:
            return UNMEASURED._replace(queued_bytes=self._queued)
        x, y = self._x / self._total, self._y / self._total
        variance = self._xx / self._total - x * x
        slope = y / x
        if variance > (_SPREAD * x) ** 2:
            fitted = (self._xy / self._total - x * y) / variance
            # Below: larger transfers were the faster ones, which is noise. Above: a negative latency.
            slope = fitted if 0 < fitted < slope else slope
        return TierSpeed(1 / slope, max(0.0, y - slope * x), self._queued)
