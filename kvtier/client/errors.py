"""What can go wrong between a client and the cache service: one tree for REST, data port and shared memory.

    ClientError
        Unreachable      nobody answers at the address, or it is being left alone for a while
        Interrupted      the connection ended before the answer was whole
        DeadlineExceeded the call's time is over
        ProtocolError    what answers is no kvtier service of a version that this client knows
        WrongDigest      bytes arrived other than they were stored, twice
        Refused          the service said no; `code` says why (docs/rest.md lists them)
            Unauthorized, Forbidden, NotFound, Exists, Conflict, Invalid, TooLarge, QuotaExceeded, Busy, ServerTimeout

A block that is not there is no error but a miss: `None`, or absent from the answer.
"""

from kvtier.errors import KVTierError

__all__ = [
    "Busy",
    "ClientError",
    "Conflict",
    "DeadlineExceeded",
    "Exists",
    "Forbidden",
    "Interrupted",
    "Invalid",
    "NotFound",
    "ProtocolError",
    "QuotaExceeded",
    "Refused",
    "ServerTimeout",
    "TooLarge",
    "Unauthorized",
    "Unreachable",
    "WrongDigest",
    "refused",
]


class ClientError(KVTierError):
    """Root of the tree. The message names the address, what was expected and what to do."""


class Unreachable(ClientError):
    """Nobody answers at the address. Nothing was sent."""


class Interrupted(ClientError):
    """The connection ended before the answer was whole: what was asked for may have been done, or not."""


class DeadlineExceeded(ClientError):
    """The call's time is over: what was asked for may have been done, or not."""


class ProtocolError(ClientError):
    """What answers does not speak this protocol."""


class WrongDigest(ClientError):
    """Bytes arrived other than they were stored, also when they were asked for again."""


class Refused(ClientError):
    """The service refused.

    Args:
        message: its own.
        status: HTTP status, also of refusals by the data port.
        code: stable name of the reason.
        retry_after: seconds after which it may be asked again; None: it did not say.
    """

    def __init__(self, message: str, status: int, code: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after


class Unauthorized(Refused):
    """The token is missing, unknown, revoked or expired."""


class Forbidden(Refused):
    """The token does not have the scope, or not this namespace."""


class NotFound(Refused):
    """No such tenant, namespace, block, pin or prefetch."""


class Exists(Refused):
    """The block is there, and the put was to be the first."""


class Conflict(Refused):
    """What is asked for contradicts itself or what is there: layout, specification, quotas, depth and parent."""


class Invalid(Refused):
    """The request is malformed, or the body is not what its digest says."""


class TooLarge(Refused):
    """A block, a batch or a body beyond the service's limits."""


class QuotaExceeded(Refused):
    """The tenant's quota has no room, and nothing of it may be evicted."""


class Busy(Refused):
    """Back-pressure, the service drains, or a tier could not remove blocks: try again after `retry_after` seconds."""


class ServerTimeout(Refused):
    """The service did not finish within the deadline; what was to be removed may still be there."""


_BY_STATUS: dict[int, type[Refused]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    408: ServerTimeout,
    409: Conflict,
    412: Exists,
    413: TooLarge,
    416: Invalid,
    422: Invalid,
    503: Busy,
    504: ServerTimeout,
    507: QuotaExceeded,
}


def refused(message: str, status: int, code: str, retry_after: float | None = None) -> Refused:
    """The error of the tree that tells a refusal; statuses that no class stands for are a plain `Refused`."""
    return _BY_STATUS.get(status, Refused)(message, status, code, retry_after)
