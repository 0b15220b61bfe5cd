"""ApiError: a refusal as the client reads it, in the shape that OpenAI's clients understand."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from kvtier.engine.params import SamplingParams
from kvtier.errors import KVTierError, RequestError

__all__ = ["ApiError", "as_api_error", "from_http", "from_validation"]

_FIRST_WORD = re.compile(r"\w+")
_PARAMETERS = frozenset(field.name for field in fields(SamplingParams))
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(KVTierError):
    """Ends a request with a status code and an error object.

    Args:
        status: of HTTP.
        message: names the value, what was expected and what to do.
        param: the parameter that is wrong, if it is one.
        code: what programs tell errors apart by.
        headers: further ones of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """`{"error": {message, type, param, code}}`."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: KVTierError) -> ApiError:
    """What a client is told of an error of the engine: what it asked for was wrong, or we failed."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, RequestError):
        return ApiError(500, str(error), code="engine_error")
    # Errors about a parameter begin with its name.
    word = _FIRST_WORD.match(str(error))
    param = word[0] if word is not None and word[0] in _PARAMETERS else None
    return ApiError(400, str(error), param=param, code="invalid_value")


def from_http(status: int, detail: str, request: str, headers: Mapping[str, str] | None) -> ApiError:
    """For what the framework refuses by itself: unknown paths, wrong methods, bodies that it cannot read.

    Args:
        status: the framework's.
        detail: the framework's, too.
        request: method and path.
        headers: to be passed on.
    """
    codes = {404: "unknown_path", 405: "method_not_allowed"}
    advice = "; GET /openapi.json says what there is" if status in codes else ""
    return ApiError(status, f"{request}: {detail}{advice}", code=codes.get(status), headers=headers)


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """For a body of the wrong shape; the first error is told.

    Args:
        errors: pydantic's, whose locations begin with `body`.
    """
    first = errors[0]
    # Members of a union appear in the location by the name of their type.
    names = [str(part) for part in first["loc"][1:] if isinstance(part, int) or str(part).isidentifier()]
    param = ".".join(names) or None
    match first["type"]:
        case "json_invalid":
            return ApiError(400, f"the body is no JSON: {first['ctx']['error']}", code="invalid_json")
        case "extra_forbidden":
            return ApiError(400, f"{param}: unknown parameter", param=param, code="unknown_parameter")
        case "missing" if param is not None:
            return ApiError(400, f"{param}: required", param=param, code="missing_parameter")
    if param is None:
        return ApiError(400, "expected a JSON object, sent with `Content-Type: application/json`", code="invalid_json")
    message = first["msg"].replace("Input should be", "expected").removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
