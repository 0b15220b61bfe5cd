"""Refusals as clients read them: `{"error": {code, message, param}}`, whoever refuses."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from kvtier.errors import KVTierError
from kvtier.service.cache.errors import ServiceError

__all__ = ["RestError", "from_http", "from_service", "from_validation", "refusal"]

_AUTHENTICATE = {"WWW-Authenticate": "Bearer"}
_HTTP_CODES = {404: "unknown_path", 405: "method_not_allowed"}


class RestError(KVTierError):
    """Ends a request with a status and an error object; for what only HTTP knows.

    Args:
        status: of HTTP.
        code: what programs tell errors apart by.
        message: names the value, what was expected and what to do.
        param: the field, header or part of the path that is wrong, if it is one.
        headers: further ones of the response.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def refusal(error: RestError) -> JSONResponse:
    """The response that tells an error."""
    body = {"error": {"code": error.code, "message": str(error), "param": error.param}}
    return JSONResponse(body, error.status, error.headers)


def from_service(error: ServiceError) -> RestError:
    """For what the cache refuses."""
    headers = dict(_AUTHENTICATE) if error.status == 401 else {}
    if error.status == 503:
        # Whole seconds; never 0, which is at once.
        headers["Retry-After"] = str(max(round(error.retry_after or 1), 1))
    return RestError(error.status, error.code, str(error), headers=headers)


def from_http(status: int, detail: str, request: str, headers: Mapping[str, str] | None) -> RestError:
    """For what the framework refuses by itself: unknown paths, wrong methods, bodies that it cannot read.

    Args:
        status: the framework's.
        detail: the framework's, too.
        request: method and path.
        headers: to be passed on.
    """
    advice = "; GET /openapi.json says what there is" if status in _HTTP_CODES else ""
    code = _HTTP_CODES.get(status, "invalid")
    return RestError(status, code, f"{request}: {detail}{advice}", headers=headers)


def from_validation(errors: Sequence[Mapping[str, Any]]) -> RestError:
    """For a path, query, header or body of the wrong shape; the first error is told.

    Args:
        errors: pydantic's, whose locations begin with `path`, `query`, `header` or `body`.
    """
    first = errors[0]
    # Members of a union appear in the location by the name of their type, which is none of the client's.
    names = [
        str(part) for part in first["loc"][1:] if isinstance(part, int) or str(part).replace("-", "_").isidentifier()
    ]
    param = ".".join(names) or None
    match first["type"]:
        case "json_invalid":
            return RestError(400, "invalid", f"the body is no JSON: {first['ctx']['error']}")
        case "extra_forbidden":
            return RestError(400, "invalid", f"{param}: unknown field", param=param)
        case "missing" if param is not None:
            return RestError(400, "invalid", f"{param}: required", param=param)
        case "value_error" if param is None:
            # Of the body as a whole.
            return RestError(400, "invalid", first["msg"].removeprefix("Value error, "))
    if param is None:
        return RestError(400, "invalid", "expected a JSON object, sent with `Content-Type: application/json`")
    message = first["msg"].replace("Input should be", "expected").removeprefix("Value error, ")
    return RestError(400, "invalid", f"{param}: {message}", param=param)
