"""What the OpenAPI document says beside what the routes say by themselves: refusals, headers, binary bodies, tokens."""

from typing import Any, TypeAlias

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvtier.config import ServiceSettings
from kvtier.policies import POLICIES
from kvtier.service.cache import STATUSES
from kvtier.service.rest.answers import ErrorAnswer
from kvtier.service.rest.guards import OPEN_PATHS
from kvtier.wire.blockstream import MEDIA_TYPE

__all__ = [
    "BLOCK_HEADERS",
    "STREAM_ANSWER",
    "STREAM_BODY",
    "Responses",
    "block_body",
    "describe",
    "linked",
    "refusals",
]

Responses: TypeAlias = dict[int | str, dict[str, Any]]

_STATUSES: dict[str, int] = {
    **{str(code): status for code, status in STATUSES.items()},
    "request_timeout": 408,
    "invalid_range": 416,
    "too_large_head": 431,
    "internal": 500,
    "unknown_path": 404,
}
_TEXTS = {
    "invalid": "A path, query, header or body is malformed, or names what cannot be",
    "unauthorized": "No token, or one that is unknown, revoked or expired",
    "forbidden": "The token lacks the scope, or does not open this namespace",
    "unknown_namespace": "No such namespace",
    "unknown_path": "No such path, or no name that a path can have",
    "unknown_block": "No such block, or no such part of it",
    "unknown_pin": "No such pin: it ended, or never was",
    "unknown_prefetch": "No such prefetch: it is forgotten, or never was",
    "unknown_tenant": "No such tenant, or not for this token",
    "request_timeout": "The body does not advance",
    "conflict": "It contradicts itself or what is there, such as a namespace of this name, or the quotas of others",
    "wrong_layout": "It does not fit the namespace's layout, or the layout is larger than this service takes",
    "exists": "It is there already, and `If-None-Match: *` was sent",
    "too_large": "The body, a block or a batch is beyond the limits",
    "invalid_range": "The block has none of these bytes",
    "wrong_digest": "The bytes are not what their digest says; nothing was stored",
    "too_large_head": "The head is too long",
    "internal": "The service failed",
    "busy": "Too much is under way: come back after Retry-After",
    "draining": "The service shuts down: come back after Retry-After, or ask another one",
    "unavailable": "A tier could not do it: blocks that were to go are still there, and may be found again",
    "timeout": "Not done within the deadline; where blocks were to go, some may still be there",
    "quota_exceeded": "The tenant's quota has no room; nothing was stored",
}
_ALWAYS = ("invalid", "unauthorized", "forbidden", "too_large_head", "internal", "busy", "draining")
_BODY = ("request_timeout", "too_large")


def refusals(*codes: str, body: bool = False) -> Responses:
    """Responses of a route that may refuse so, beside what every one may.

    Args:
        codes: of the route's own refusals.
        body: whether it takes a body.
    """
    wanted = dict.fromkeys([*_ALWAYS, *(_BODY if body else ()), *codes])
    responses: Responses = {}
    for code in wanted:
        status = _STATUSES[code]
        shown = "too_large" if status == 431 else code
        one = responses.setdefault(status, {"model": ErrorAnswer, "description": "", "content": {}})
        one["description"] = f"{one['description']}; {_TEXTS[code]}" if one["description"] else _TEXTS[code]
        examples = one["content"].setdefault("application/json", {}).setdefault("examples", {})
        examples[shown] = {"value": {"error": {"code": shown, "message": _TEXTS[code], "param": None}}}
        if status == 503:
            one["headers"] = {
                "Retry-After": {"description": "Seconds", "required": True, "schema": {"type": "integer", "minimum": 1}}
            }
        if status == 401:
            one["headers"] = {
                "WWW-Authenticate": {"description": "Always Bearer", "required": True, "schema": {"type": "string"}}
            }
    return responses


def linked(status: int, parameter: str, field: str, *operations: str) -> Responses:
    """Says that an answer's `field` names what these operations take as `parameter`."""
    links = {one: {"operationId": one, "parameters": {parameter: f"$response.body#/{field}"}} for one in operations}
    return {status: {"links": links}}


def _header(text: str, pattern: str, example: str, *, required: bool = True) -> dict[str, Any]:
    return {
        "description": text,
        "required": required,
        "schema": {"type": "string", "pattern": pattern},
        "example": example,
    }


_DIGEST = "7c3a5d6f0b1e2d3c4b5a69788796a5b4"

BLOCK_HEADERS: dict[str, Any] = {
    "ETag": _header("Of these bytes", r'^"xxh3-128-[0-9a-f]{32}"$', f'"xxh3-128-{_DIGEST}"'),
    "KVTier-Digest": _header("xxh3_128 of all of the block's bytes", r"^xxh3-128=[0-9a-f]{32}$", f"xxh3-128={_DIGEST}"),
    "KVTier-Part": _header("group * shards + shard", r"^[0-9]+$", "0"),
    "KVTier-Depth": _header("Position in its chain; -1: unknown", r"^-?[0-9]+$", "0"),
    "KVTier-Parent": _header(
        "Head of the chain key before, 16 bytes", r"^[0-9a-f]{32}$", "00112233445566778899aabbccddeeff", required=False
    ),
    "KVTier-Exact": _header("Whether it is lossless", r"^(true|false)$", "true"),
    "KVTier-Tier": _header("Where it was found", r"^[a-z]+$", "host"),
    "KVTier-Format": _header("Of the body", r"^raw$", "raw"),
    "KVTier-Layout": _header("Fingerprint of the layout", r"^[0-9a-f]{64}$", "ab" * 32, required=False),
}
"""Of answers with a block."""

_BINARY = {"type": "string", "format": "binary"}


def block_body(most: int) -> dict[str, Any]:
    """The body of a put: `most` bytes at most."""
    return {
        "requestBody": {
            "required": True,
            "description": "The block's bytes. As many as the layout says; opaque namespaces take 1 to "
            "`service.max_block`",
            "content": {"application/octet-stream": {"schema": _BINARY | {"minLength": 1, "maxLength": most}}},
        }
    }


STREAM_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A block stream, parents first; docs/rest.md describes it byte by byte",
        "content": {MEDIA_TYPE: {"schema": _BINARY}},
    }
}
STREAM_ANSWER: Responses = {
    200: {"description": "A block stream of what was found", "content": {MEDIA_TYPE: {"schema": _BINARY}}}
}


def _absent_is_not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A header or query that may be left out has no way to be null."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    kind: dict[str, Any] = kinds[0]
    return kind | {name: value for name, value in schema.items() if name not in ("anyOf", "default")}


def describe(app: FastAPI, settings: ServiceSettings, *, tokens: bool) -> dict[str, Any]:
    """The OpenAPI document: FastAPI's, with the limits of this service, and without the refusals that it has not.

    Args:
        app: what is described.
        settings: its limits.
        tokens: whether callers need one.
    """
    document: dict[str, Any] = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=app.openapi_tags,
    )
    components = document["components"]
    components["schemas"]["PinBody"]["properties"]["ttl"]["maximum"] = settings.max_pin_ttl
    components["schemas"]["PolicyBody"]["properties"]["policy"]["enum"] = [*POLICIES.names()]
    if tokens:
        components["securitySchemes"] = {
            "token": {"type": "http", "scheme": "bearer", "description": "Of `kvtier cache token create`"}
        }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = _absent_is_not_null(parameter["schema"])
            # FastAPI's own shape of a validation error; here that is a 400 like any other.
            if operation["responses"].get("422", {}).get("description") == "Validation Error":
                del operation["responses"]["422"]
            if tokens and path not in OPEN_PATHS:
                operation["security"] = [{"token": []}]
            elif not tokens:
                operation["responses"].pop("401", None)
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    return document
