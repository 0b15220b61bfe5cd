"""Who calls, and what that caller may do."""

import enum
from fnmatch import fnmatchcase
from typing import NamedTuple

from kvtier.service.cache.errors import ServiceError

__all__ = ["DEFAULT_TENANT", "LOCAL", "PROCESS", "Caller", "Scope", "require"]

DEFAULT_TENANT = "default"
"""The tenant of a service without a table of tenants."""


class Scope(enum.StrEnum):
    """What a token allows."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


class Caller(NamedTuple):
    """Who is behind a token.

    Args:
        tenant: whose blocks it sees, and whose quota it uses.
        scopes: what it may do.
        namespaces: patterns (`fnmatch`) of the namespaces that it may use; None: all of the tenant's.
        token: the token's public id, for logs; never its secret.
    """

    tenant: str
    scopes: frozenset[Scope]
    namespaces: tuple[str, ...] | None
    token: str

    def sees(self, namespace: str) -> bool:
        """Whether it may use a namespace of this name."""
        return self.namespaces is None or any(fnmatchcase(namespace, pattern) for pattern in self.namespaces)


LOCAL = Caller(DEFAULT_TENANT, frozenset(Scope), None, "local")
"""Everybody, where no tokens are configured."""

PROCESS = Caller("", frozenset(Scope), None, "process")
"""The service's own process: its signals."""


def require(caller: Caller, scope: Scope) -> None:
    """Let a caller pass that has a scope.

    Raises:
        ServiceError: forbidden.
    """
    if scope not in caller.scopes:
        held = ", ".join(sorted(caller.scopes)) or "none"
        wanted = " ".join(f"--scope {one}" for one in sorted({*caller.scopes, scope}))
        raise ServiceError(
            "forbidden",
            f"token {caller.token} has the scopes {held}: this needs {scope}; "
            f"have one made by `kvtier cache token create {wanted}`",
        )
