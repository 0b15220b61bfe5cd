"""ServiceError: a refusal, the same on every port."""

from typing import Literal, TypeAlias

from kvtier.errors import KVTierError

__all__ = ["STATUSES", "Code", "ServiceError"]

Code: TypeAlias = Literal[
    "invalid",
    "unauthorized",
    "forbidden",
    "unknown_namespace",
    "unknown_block",
    "unknown_pin",
    "unknown_prefetch",
    "unknown_tenant",
    "conflict",
    "wrong_layout",
    "exists",
    "too_large",
    "wrong_digest",
    "busy",
    "draining",
    "unavailable",
    "timeout",
    "quota_exceeded",
]

STATUSES: dict[Code, int] = {
    "invalid": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "unknown_namespace": 404,
    "unknown_block": 404,
    "unknown_pin": 404,
    "unknown_prefetch": 404,
    "unknown_tenant": 404,
    "conflict": 409,
    "wrong_layout": 409,
    "exists": 412,
    "too_large": 413,
    "wrong_digest": 422,
    "busy": 503,
    "draining": 503,
    "unavailable": 503,
    "timeout": 504,
    "quota_exceeded": 507,
}
"""HTTP status by code."""


class ServiceError(KVTierError):
    """Ends a call. Nothing was changed by it, but for a removal, which some tiers have done where others have not.

    Args:
        code: what programs tell refusals apart by.
        message: names the value, what was expected and what to do.
        retry_after: seconds after which the same call may succeed.
    """

    def __init__(self, code: Code, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code: Code = code
        self.status = STATUSES[code]
        self.retry_after = retry_after
