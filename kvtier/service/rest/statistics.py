"""The answer of `GET /v1/stats`: `kvtier.service.cache.ServiceStats`, as JSON."""

from typing import Self

from pydantic import ConfigDict, Field

from kvtier.service.cache import ServiceStats
from kvtier.service.rest.answers import Answer
from kvtier.service.rest.samples import example

__all__ = ["StatsAnswer"]


class TrafficFigures(Answer):
    """Blocks since the process began."""

    stored: int = Field(description="That were put")
    stored_bytes: int
    hits: int = Field(description="That reads found")
    misses: int
    matched: int = Field(description="That matches found; these move nothing")
    unmatched: int


class NamespaceFigures(TrafficFigures):
    """The same of one namespace."""

    name: str
    host_blocks: int = Field(description="Parts of blocks in host now")
    host_bytes: int


class TierFigures(Answer):
    """What one tier took, gave and lost since the process began: bytes, and parts of blocks."""

    read_bytes: int = Field(description="That were verified")
    written_bytes: int = Field(description="That were committed")
    evicted: dict[str, int] = Field(description="What had to leave, by reason")
    dropped: dict[str, int] = Field(description="What was not taken, by reason")
    corrupt: int = Field(description="What failed its checksum")


class TenantFigures(Answer):
    """Of one tenant."""

    name: str
    quotas: dict[str, int] = Field(description="Bytes by tier")
    tiers: dict[str, dict[str, int]] = Field(
        description="By tier what it holds (`blocks`, `bytes`, `capacity_bytes`, `leases`, `reservations`); as `store` "
        "`leases`, `pins`, `waiting_bytes`, `sessions`"
    )
    flows: dict[str, TierFigures] = Field(description="By tier")
    traffic: TrafficFigures = Field(description="Of all namespaces, those that were dropped included")
    in_bytes: int = Field(description="Of blocks that callers sent")
    out_bytes: int = Field(description="Of blocks that callers were handed")
    namespaces: list[NamespaceFigures] = Field(description="Most stored bytes first")
    leases: int = Field(description="Readings that are open")
    pins: int = Field(description="That are not over")
    prefetches: int = Field(description="That are not over")
    inflight_bytes: int = Field(description="That calls hold")


class VerbFigures(Answer):
    """Calls of one verb, of every port."""

    verb: str
    outcomes: dict[str, int] = Field(description="`ok`, or the code of the refusal")
    p50: float = Field(description="Seconds, as fine as the histogram's buckets")
    p99: float


_TRAFFIC = {"stored": 2, "stored_bytes": 32768, "hits": 2, "misses": 1, "matched": 3, "unmatched": 1}
_HOLDS = {"blocks": 2, "bytes": 32768, "capacity_bytes": 1 << 30, "leases": 0, "reservations": 0}
_FLOW = {"read_bytes": 32768, "written_bytes": 32768, "evicted": {"capacity": 1}, "dropped": {}, "corrupt": 0}


class StatsAnswer(Answer):
    """Of the service, as far as the caller may see it."""

    model_config = ConfigDict(
        json_schema_extra=example(
            uptime=3600.5,
            draining=False,
            calls=1,
            verbs=[{"verb": "match", "outcomes": {"ok": 12, "invalid": 1}, "p50": 0.001, "p99": 0.0025}],
            tenants=[
                {
                    "name": "default",
                    "quotas": {"host": 1 << 30},
                    "tiers": {"host": _HOLDS, "store": {"leases": 0, "pins": 0, "waiting_bytes": 0, "sessions": 1}},
                    "flows": {"host": _FLOW},
                    "traffic": _TRAFFIC,
                    "in_bytes": 32768,
                    "out_bytes": 32768,
                    "namespaces": [{**_TRAFFIC, "name": "smollm2", "host_blocks": 2, "host_bytes": 32768}],
                    "leases": 0,
                    "pins": 0,
                    "prefetches": 0,
                    "inflight_bytes": 0,
                }
            ],
        )
    )

    uptime: float = Field(description="Seconds")
    draining: bool = Field(description="Whether new calls are refused")
    calls: int = Field(description="That are under way, of every port")
    verbs: list[VerbFigures] = Field(description="For admins only")
    tenants: list[TenantFigures] = Field(description="The caller's; with the scope admin, all")

    @classmethod
    def of(cls, stats: ServiceStats) -> Self:
        """From the cache's."""
        return cls.model_validate(stats.as_data())
