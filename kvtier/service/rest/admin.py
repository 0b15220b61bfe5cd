"""Figures, tenants, and what only admins may do."""

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query

from kvtier.service.cache import LONGEST_SECONDS, TenantStats
from kvtier.service.rest.answers import (
    CapacityAnswer,
    CompactAnswer,
    DataAnswer,
    HistoryAnswer,
    StateAnswer,
    TenantAnswer,
    TenantsAnswer,
)
from kvtier.service.rest.bodies import TENANT_PATTERN, CapacityBody, PolicyBody
from kvtier.service.rest.calls import CallerOf, Service
from kvtier.service.rest.spec import refusals
from kvtier.service.rest.statistics import StatsAnswer

__all__ = ["admin_routes", "figure_routes"]


def figure_routes(service: Service) -> APIRouter:
    """Routes that show what the service does."""
    router, cache = APIRouter(tags=["figures"], dependencies=[service.turn]), service.cache

    @router.get("/v1/stats", responses=refusals())
    def stats(caller: CallerOf) -> StatsAnswer:
        """All figures of the caller's tenant; with the scope admin, of all tenants and of the service."""
        return StatsAnswer.of(cache.stats(caller))

    @router.get("/v1/stats/history", responses=refusals("unknown_tenant"))
    def history(
        caller: CallerOf,
        seconds: Annotated[float, Query(ge=1, le=LONGEST_SECONDS, description="Until now")] = 600.0,
        tenant: Annotated[
            str | None,
            Query(pattern=TENANT_PATTERN, description="Of those in `/v1/stats`; none: all together"),
        ] = None,
    ) -> HistoryAnswer:
        """How figures went, oldest first, in at most some 240 points, of which the last is of this moment."""
        return HistoryAnswer.model_validate(asdict(cache.history(caller, seconds, tenant)))

    @router.get("/v1/tenants", responses=refusals())
    def tenants(caller: CallerOf) -> TenantsAnswer:
        """Quotas, and what is used of them: the caller's tenant; with the scope admin, all."""
        return TenantsAnswer(tenants=[_tenant(one) for one in cache.stats(caller).tenants])

    @router.get("/v1/data", responses=refusals())
    def data() -> DataAnswer:
        """Where block bytes go faster: the data port, which has TLS where this one does, and the Unix socket."""
        settings = service.settings
        return DataAnswer(port=settings.data_port, socket=None if settings.socket is None else str(settings.socket))

    return router


def admin_routes(service: Service) -> APIRouter:
    """Routes that need the scope admin."""
    router, cache = APIRouter(tags=["admin"], prefix="/v1/admin"), service.cache

    # These two wait for nothing, whatever else admins wait for.
    @router.post("/drain", responses=refusals())
    async def drain(caller: CallerOf) -> StateAnswer:
        """Refuse new calls; what runs may end."""
        cache.drain(caller)
        return StateAnswer(status="draining")

    @router.post("/resume", responses=refusals())
    async def resume(caller: CallerOf) -> StateAnswer:
        """Take calls again."""
        cache.resume(caller)
        return StateAnswer(status="ready")

    waiting = APIRouter(dependencies=[service.admin_turn])

    @waiting.post("/flush", status_code=204, responses=refusals("timeout"))
    def flush(caller: CallerOf) -> None:
        """Make everything that was put as durable as the tiers can."""
        cache.flush(caller)

    @waiting.post("/compact", responses=refusals("timeout"))
    def compact(caller: CallerOf) -> CompactAnswer:
        """Put the NVMe directories in order."""
        return CompactAnswer(tenants=cache.compact(caller))

    @waiting.post("/capacity", responses=refusals("unknown_tenant", "conflict", body=True))
    def set_capacity(caller: CallerOf, body: CapacityBody) -> CapacityAnswer:
        """Change a tenant's quota; what does not fit any more is evicted."""
        return CapacityAnswer(bytes=cache.set_capacity(caller, body.tenant, body.tier, body.bytes))

    @waiting.post("/policy", status_code=204, responses=refusals("unknown_tenant", body=True))
    def set_policy(caller: CallerOf, body: PolicyBody) -> None:
        """Change which block leaves a tenant's host tier first."""
        cache.set_policy(caller, body.tenant, body.policy)

    router.include_router(waiting)
    return router


def _tenant(stats: TenantStats) -> TenantAnswer:
    return TenantAnswer(
        name=stats.name,
        quotas=stats.quotas,
        occupied={name: stats.tiers[name].get("bytes", 0) for name in stats.quotas if name in stats.tiers},
        leases=stats.leases,
        pins=stats.pins,
        namespaces=len(stats.namespaces),
    )
