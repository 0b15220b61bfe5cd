"""What the scope admin may do, each leaving a line in the audit log: who, what, and how it ended."""

import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from kvtier.config import ServiceSettings
from kvtier.errors import CapacityError, KVTierError
from kvtier.service.cache.callers import Caller, Scope, require
from kvtier.service.cache.calls import Calls
from kvtier.service.cache.errors import ServiceError
from kvtier.service.cache.tenant import Tenant

__all__ = ["Administration"]

_audit = logging.getLogger("kvtier.audit")
_T = TypeVar("_T")


class Administration:
    """The verbs behind `Cache`'s of the same names. Thread-safe.

    Args:
        tenants: by name.
        calls: of the service.
        settings: `overcommit` and `host_limit`.
    """

    def __init__(self, tenants: Mapping[str, Tenant], calls: Calls, settings: ServiceSettings) -> None:
        self._tenants = tenants
        self._calls = calls
        # What the tenants may have of host together: what they began with, or one of them could be raised to.
        began = sum(tenant.quotas["host"] for tenant in tenants.values())
        self._most = math.inf if settings.overcommit else max(began, settings.host_limit or 0)
        self._resizing = threading.Lock()

    def drain(self, caller: Caller) -> None:
        """See `Cache.drain`."""
        self._audited("drain", caller, self._calls.drain)

    def resume(self, caller: Caller) -> None:
        """See `Cache.resume`."""
        self._audited("resume", caller, self._calls.resume)

    def flush(self, caller: Caller) -> None:
        """See `Cache.flush`."""

        def flush() -> None:
            for tenant in self._tenants.values():
                tenant.store.flush()

        self._audited("flush", caller, flush)

    def compact(self, caller: Caller) -> dict[str, dict[str, int]]:
        """See `Cache.compact`.

        Blocks that fail their checksum are dropped and pages that nobody owns reclaimed, while the directories are
        in use. To rewrite an index without its unused pages nobody may use it: `kvtier inspect DIR --compact`.
        """

        def compact() -> dict[str, dict[str, int]]:
            return {name: tenant.repair() for name, tenant in self._tenants.items()}

        return self._audited("compact", caller, compact)

    def set_capacity(self, caller: Caller, tenant: str, tier: str, nbytes: int) -> int:
        """See `Cache.set_capacity`.

        Raises:
            ServiceError: forbidden, unknown_tenant; invalid: another tier than host; conflict: beyond
                `service.host_limit`, or what the other tenants leave of it.
        """

        def resize() -> int:
            owner = self._named(tenant)
            if tier != "host":
                raise ServiceError("invalid", f"tier {tier}: only host changes at run time; restart for the others")
            with self._resizing:
                others = sum(one.quotas["host"] for one in self._tenants.values() if one is not owner)
                if others + nbytes > self._most:
                    raise ServiceError(
                        "conflict",
                        f"{nbytes} bytes beside {others} of the other tenants: at most {self._most} in all; lower "
                        "theirs first, raise service.host_limit, or set service.overcommit = true",
                    )
                try:
                    return owner.resize(nbytes)
                except CapacityError as error:
                    raise ServiceError("conflict", f"{error}; service.host_limit is what can be reserved") from error

        return self._audited("set_capacity", caller, resize, of=tenant, tier=tier, nbytes=nbytes)

    def set_policy(self, caller: Caller, tenant: str, policy: str) -> None:
        """See `Cache.set_policy`.

        Raises:
            ServiceError: forbidden, unknown_tenant; invalid: no such policy.
        """

        def change() -> None:
            # A name from outside is never a module's to import.
            if ":" in policy:
                raise ServiceError("invalid", "policy: expected the name of a registered one, not module:Class")
            self._named(tenant).set_policy(policy)

        self._audited("set_policy", caller, change, of=tenant, policy=policy)

    def _named(self, tenant: str) -> Tenant:
        found = self._tenants.get(tenant)
        if found is None:
            raise ServiceError("unknown_tenant", f"no such tenant: expected one of {', '.join(sorted(self._tenants))}")
        return found

    def _audited(self, verb: str, caller: Caller, action: Callable[[], _T], **fields: object) -> _T:
        result = "failed"
        try:
            with self._calls.call(verb, caller, always=True):
                require(caller, Scope.ADMIN)
                done = action()
            result = "ok"
        except KVTierError as error:
            result = str(error)
            raise
        else:
            return done
        finally:
            _audit.info(verb, extra={"tenant": caller.tenant, "token": caller.token, "result": result, **fields})
