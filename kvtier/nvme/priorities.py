"""Priorities: how slowly records age, in a memory-mapped array beside the recency rows, shared by all processes.

row    until u32 (Unix seconds; where they are past, nothing holds), seconds u16 (for which a use renews it),
       weight f16                                                                                        8 bytes

The file is made with the first priority. Like recency rows, these may race, and cost precision only. What lasts for
longer than it could if it were given now is of a clock that ran ahead, and does not hold either.
"""

import math
import mmap
import os
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.hints import Hint

__all__ = ["PRIORITY", "Aging", "Priorities", "counts", "cover", "give", "holds"]

PRIORITY = np.dtype([("until", "<u4"), ("seconds", "<u2"), ("weight", "<f2")])
_MOST_SECONDS = 2**16 - 1
_MOST_WEIGHT = float(np.finfo(np.float16).max)
_STRICT = np.uint64(2**63)
_SKEW = 60
"""Seconds by which a clock may have been set back since: an adjustment takes no priority away."""


class Priorities:
    """The rows of one directory. Thread-safe: those who use blocks and those who store them meet here.

    Args:
        path: the file, made when it is needed first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._rows: NDArray[np.void] = np.zeros(0, PRIORITY)
        self._closed = False
        self._lock = threading.Lock()

    def rows(self, count: int) -> NDArray[np.void] | None:
        """At least `count` rows; None where the disk has no room for them, or the file is closed."""
        rows = self._rows
        if count <= len(rows):
            return rows
        with self._lock:
            if self._closed:
                return None
            if count > len(self._rows):
                try:
                    self._rows = self._map(count * PRIORITY.itemsize)
                except OSError:
                    return None
            return self._rows

    def _map(self, nbytes: int) -> NDArray[np.void]:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if os.fstat(self._fd).st_size < nbytes:
            # Allocated, not sparse: storing to a hole of a full disk would kill the process.
            os.posix_fallocate(self._fd, 0, nbytes)
        memory = mmap.mmap(self._fd, os.fstat(self._fd).st_size // PRIORITY.itemsize * PRIORITY.itemsize)
        return np.frombuffer(memory, PRIORITY)

    def clear(self) -> None:
        """Forget all, before the first use: the rows are other records' now."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file. The mapping goes with the last array on it."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._closed = -1, True
            self._rows = np.zeros(0, PRIORITY)


class Aging(NamedTuple):
    """Which records age slowly at one instant.

    rows: [at least n] of `PRIORITY`. instant: the newest stamp. now: Unix seconds.
    """

    rows: NDArray[np.void]
    instant: int
    now: int

    def slowed(self, stamps: NDArray[np.uint64], at: "slice | NDArray[np.int64]", shift: int) -> NDArray[np.uint64]:
        """The stamps that records without a priority would have if they were as old as these count.

        Args:
            stamps: of rows `at`; those of 0 and 1 stay as they are.
            at: which rows.
            shift: low bits of a stamp that do not count as age. What is equally old without them stays so.
        """
        rows = self.rows[at]
        held = np.flatnonzero(holds(rows, self.now) & (stamps > 1))
        if not len(held):
            return stamps
        # Another process may be storing one: the weight comes last.
        weights = np.maximum(rows["weight"][held].astype(np.float64), 1.0)
        steps = stamps[held] >> np.uint64(shift) << np.uint64(shift)
        ages = np.maximum(self.instant - steps.astype(np.float64), 0.0)
        slowed = stamps.copy()
        slowed[held] = np.where(
            np.isinf(weights), _STRICT | steps, np.uint64(self.instant) - (ages / weights).astype(np.uint64)
        )
        return slowed


def holds(rows: NDArray[np.void], now: int) -> NDArray[np.bool_]:
    """Which of these rows of `PRIORITY` hold."""
    left = rows["until"].astype(np.int64) - now
    return (left > 0) & (left - _SKEW <= rows["seconds"])


def counts(hint: Hint | None) -> bool:
    """Whether a hint makes its record age more slowly. None makes it age faster here: what builds on it would not."""
    return hint is not None and hint.priority > 1 and hint.reuse != "none"


def give(rows: NDArray[np.void], row: int, hint: Hint, now: int) -> int:
    """Let a priority hold for a row, unless a higher one does; returns until when.

    Args:
        rows: of `PRIORITY`.
        row: which one.
        hint: one that `counts`. More than 18 hours count as that.
        now: Unix seconds.
    """
    seconds = math.ceil(min(hint.priority_ttl, _MOST_SECONDS))
    weight = hint.priority if hint.priority == math.inf else min(hint.priority, _MOST_WEIGHT)
    cover(rows, row, (now + seconds, seconds, weight), now)
    return int(rows["until"][row])


def cover(rows: NDArray[np.void], row: int, wanted: tuple[int, int, float], now: int) -> bool:
    """Let a row's priority be at least this in all three, as far as it still holds; returns whether it was less."""
    had = until, seconds, weight = rows[row].item()
    if 0 < until - now <= seconds + _SKEW:
        wanted = (max(until, wanted[0]), max(seconds, wanted[1]), max(weight, wanted[2]))
    if wanted == had:
        return False
    rows[row] = wanted
    return True
