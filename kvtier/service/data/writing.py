"""Put and stage: blocks window by window, so that one is received while the one before is stored.

put     socket -> host slot             into memory that becomes the blocks', checksummed as the bytes come; or
        socket -> buffer -> host slot   where host has no room to spare, with copy and checksum in one pass
stage   staging region -> host slot     likewise, copied by the connection's thread or, where there is no room to
                                        spare, by the store's; a block that the client alters in its region meanwhile
                                        may be kept with the checksum of other bytes: a miss when it is read
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import xxhash

from kvtier.hints import Hint
from kvtier.native.checksum import HEAD_BYTES, copy_checksums
from kvtier.service.cache import BlockNames, BlockPut, PutOutcome, Room, ServiceError
from kvtier.service.data.exchange import Exchange
from kvtier.service.data.session import Session
from kvtier.store import Received
from kvtier.wire.messages import Asked, Outcomes, Put, Stage, decode, encode
from kvtier.wire.packing import pack_runs, unpack_keys

__all__ = ["answer_put", "answer_stage"]

# To hand one over costs as much as to copy two MiB; two of each connection are lent out.
_WINDOW_BYTES = 32 << 20
_UNDER_WAY = 2
_DIGEST_BYTES = 16
_GRACE_SECONDS = 5.0
_BUFFER_SECONDS = 1.0


class _Announced(NamedTuple):
    """Blocks as they were announced, a column for each field; none of digests where there are none."""

    keys: Sequence[bytes]
    parts: Sequence[int]
    parents: Sequence[bytes | None]
    depths: Sequence[int]
    exact: Sequence[bool]
    sizes: Sequence[int]
    digests: Sequence[bytes]

    def windows(self) -> "Iterator[_Announced]":
        """Whole blocks, about `_WINDOW_BYTES` at a time."""
        start = nbytes = 0
        for at, size in enumerate(self.sizes):
            if at > start and nbytes + size > _WINDOW_BYTES and self.keys[at] != self.keys[at - 1]:
                yield self._cut(start, at)
                start, nbytes = at, 0
            nbytes += size
        if start < len(self.sizes):
            yield self._cut(start, len(self.sizes))

    def _cut(self, start: int, stop: int) -> "_Announced":
        columns: Any = (column[start:stop] for column in self)
        return _Announced(*columns)


class _Puts:
    """The puts that make up one request.

    Args:
        session: whose.
        asked: the request.
    """

    def __init__(self, session: Session, asked: Put | Stage) -> None:
        self.announced = _announced(session, asked)
        self.outcomes: list[PutOutcome] = []
        self._session = session
        self._ns = asked.ns
        self._hint = None if asked.hint is None else _hint(asked.hint)
        self._deadline = session.deadline(asked.timeout)
        self._under_way: deque[tuple[Future[list[PutOutcome]], ExitStack]] = deque()

    def put(
        self,
        some: _Announced,
        views: Sequence[memoryview],
        memory: ExitStack,
        owned: Iterable[Received | None] = repeat(None),
    ) -> None:
        """Begin to store one window; `memory` is closed when its bytes are not needed any more.

        owned: what the bytes lie in, if that is to become the blocks' memory.
        """
        with memory:
            _check_digests(some, views)
            columns = (some.keys, some.parts, some.parents, some.depths, some.exact, views)
            blocks = list(map(BlockPut, *columns, repeat(self._hint), owned))
            session = self._session
            future = session.cache.put(session.caller, self._ns, blocks, deadline=self._deadline)
            self._under_way.append((future, memory.pop_all()))
        while len(self._under_way) >= _UNDER_WAY:
            self._collect()

    def receive(self, exchange: Exchange, some: _Announced) -> None:
        """Receive one window and begin to store it: in host memory where there is room, else through a buffer."""
        if self._put_in_room(some, lambda room: exchange.body(*room.views, heads=room.heads)):
            return
        with ExitStack() as memory:
            buffer = self._lent(memory, sum(some.sizes))
            exchange.body(buffer)
            self.put(some, _cut(buffer, some.sizes), memory.pop_all())

    def _lent(self, memory: ExitStack, nbytes: int) -> memoryview:
        """A buffer, until `memory` is closed. Where there is none, one's own windows end first: they may have them all.

        Raises:
            ServiceError: busy: others have them.
        """
        lend = partial(self._session.port.buffers.lend, self._session.caller.tenant, nbytes)
        while self._under_way:
            with suppress(ServiceError):
                return memory.enter_context(lend(0.0))
            self._collect()
        return memory.enter_context(lend(_BUFFER_SECONDS))

    def copy(self, views: Sequence[memoryview]) -> None:
        """Begin to store all of it from staging: copied here where there is room, for the store has one thread."""
        some = self.announced
        if not self._put_in_room(some, partial(_copied, views)):
            self.put(some, views, ExitStack())

    def _put_in_room(self, some: _Announced, fill: Callable[[Room], list[bytes]]) -> bool:
        """Fill host memory with the bytes of some blocks and begin to put them; False: there is no room."""
        session, names = self._session, BlockNames(some.keys, some.parts, some.parents)
        room = session.cache.room(session.caller, self._ns, names, some.sizes)
        if room is None:
            return False
        with ExitStack() as memory:
            memory.callback(room.close)
            checksums = fill(room)
            self.put(some, room.views, memory.pop_all(), room.received(checksums))
        return True

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
    total = sum(puts.announced.sizes)
    if total != exchange.unread:
        raise ServiceError("invalid", f"a body of {exchange.unread} bytes: the sizes add up to {total}")
    try:
        for some in puts.announced.windows():
            puts.receive(exchange, some)
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
    sizes = puts.announced.sizes
    if len(asked.offsets) != len(sizes):
        raise ServiceError("invalid", f"{len(asked.offsets)} offsets for {len(sizes)} items: expected as many")
    views = []
    for offset, nbytes in zip(asked.offsets, sizes, strict=True):
        if not 0 <= offset <= staging.nbytes - nbytes:
            raise ServiceError("invalid", f"{nbytes} bytes at {offset}: the region has {staging.nbytes}")
        views.append(staging.view(offset, nbytes))
    if views:
        session.staged(min(asked.offsets), sum(asked.sizes))
    try:
        puts.copy(views)
        answer = puts.finish()
    finally:
        puts.abandon()
    if not exchange.quiet:
        exchange.owe(answer)


def _announced(session: Session, asked: Put | Stage) -> _Announced:
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
    parts, exact = asked.parts or [0] * count, asked.exact or [True] * count
    named = [parent if depth > 0 else None for parent, depth in zip(parents, depths, strict=True)]
    digests = [asked.digests[at : at + _DIGEST_BYTES] for at in range(0, len(asked.digests), _DIGEST_BYTES)]
    return _Announced(keys, parts, named, depths, exact, sizes, digests)


def _cut(buffer: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    return [buffer[stop - nbytes : stop] for nbytes, stop in zip(sizes, accumulate(sizes), strict=True)]


def _copied(views: Sequence[memoryview], room: Room) -> list[bytes]:
    heads = [head or bytes(HEAD_BYTES) for head in room.heads]
    return copy_checksums(heads, list(views), list(room.views), [view.nbytes for view in views])


def _check_digests(some: _Announced, views: Sequence[memoryview]) -> None:
    for key, digest, view in zip(some.keys, some.digests, views, strict=False):
        if xxhash.xxh3_128_digest(view) != digest:
            raise ServiceError("wrong_digest", f"block {key.hex()}: its bytes are not those of its digest")


def _hint(asked: Asked) -> Hint:
    return Hint(asked.priority, asked.priority_ttl, asked.ttl, asked.reuse, asked.session)
