"""Put and stage: blocks window by window, so that one is received while the one before is stored.

put     socket -> host slot             into memory that becomes the blocks', checksummed as the bytes come; or
        socket -> buffer -> host slot   where host has no room to spare, with copy and checksum in one pass
stage   staging region -> host slot     likewise; a block that the client alters in its region meanwhile may be kept
                                        with the checksum of other bytes: then it is a miss when it is read
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import xxhash

from kvtier.hints import Hint
from kvtier.service.cache import BlockPut, PutOutcome, ServiceError
from kvtier.service.data.exchange import Exchange
from kvtier.service.data.session import Session
from kvtier.store import Received
from kvtier.wire.messages import Asked, Outcomes, Put, Stage, decode, encode
from kvtier.wire.packing import pack_runs, unpack_keys

__all__ = ["answer_put", "answer_stage"]

# To hand one over costs as much as to copy a MiB; two of each connection are lent out.
_WINDOW_BYTES = 16 << 20
_UNDER_WAY = 2
_DIGEST_BYTES = 16
_GRACE_SECONDS = 5.0
_BUFFER_SECONDS = 1.0


class _Item(NamedTuple):
    """One block as it was announced; `digest` is empty where none was."""

    key: bytes
    part: int
    parent: bytes | None
    depth: int
    exact: bool
    nbytes: int
    digest: bytes


class _Puts:
    """The puts that make up one request.

    Args:
        session: whose.
        asked: the request.
    """

    def __init__(self, session: Session, asked: Put | Stage) -> None:
        self.items = _items(session, asked)
        self.outcomes: list[PutOutcome] = []
        self._session = session
        self._ns = asked.ns
        self._hint = None if asked.hint is None else _hint(asked.hint)
        self._deadline = session.deadline(asked.timeout)
        self._under_way: deque[tuple[Future[list[PutOutcome]], ExitStack]] = deque()

    def put(
        self,
        items: Sequence[_Item],
        views: Sequence[memoryview],
        memory: ExitStack,
        owned: Sequence[Received | None] = (),
    ) -> None:
        """Begin to store one window; `memory` is closed when its bytes are not needed any more.

        owned: what the bytes lie in, if that is to become the blocks' memory.
        """
        with memory:
            _check_digests(items, views)
            blocks = [
                BlockPut(item.key, item.part, item.parent, item.depth, item.exact, view, self._hint, handle)
                for item, view, handle in zip(items, views, owned or [None] * len(items), strict=True)
            ]
            session = self._session
            future = session.cache.put(session.caller, self._ns, blocks, deadline=self._deadline)
            self._under_way.append((future, memory.pop_all()))
        while len(self._under_way) >= _UNDER_WAY:
            self._collect()

    def receive(self, exchange: Exchange, items: Sequence[_Item]) -> None:
        """Receive one window and begin to store it: in host memory where there is room, else through a buffer."""
        session, sizes = self._session, [item.nbytes for item in items]
        with ExitStack() as memory:
            names = [(item.key, item.part) for item in items]
            room = session.cache.room(session.caller, self._ns, names, sizes)
            if room is not None:
                memory.callback(room.close)
                checksums = exchange.body(*room.views, heads=room.heads)
                self.put(items, room.views, memory.pop_all(), room.received(checksums))
                return
            buffer = memory.enter_context(session.port.buffers.lend(session.caller.tenant, sum(sizes), _BUFFER_SECONDS))
            exchange.body(buffer)
            self.put(items, _cut(buffer, items), memory.pop_all())

    def finish(self) -> bytes:
        """Wait for all windows; the head that answers the request."""
        while self._under_way:
            self._collect()
        return encode(Outcomes(pack_runs([outcome.value for outcome in self.outcomes])))

    def abandon(self) -> None:
        """Something went wrong: what is under way ends, and its memory is given back then."""
        while self._under_way:
            future, memory = self._under_way.popleft()
            future.add_done_callback(partial(_let_go, memory))

    def _collect(self) -> None:
        future, memory = self._under_way[0]
        try:
            self.outcomes += future.result(self._session.port.settings.request_timeout + _GRACE_SECONDS)
        except NotInTime:
            raise ServiceError("timeout", "the put did not end at its deadline: the host tier hangs") from None
        finally:
            if future.done():
                self._under_way.popleft()
                memory.close()


def _let_go(memory: ExitStack, _: object) -> None:
    memory.close()


def answer_put(exchange: Exchange, session: Session, head: memoryview) -> None:
    """The bytes are the body."""
    puts = _Puts(session, decode(Put, head))
    total = sum(item.nbytes for item in puts.items)
    if total != exchange.unread:
        raise ServiceError("invalid", f"a body of {exchange.unread} bytes: the sizes add up to {total}")
    try:
        for items in _windows(puts.items):
            puts.receive(exchange, items)
        answer = puts.finish()
    finally:
        puts.abandon()
    if not exchange.quiet:
        exchange.owe(answer)


def answer_stage(exchange: Exchange, session: Session, head: memoryview) -> None:
    """The bytes are in the connection's staging region."""
    asked = decode(Stage, head)
    staging = session.staging
    if staging is None:
        raise ServiceError("invalid", "this connection has no staging region: ask for one with its share")
    puts = _Puts(session, asked)
    if len(asked.offsets) != len(puts.items):
        raise ServiceError("invalid", f"{len(asked.offsets)} offsets for {len(puts.items)} items: expected as many")
    views = []
    for offset, item in zip(asked.offsets, puts.items, strict=True):
        if not 0 <= offset <= staging.nbytes - item.nbytes:
            raise ServiceError("invalid", f"{item.nbytes} bytes at {offset}: the region has {staging.nbytes}")
        views.append(staging.view(offset, item.nbytes))
    if views:
        session.staged(min(asked.offsets), sum(asked.sizes))
    try:
        puts.put(puts.items, views, ExitStack())
        answer = puts.finish()
    finally:
        puts.abandon()
    if not exchange.quiet:
        exchange.owe(answer)


def _items(session: Session, asked: Put | Stage) -> list[_Item]:
    keys = session.keys(asked.keys, asked.width)
    count, sizes = len(keys), asked.sizes
    columns: list[Sequence[object]] = [asked.parts, asked.depths, asked.exact]
    if len(sizes) != count or any(column and len(column) != count for column in columns):
        raise ServiceError("invalid", f"{count} keys, {len(sizes)} sizes: expected every column to have one for each")
    if len(asked.digests) not in (0, _DIGEST_BYTES * count):
        raise ServiceError("invalid", f"{len(asked.digests)} bytes of digests: expected {_DIGEST_BYTES} for each key")
    parents = unpack_keys(asked.parents, asked.width) if asked.parents else keys
    if len(parents) != count:
        raise ServiceError("invalid", f"{len(parents)} parents for {count} keys: expected as many, or none")
    settings = session.port.settings
    if count and not 0 < min(sizes) <= max(sizes) <= settings.max_block:
        raise ServiceError("too_large", f"blocks of {min(sizes)} to {max(sizes)} bytes: at most {settings.max_block}")
    if sum(sizes) > settings.max_batch:
        raise ServiceError("too_large", f"{sum(sizes)} bytes in one call: at most {settings.max_batch}; split it")
    depths = asked.depths or [-1] * count
    if not asked.parents and max(depths, default=-1) > 0:
        raise ServiceError("conflict", f"a block at depth {max(depths)} without a parent: send the column of parents")
    return [
        _Item(key, part, parent if depth > 0 else None, depth, exact, nbytes, asked.digests[at : at + _DIGEST_BYTES])
        for key, part, parent, depth, exact, nbytes, at in zip(
            keys,
            asked.parts or [0] * count,
            parents,
            depths,
            asked.exact or [True] * count,
            sizes,
            range(0, _DIGEST_BYTES * count, _DIGEST_BYTES),
            strict=True,
        )
    ]


def _windows(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Whole blocks, about `_WINDOW_BYTES` at a time."""
    start = nbytes = 0
    for at, item in enumerate(items):
        if at > start and nbytes + item.nbytes > _WINDOW_BYTES and item.key != items[at - 1].key:
            yield items[start:at]
            start, nbytes = at, 0
        nbytes += item.nbytes
    if start < len(items):
        yield items[start:]


def _cut(buffer: memoryview, items: Sequence[_Item]) -> list[memoryview]:
    views, offset = [], 0
    for item in items:
        views.append(buffer[offset : offset + item.nbytes])
        offset += item.nbytes
    return views


def _check_digests(items: Sequence[_Item], views: Sequence[memoryview]) -> None:
    for item, view in zip(items, views, strict=True):
        if item.digest and xxhash.xxh3_128_digest(view) != item.digest:
            raise ServiceError("wrong_digest", f"block {item.key.hex()}: its bytes are not those of its digest")


def _hint(asked: Asked) -> Hint:
    return Hint(asked.priority, asked.priority_ttl, asked.ttl, asked.reuse, asked.session)
