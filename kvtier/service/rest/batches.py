"""Many blocks in one call: get and put as a block stream; match, delete and hint by their keys."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from fastapi import APIRouter, Request, Response

from kvtier.config import ServiceSettings
from kvtier.errors import KVTierError
from kvtier.hints import Hint
from kvtier.service.cache import BlockPut, Cache, Found, Reading, Scope, ServiceError
from kvtier.service.cache.callers import require
from kvtier.service.rest.answers import DeleteAnswer, MatchAnswer, PutsAnswer
from kvtier.service.rest.bodies import HintBody, KeysBody, MatchBody, ReadBody
from kvtier.service.rest.calls import CallerOf, Ns, Service, deadline, opened, settled
from kvtier.service.rest.errors import RestError
from kvtier.service.rest.memory import Buffer, BufferPool
from kvtier.service.rest.sending import BlockReply
from kvtier.service.rest.spec import STREAM_ANSWER, STREAM_BODY, refusals
from kvtier.wire.blockstream import (
    MEDIA_TYPE,
    STREAM_BEGIN,
    STREAM_END,
    BlockHead,
    StreamDamaged,
    StreamDecoder,
    StreamError,
    record_head,
)

__all__ = ["batch_routes"]

_PATH = "/v1/namespaces/{ns:part}/blocks:"
_NO_DIGEST = "0" * 32


def batch_routes(service: Service) -> APIRouter:
    """Routes of batches."""
    router = APIRouter(tags=["blocks"])
    _add_streams(router, service)
    keyed = APIRouter(dependencies=[service.turn])
    _add_keyed(keyed, service.cache)
    router.include_router(keyed)
    return router


def _add_streams(router: APIRouter, service: Service) -> None:
    cache = service.cache

    @router.post(
        _PATH + "get",
        response_class=Response,
        responses=STREAM_ANSWER | refusals("unknown_namespace", "unknown_block", "timeout", body=True),
    )
    async def get_blocks(caller: CallerOf, ns: Ns, body: ReadBody) -> Response:
        """Get the leading run of some blocks, or whatever of them is there, as a block stream."""
        future = cache.read(
            caller,
            ns,
            body.packed(),
            parts=body.parts,
            owner="rest",
            lossy=body.lossy,
            each=body.each,
            deadline=deadline(body.timeout),
            depth=body.depth,
        )
        reading = await opened(future)
        try:
            return _stream(reading)
        except BaseException:
            reading.close()
            raise

    @router.post(
        _PATH + "put",
        responses=refusals("unknown_namespace", "wrong_layout", "conflict", "wrong_digest", "timeout", body=True),
        openapi_extra=STREAM_BODY,
    )
    async def put_blocks(request: Request, caller: CallerOf, ns: Ns) -> PutsAnswer:
        """Store blocks out of a block stream: none of them unless the stream is whole and sound."""
        require(caller, Scope.WRITE)
        cache.namespace(caller, ns)
        _check_type(request.headers.get("content-type", ""))
        intake = _Intake(service.pool, caller.tenant, service.settings)
        try:
            future = cache.put(caller, ns, await _received(request, intake))
        except BaseException:
            intake.release()
            raise
        return PutsAnswer(outcomes=await settled(future, intake.release))


def _add_keyed(router: APIRouter, cache: Cache) -> None:
    @router.post("/v1/match", responses=refusals("unknown_namespace", "wrong_layout", body=True))
    def match_blocks(caller: CallerOf, body: MatchBody) -> MatchAnswer:
        """Where the leading run of a prefix lies; moves nothing, and promises nothing."""
        if body.tokens is None:
            keys = [bytes.fromhex(key) for key in body.keys or ()]
            tiers = cache.match(caller, body.namespace, keys, lossy=body.lossy, depth=body.depth)
            return MatchAnswer(blocks=len(tiers), tiers=list(tiers), keys=None)
        extras = {int(at): bytes.fromhex(extra) for at, extra in (body.extras or {}).items()}
        keys, tiers = cache.match_tokens(caller, body.namespace, body.tokens, extras, lossy=body.lossy)
        return MatchAnswer(blocks=len(tiers), tiers=list(tiers), keys=[key.hex() for key in keys])

    @router.post(_PATH + "delete", responses=refusals("unknown_namespace", "unavailable", "timeout", body=True))
    def delete_blocks(caller: CallerOf, ns: Ns, body: KeysBody) -> DeleteAnswer:
        """Remove blocks, all their parts, and what descends from them."""
        return DeleteAnswer(deleted=cache.delete(caller, ns, body.packed()))

    @router.post(_PATH + "hint", status_code=204, responses=refusals("unknown_namespace", body=True))
    def hint_blocks(caller: CallerOf, ns: Ns, body: HintBody) -> None:
        """Say what is known of blocks' future; absent ones are ignored."""
        cache.hint(caller, ns, body.packed(), body.hints(), first=body.first)


# ---- out


def _stream(reading: Reading) -> BlockReply:
    blocks = reading.blocks
    length = len(STREAM_BEGIN) + reading.nbytes + len(STREAM_END)
    # A digest is as long as any other.
    length += sum(len(record_head(_head(block, _NO_DIGEST), block.nbytes)) for block in blocks)
    return BlockReply(
        reading, _pieces(blocks), length, media_type=MEDIA_TYPE, headers={"Cache-Control": "private, no-cache"}
    )


def _pieces(blocks: list[Found]) -> Iterator[bytes | memoryview]:
    yield STREAM_BEGIN
    for block in blocks:
        # The pass over the bytes comes right before they are sent.
        yield record_head(_head(block, block.digest.hex()), block.nbytes)
        yield block.data
    yield STREAM_END


def _head(block: Found, digest: str) -> BlockHead:
    parent = None if block.parent is None else block.parent.hex()
    return BlockHead(block.key.hex(), block.part, parent, block.depth, block.exact, digest, block.tier)


# ---- in


@dataclass(slots=True)
class _Intake:
    """Memory of one batch on its way in: a buffer for each block."""

    pool: BufferPool
    tenant: str
    settings: ServiceSettings
    buffers: list[Buffer] = field(default_factory=list)
    size: int = 0

    def place(self, head: BlockHead, nbytes: int) -> memoryview:
        """Memory for one block."""
        self.size += nbytes
        block, batch, records = self.settings.max_block, self.settings.max_batch, self.settings.max_batch_keys
        if nbytes > block or self.size > batch or len(self.buffers) == records:
            raise ServiceError(
                "too_large",
                f"record {len(self.buffers)} of {nbytes} bytes, {self.size} bytes so far: expected at most {block} "
                f"bytes in a block, {records} records and {batch} bytes in a batch",
            )
        self.buffers.append(self.pool.take(self.tenant, nbytes))
        return self.buffers[-1].view

    def release(self) -> None:
        """Give all of it back."""
        while self.buffers:
            self.buffers.pop().release()


async def _received(request: Request, intake: _Intake) -> list[BlockPut]:
    """The blocks of a whole stream."""
    decoder = StreamDecoder(intake.place)
    try:
        async for piece in request.stream():
            decoder.feed(piece)
        blocks = decoder.finish()
    except StreamDamaged as error:
        raise ServiceError("wrong_digest", str(error)) from error
    except StreamError as error:
        raise ServiceError("invalid", str(error)) from error
    if not blocks:
        raise ServiceError("invalid", "a stream without records: expected at least one")
    return [_put(head, data) for head, data in blocks]


def _put(head: BlockHead, data: memoryview) -> BlockPut:
    try:
        hint = None if head.hint is None else Hint(**msgspec.structs.asdict(head.hint))
    except KVTierError as error:
        raise ServiceError("invalid", f"block {head.key}: hint: {error}") from error
    parent = None if head.parent is None else bytes.fromhex(head.parent)
    return BlockPut(bytes.fromhex(head.key), head.part, parent, head.depth, head.exact, data, hint)


def _check_type(content_type: str) -> None:
    if content_type.partition(";")[0].strip().lower() != MEDIA_TYPE:
        raise RestError(400, "invalid", f"expected a body of `Content-Type: {MEDIA_TYPE}`", param="Content-Type")
