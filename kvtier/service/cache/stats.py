"""ServiceStats: what the service is doing, as plain data."""

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["NamespaceStats", "ServiceStats", "TenantStats", "TierFlow", "TrafficStats", "VerbStats"]


@dataclass(frozen=True, slots=True)
class TrafficStats:
    """Blocks since the process began.

    Args:
        stored, stored_bytes: that were put.
        hits, misses: of reads.
        matched, unmatched: of matches, which move nothing.
    """

    stored: int
    stored_bytes: int
    hits: int
    misses: int
    matched: int
    unmatched: int


@dataclass(frozen=True, slots=True)
class NamespaceStats(TrafficStats):
    """Of one namespace; host_blocks and host_bytes: parts of blocks in host now."""

    name: str
    host_blocks: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class TierFlow:
    """What one tier took, gave and lost since the process began: parts of blocks, and bytes.

    Args:
        read_bytes, written_bytes: verified; committed.
        evicted, dropped: by reason: what had to leave, what was not taken.
        corrupt: that failed their checksum.
    """

    read_bytes: int
    written_bytes: int
    evicted: dict[str, int]
    dropped: dict[str, int]
    corrupt: int


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Of one tenant.

    Args:
        name: the tenant's.
        quotas: bytes by tier.
        tiers: `TieredStore.stats` by tier name, and `store` (leases, pins, waiting_bytes, sessions).
        flows: by tier name.
        traffic: of all namespaces, those that were dropped included.
        in_bytes, out_bytes: of blocks that callers sent, and were handed.
        namespaces: most stored bytes first.
        leases: readings that are open.
        pins, prefetches: that are not over.
        inflight_bytes: that calls hold.
    """

    name: str
    quotas: dict[str, int]
    tiers: dict[str, dict[str, int]]
    flows: dict[str, TierFlow]
    traffic: TrafficStats
    in_bytes: int
    out_bytes: int
    namespaces: tuple[NamespaceStats, ...]
    leases: int
    pins: int
    prefetches: int
    inflight_bytes: int


@dataclass(frozen=True, slots=True)
class VerbStats:
    """Of one verb: calls by outcome (`ok` or a code), and seconds at quantiles, as fine as the histogram's buckets."""

    verb: str
    outcomes: dict[str, int]
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """Of the service, as far as the caller may see it: its own tenant, or all of them with the scope admin.

    Args:
        uptime: seconds.
        draining: whether new calls are refused.
        calls: that are under way.
        verbs: for admins only.
        tenants: see `TenantStats`.
    """

    uptime: float
    draining: bool
    calls: int
    verbs: tuple[VerbStats, ...]
    tenants: tuple[TenantStats, ...]

    def as_data(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)
