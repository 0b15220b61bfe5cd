"""History: how a tenant's figures went, kept in a ring of samples that never grows."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvtier.service.cache.tenant import Tenant
from kvtier.service.cache.traffic import flow_of, occupancy

__all__ = ["LONGEST_SECONDS", "History", "HistoryInfo", "TierHistory"]

STEP_SECONDS = 5.0
"""Between two samples."""
_FINE, _COARSE, _EVERY = 720, 720, 24
LONGEST_SECONDS = STEP_SECONDS * _COARSE * _EVERY
"""What is kept: an hour of every sample, a day of one in two minutes."""
_MOST_POINTS = 240
_OWN = ("hits", "misses", "matched", "unmatched", "in_bytes", "out_bytes")
_OF_TIER = ("bytes", "capacity_bytes", "read_bytes", "written_bytes", "evicted", "dropped")

_Rows = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TierHistory:
    """Of one tier, one value per time; all but `bytes` and `capacity_bytes` count up from the process's begin."""

    bytes: list[int]
    capacity_bytes: list[int]
    read_bytes: list[int]
    written_bytes: list[int]
    evicted: list[int]
    dropped: list[int]


@dataclass(frozen=True, slots=True)
class HistoryInfo:
    """How figures went, oldest first, the last of this moment.

    Args:
        times: seconds since 1970.
        hits, misses, matched, unmatched, in_bytes, out_bytes: counts from the process's begin, see `TenantStats`.
        tiers: by name.
    """

    times: list[float]
    hits: list[int]
    misses: list[int]
    matched: list[int]
    unmatched: list[int]
    in_bytes: list[int]
    out_bytes: list[int]
    tiers: dict[str, TierHistory]


class History:
    """Samples the tenants' figures in a thread of its own. Thread-safe.

    Args:
        tenants: by name; those that there ever are.
        moved: bytes in and out so far, by tenant.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        moved: Callable[[str], tuple[int, int]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tenants = tenants
        self._moved = moved
        self._clock = clock
        self._tiers = list(dict.fromkeys(tier.name for one in tenants.values() for tier in one.store.tiers))
        shape = (len(tenants), len(_OWN) + len(self._tiers) * len(_OF_TIER))
        self._rings = (_Ring(_FINE, shape), _Ring(_COARSE, shape))
        self._count = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-history", daemon=True)

    def start(self) -> None:
        """Sample from now on."""
        self._thread.start()

    def close(self) -> None:
        """Sample no more. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self.sample()
        while not self._ended.wait(STEP_SECONDS):
            self.sample()

    def sample(self) -> None:
        """Keep what the figures are now."""
        now, rows = self._clock(), self._rows(self._tenants)
        with self._lock:
            fine, coarse = self._rings
            fine.add(now, rows)
            if self._count % _EVERY == 0:
                coarse.add(now, rows)
            self._count += 1

    def since(self, seconds: float, names: Sequence[str]) -> HistoryInfo:
        """The last `seconds` of some tenants together, in at most some 240 points."""
        now = self._clock()
        places = [at for at, name in enumerate(self._tenants) if name in names]
        with self._lock:
            fine, coarse = self._rings
            ring = fine if seconds <= STEP_SECONDS * _FINE else coarse
            times, rows = ring.since(now - seconds, places)
        latest = self._rows(names).sum(axis=0)
        return self._told([*times.tolist(), now], np.vstack([rows, latest]))

    def _rows(self, names: Sequence[str] | Mapping[str, object]) -> _Rows:
        """One row per tenant, of this moment."""
        return np.array([self._row(self._tenants[name]) for name in names], np.float64)

    def _row(self, tenant: Tenant) -> list[int]:
        total = tenant.traffic.total.stats()
        own = [total.hits, total.misses, total.matched, total.unmatched, *self._moved(tenant.name)]
        return [*own, *chain.from_iterable(_tier_row(tenant, tier) for tier in self._tiers)]

    def _told(self, times: list[float], rows: _Rows) -> HistoryInfo:
        columns = iter(rows.T.astype(np.int64).tolist())
        own = {name: next(columns) for name in _OWN}
        tiers = {tier: TierHistory(**{name: next(columns) for name in _OF_TIER}) for tier in self._tiers}
        return HistoryInfo(times, **own, tiers=tiers)


def _tier_row(tenant: Tenant, tier: str) -> list[int]:
    flow = flow_of(tenant.metrics, tier)
    lost = [sum(flow.evicted.values()), sum(flow.dropped.values())]
    return [*occupancy(tenant.metrics, tier), flow.read_bytes, flow.written_bytes, *lost]


class _Ring:
    """The latest samples: rows of tenants, columns of figures.

    Args:
        length: samples.
        shape: tenants, figures.
    """

    def __init__(self, length: int, shape: tuple[int, int]) -> None:
        self._times = np.zeros(length)
        self._rows = np.zeros((length, *shape))
        self._count = 0

    def add(self, now: float, rows: _Rows) -> None:
        """Take a sample, in place of the oldest once all places are taken."""
        at = self._count % len(self._times)
        self._times[at], self._rows[at] = now, rows
        self._count += 1

    def since(self, begin: float, places: list[int]) -> tuple[NDArray[np.float64], _Rows]:
        """Times and sums over the tenants at `places`, of samples that are not older than `begin`."""
        length = len(self._times)
        numbers = np.arange(max(self._count - length, 0), self._count)
        numbers = numbers[self._times[numbers % length] >= begin]
        stride = -(-len(numbers) // _MOST_POINTS) or 1
        # By their numbers, so that a curve keeps its points while it moves.
        chosen = numbers[numbers % stride == 0] % length
        return self._times[chosen], self._rows[chosen][:, places].sum(axis=1)
