"""One block: put, get, head, delete."""

import asyncio
import hashlib
from typing import Annotated, Any, Literal

import xxhash
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from kvtier.service.cache import BlockPut, Cache, Found, NamespaceInfo, PutOutcome, Reading, Scope, ServiceError
from kvtier.service.cache.callers import require
from kvtier.service.rest.answers import DeleteAnswer, PutAnswer
from kvtier.service.rest.calls import CallerOf, Key, Ns, Service, opened, settled
from kvtier.service.rest.errors import RestError
from kvtier.service.rest.headers import documented, read_headers
from kvtier.service.rest.heads import KEY_PATTERN, block_headers, content_digest, etag, matches_tag, span_of
from kvtier.service.rest.memory import Buffer
from kvtier.service.rest.sending import BlockReply
from kvtier.service.rest.spec import BLOCK_HEADERS, Responses, block_body, refusals

__all__ = ["block_routes"]

_PATH = "/v1/namespaces/{ns:part}/blocks/{key:part}"
_FAR = 4 << 20
"""Bytes whose digest is not computed between two events of the loop."""

_DIGEST_PATTERN = r"^xxh3-128=[0-9a-f]{32}$"
_LAYOUT_PATTERN = r"^[0-9a-f]{64}$"


class PutHeads(BaseModel):
    """Headers of a put."""

    digest: str | None = Field(
        None,
        alias="KVTier-Digest",
        pattern=_DIGEST_PATTERN,
        description="Checked",
        examples=["xxh3-128=" + "7c3a5d6f0b1e2d3c" * 2],
    )
    content_digest: str | None = Field(
        None, alias="Content-Digest", max_length=1024, description="RFC 9530; its sha-256 is checked"
    )
    part: int = Field(0, alias="KVTier-Part", ge=0, lt=1 << 16, description="group * shards + shard")
    parent: str | None = Field(
        None, alias="KVTier-Parent", pattern=KEY_PATTERN, description="Chain key of the block before"
    )
    depth: int = Field(-1, alias="KVTier-Depth", ge=-1, lt=1 << 31, description="Position in its chain, 0 first")
    exact: Literal["true", "false"] = Field("true", alias="KVTier-Exact", description="Whether it is lossless")
    format: Literal["raw"] = Field("raw", alias="KVTier-Format", description="Of the body")
    encoding: Literal["identity"] = Field(
        "identity", alias="Content-Encoding", description="None: blocks are stored as they come"
    )
    layout: str | None = Field(
        None, alias="KVTier-Layout", pattern=_LAYOUT_PATTERN, description="Fingerprint that the namespace must have"
    )
    if_none_match: Literal["*"] | None = Field(None, alias="If-None-Match", description="The first writer wins")


class GetHeads(BaseModel):
    """Headers of a get."""

    part: int = Field(0, alias="KVTier-Part", ge=0, lt=1 << 16, description="group * shards + shard")
    if_none_match: str | None = Field(
        None, alias="If-None-Match", max_length=1024, description="Entity tags; no bytes where they are one of these"
    )
    range: str | None = Field(None, alias="Range", max_length=1024, description="One range of bytes")
    if_range: str | None = Field(
        None, alias="If-Range", max_length=1024, description="The range only where the bytes have this entity tag"
    )


_Lossy = Annotated[bool, Query(description="Whether a block that went through a lossy format will do")]

_PUT_REFUSES = ("unknown_namespace", "wrong_layout", "conflict", "exists", "wrong_digest", "quota_exceeded", "timeout")
_ANSWERS: Responses = {
    200: {
        "description": "The block's bytes",
        "headers": BLOCK_HEADERS,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    },
    206: {
        "description": "A range of them",
        "headers": BLOCK_HEADERS,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    },
    304: {"description": "The bytes are those of `If-None-Match`", "headers": BLOCK_HEADERS},
}


def block_routes(service: Service) -> APIRouter:
    """Routes of single blocks."""
    router = APIRouter(tags=["blocks"])
    _add_put(router, service)
    _add_get(router, service.cache)

    @router.delete(
        _PATH, responses=refusals("unknown_namespace", "unavailable", "timeout"), dependencies=[service.turn]
    )
    def delete_block(caller: CallerOf, ns: Ns, key: Key) -> DeleteAnswer:
        """Remove one block, all its parts, and what descends from it."""
        return DeleteAnswer(deleted=service.cache.delete(caller, ns, [bytes.fromhex(key)]))

    return router


def _add_put(router: APIRouter, service: Service) -> None:
    cache = service.cache

    @router.put(
        _PATH,
        status_code=201,
        responses={
            200: {"model": PutAnswer, "description": "It was there already"},
            **refusals(*_PUT_REFUSES, body=True),
        },
        openapi_extra={**block_body(service.settings.max_block), "parameters": documented(PutHeads)},
    )
    async def put_block(request: Request, response: Response, caller: CallerOf, ns: Ns, key: Key) -> PutAnswer:
        """Store one block, or one part of it."""
        heads = read_headers(PutHeads, request.scope)
        require(caller, Scope.WRITE)
        size = _expected(cache.namespace(caller, ns), heads, request.headers.get("content-length"))
        buffer = service.pool.take(caller.tenant, min(size, service.settings.max_block))
        try:
            data = await _received(request, buffer, heads)
            parent = None if heads.parent is None else bytes.fromhex(heads.parent)
            block = BlockPut(bytes.fromhex(key), heads.part, parent, heads.depth, heads.exact == "true", data)
            future = cache.put(caller, ns, [block])
        except BaseException:
            buffer.release()
            raise
        (outcome,) = await settled(future, buffer.release)
        if outcome is PutOutcome.DROPPED:
            raise ServiceError(
                "quota_exceeded", f"block {key}: no room for it, or its parent is not there: put parents first"
            )
        if outcome is PutOutcome.EXISTS:
            if heads.if_none_match is not None:
                raise ServiceError("exists", f"block {key}, part {heads.part}: it is there already")
            response.status_code = 200
        return PutAnswer(outcome=outcome)


def _add_get(router: APIRouter, cache: Cache) -> None:
    answers: dict[str, Any] = {
        "response_class": Response,
        "openapi_extra": {"parameters": documented(GetHeads)},
        "responses": _ANSWERS | refusals("unknown_namespace", "unknown_block", "invalid_range", "timeout"),
    }

    @router.head(_PATH, **answers)
    @router.get(_PATH, **answers)
    async def get_block(request: Request, caller: CallerOf, ns: Ns, key: Key, *, lossy: _Lossy = False) -> Response:
        """Get one block, or one part of it."""
        heads = read_headers(GetHeads, request.scope)
        info = cache.namespace(caller, ns)
        if heads.part >= info.parts:
            raise ServiceError("unknown_block", f"part {heads.part}: the namespace has {info.parts}, counted from 0")
        future = cache.read(caller, ns, [bytes.fromhex(key)], parts=[heads.part], owner="rest", lossy=lossy, each=True)
        reading = await opened(future)
        try:
            return await _answer(reading, heads, info.fingerprint)
        except BaseException:
            reading.close()
            raise


def _expected(info: NamespaceInfo, heads: PutHeads, announced: str | None) -> int:
    """Bytes that the body may have, at most."""
    fingerprint = "" if info.fingerprint is None else info.fingerprint.hex()
    if heads.layout is not None and heads.layout != fingerprint:
        has = fingerprint or "none: it is opaque"
        raise ServiceError("wrong_layout", f"KVTier-Layout {heads.layout}: the namespace has {has}")
    if heads.part >= info.parts:
        raise ServiceError("wrong_layout", f"part {heads.part}: the namespace has {info.parts}, counted from 0")
    wanted = info.block_bytes[heads.part] if info.block_bytes else None
    length = None if announced is None else int(announced)
    if length == 0:
        raise RestError(400, "invalid", "an empty body: send the block's bytes")
    if wanted is not None and length is not None and length != wanted:
        raise ServiceError(
            "wrong_layout", f"{length} bytes for part {heads.part}: the namespace's blocks have {wanted}"
        )
    return wanted or length or 1 << 63


async def _received(request: Request, buffer: Buffer, heads: PutHeads) -> memoryview:
    """The whole body, checked against what its headers say."""
    view, size = buffer.view, 0
    told, fast = heads.digest, xxhash.xxh3_128()
    sha_told = content_digest(heads.content_digest)
    sha = None if sha_told is None else hashlib.sha256()
    async for piece in request.stream():
        if size + len(piece) > len(view):
            raise ServiceError("too_large", f"the body is larger than the {len(view)} bytes that a block may have here")
        view[size : size + len(piece)] = piece
        size += len(piece)
        if told is not None:
            fast.update(piece)
        if sha is not None:
            sha.update(piece)
    if not size:
        raise RestError(400, "invalid", "an empty body: send the block's bytes")
    if told is not None and told != f"xxh3-128={fast.hexdigest()}":
        raise ServiceError(
            "wrong_digest", f"KVTier-Digest {told}: the body has xxh3-128={fast.hexdigest()}; send it again"
        )
    if sha is not None and sha.digest() != sha_told:
        raise ServiceError("wrong_digest", "Content-Digest: the body has another sha-256; send it again")
    return view[:size]


async def _answer(reading: Reading, heads: GetHeads, fingerprint: bytes | None) -> Response:
    if not reading.blocks:
        raise ServiceError("unknown_block", "no such block in this namespace, or no such part of it")
    block = reading.blocks[0]
    # The first look computes it.
    digest = await asyncio.to_thread(_digest, block) if block.nbytes > _FAR else block.digest
    headers, tag = block_headers(block, fingerprint), etag(digest)
    if heads.if_none_match is not None and matches_tag(heads.if_none_match, tag):
        reading.close()
        return Response(None, 304, headers)
    # An entity tag of other bytes, or a date: the whole block (RFC 9110, 13.1.5).
    span = span_of(heads.range, block.nbytes) if heads.if_range in (None, tag) else None
    if span is None:
        return BlockReply(reading, [block.data], block.nbytes, headers=headers)
    headers["Content-Range"] = f"bytes {span.first}-{span.last}/{block.nbytes}"
    data = block.data[span.first : span.last + 1]
    return BlockReply(reading, [data], len(data), status=206, headers=headers)


def _digest(block: Found) -> bytes:
    return block.digest
