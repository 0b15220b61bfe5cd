"""Figures: what callers may see of how the service does, now and over time."""

import time
from collections.abc import Mapping

from kvtier.service.cache.callers import Caller, Scope
from kvtier.service.cache.calls import Calls
from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.history import History, HistoryInfo
from kvtier.service.cache.stats import ServiceStats, TenantStats
from kvtier.service.cache.telemetry import Telemetry
from kvtier.service.cache.tenant import Tenant

__all__ = ["Figures"]


class Figures:
    """The verbs behind `Cache`'s of the same names, for callers whose scope was checked. Thread-safe.

    Args:
        tenants: by name.
        calls, telemetry: of the service.
    """

    def __init__(self, tenants: Mapping[str, Tenant], calls: Calls, telemetry: Telemetry) -> None:
        self._tenants = tenants
        self._calls = calls
        self._telemetry = telemetry
        self._began = time.monotonic()
        self._history = History(tenants, telemetry.moved_bytes)
        self._history.start()

    def stats(self, caller: Caller) -> ServiceStats:
        """See `Cache.stats`."""
        admin = Scope.ADMIN in caller.scopes
        return ServiceStats(
            uptime=time.monotonic() - self._began,
            draining=self._calls.draining,
            calls=self._calls.underway,
            verbs=self._telemetry.verbs() if admin else (),
            tenants=tuple(self._tenant(caller, name) for name in self._shown(caller)),
        )

    def _tenant(self, caller: Caller, name: str) -> TenantStats:
        everything = Scope.ADMIN in caller.scopes and caller.namespaces is None
        sees = (lambda _: True) if everything else caller.sees
        return self._tenants[name].stats(sees, self._telemetry.moved_bytes(name))

    def history(self, caller: Caller, seconds: float, tenant: str | None) -> HistoryInfo:
        """See `Cache.history`."""
        shown = self._shown(caller)
        if tenant is not None and tenant not in shown:
            raise ServiceError("unknown_tenant", f"tenant: expected one of {', '.join(sorted(shown))}")
        return self._history.since(seconds, shown if tenant is None else [tenant])

    def _shown(self, caller: Caller) -> list[str]:
        return list(self._tenants) if Scope.ADMIN in caller.scopes else [caller.tenant]

    def close(self) -> None:
        """Sample no more. Idempotent."""
        self._history.close()
