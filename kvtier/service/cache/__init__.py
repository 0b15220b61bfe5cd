"""The domain of the cache service: no HTTP, no sockets.

cache           every verb, for every port; administration: those of admins
callers         who calls, and with which scopes; tokens: their secrets
tenant          one store per tenant; quotas: its share; state: what must outlive the process; files: whole or absent
namespaces      what clients name blocks in, and what that is in a store; leaving: those that ended
reading, reads  blocks held in host, to be sent without a copy, and how they get there
records, puts   blocks to be put, their outcomes, and their checks; pins and prefetches, kept in holding
rooms           memory to receive blocks into
inflight        how many bytes calls hold; places: how many connections tenants have
events          block events in the names that callers use
calls           what is under way; telemetry, stats: how it went; traffic: of blocks; figures: who may see it;
                history: how it went over time
errors          refusals, the same on every port
"""

from kvtier.service.cache.cache import Cache
from kvtier.service.cache.callers import DEFAULT_TENANT, LOCAL, PROCESS, Caller, Scope
from kvtier.service.cache.errors import STATUSES, Code, ServiceError
from kvtier.service.cache.history import LONGEST_SECONDS, HistoryInfo, TierHistory
from kvtier.service.cache.namespaces import (
    BlockNames,
    NamespaceInfo,
    NamespaceSpec,
    layout_as_data,
    layout_from_data,
)
from kvtier.service.cache.places import Places
from kvtier.service.cache.reading import Found, Reading
from kvtier.service.cache.records import BlockPut, PinInfo, PrefetchInfo, PutOutcome
from kvtier.service.cache.rooms import Room
from kvtier.service.cache.stats import NamespaceStats, ServiceStats, TenantStats, TierFlow, TrafficStats, VerbStats
from kvtier.service.cache.tokens import TokenEntry, Tokens

__all__ = [
    "DEFAULT_TENANT",
    "LOCAL",
    "LONGEST_SECONDS",
    "PROCESS",
    "STATUSES",
    "BlockNames",
    "BlockPut",
    "Cache",
    "Caller",
    "Code",
    "Found",
    "HistoryInfo",
    "NamespaceInfo",
    "NamespaceSpec",
    "NamespaceStats",
    "PinInfo",
    "Places",
    "PrefetchInfo",
    "PutOutcome",
    "Reading",
    "Room",
    "Scope",
    "ServiceError",
    "ServiceStats",
    "TenantStats",
    "TierFlow",
    "TierHistory",
    "TokenEntry",
    "Tokens",
    "TrafficStats",
    "VerbStats",
    "layout_as_data",
    "layout_from_data",
]
