"""Get and lease: blocks window by window, so that one is found and verified while the one before is on its way."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, NamedTuple

from kvtier.keys import STORE_KEY_BYTES
from kvtier.service.cache import Found, Reading, ServiceError
from kvtier.service.data.exchange import Exchange
from kvtier.service.data.session import Session
from kvtier.wire.frames import Flag
from kvtier.wire.messages import Get, Got, Lease, Leased, decode, encode
from kvtier.wire.packing import pack_runs

__all__ = ["answer_get", "answer_lease"]

# The first window is on its way soon; later ones cost less per byte.
_WINDOW_BYTES = 2 << 20
_WIDEST_BYTES = 16 << 20
# Of blocks whose size is not known before they are found.
_OPAQUE_BLOCKS = 4
# A cache ends its calls in time; where it does not, the connection is not to hang.
_GRACE_SECONDS = 5.0
_BUSY_SECONDS = 0.02

_NO_PARENT = bytes(STORE_KEY_BYTES)


class _Window(NamedTuple):
    """A reading of consecutive keys, the first at `start`; `more`: others may follow."""

    start: int
    reading: Reading
    more: bool


class _Windows:
    """The readings that make up one request, each asked for while the one before is used.

    Args:
        session: whose.
        asked: the request.
    """

    def __init__(self, session: Session, asked: Get | Lease) -> None:
        self._session = session
        self._asked = asked
        self._keys = session.keys(asked.keys, asked.width)
        self._deadline = session.deadline(asked.timeout)
        sizes = session.cache.block_bytes(session.caller, asked.ns)
        parts = range(len(sizes) or 1) if asked.parts is None else asked.parts
        if not parts:
            raise ServiceError("invalid", "parts []: expected at least one")
        if not all(0 <= part < (len(sizes) or 1) for part in parts):
            raise ServiceError("unknown_block", f"parts {asked.parts}: {asked.ns} has {len(sizes) or 1}")
        self._parts = parts
        most = session.cache.settings.max_batch
        self._widest = min(_WIDEST_BYTES, most)
        self._typical = 0
        known = sum(sizes[part] for part in parts) if sizes else session.typical.get(asked.ns, 0)
        self._count = max(1, min(_WINDOW_BYTES, most) // known) if known else _OPAQUE_BLOCKS

    def __iter__(self) -> Iterator[_Window]:
        start, keys, future = 0, *self._ask(0)
        following: Future[Reading] | None = None
        try:
            while future is not None:
                follows, following = self._ask(start + len(keys))
                asked, (keys, reading) = len(keys), self._result(future, start, keys)
                future = None
                self._widen(reading)
                if following is not None and len(keys) < asked:
                    # It begins behind what was left out.
                    following.add_done_callback(_close)
                    following = None
                more = start + len(keys) < len(self._keys) and (self._asked.each or reading.found == len(keys))
                # Whoever takes the window closes its reading.
                yield _Window(start, reading, more)
                if not more:
                    return
                start += len(keys)
                keys, future = self._ask(start) if following is None else (follows, following)
                following = None
        finally:
            for left in (future, following):
                if left is not None:
                    left.add_done_callback(_close)

    def whole(self) -> _Window:
        """All of it as one window."""
        _, reading = self._result(self._read(0, self._keys), 0, self._keys, least=len(self._keys))
        return _Window(0, reading, more=False)

    def _ask(self, start: int) -> "tuple[Sequence[bytes], Future[Reading] | None]":
        keys = self._keys[start : start + self._count]
        return keys, self._read(start, keys) if keys or not start else None

    def _read(self, start: int, keys: Sequence[bytes]) -> "Future[Reading]":
        session, asked = self._session, self._asked
        return session.cache.read(
            session.caller,
            asked.ns,
            keys,
            # Named, for the namespace may become another one meanwhile.
            parts=self._parts,
            owner=session.owner,
            lossy=asked.lossy,
            each=asked.each,
            deadline=self._deadline,
            depth=asked.depth + start,
            checked=not asked.unchecked,
        )

    def _widen(self, reading: Reading) -> None:
        if reading.nbytes and reading.found:
            typical = self._session.typical
            if len(typical) >= self._session.cache.settings.max_namespaces:
                # Names come and go; those that are there now are learned again.
                typical.clear()
            self._typical = typical[self._asked.ns] = max(self._typical, reading.nbytes // reading.found)
            self._count = max(1, min(2 * self._count, self._widest * reading.found // reading.nbytes))

    def _result(
        self, future: "Future[Reading]", start: int, keys: Sequence[bytes], least: int = 1
    ) -> tuple[Sequence[bytes], Reading]:
        """The reading of as many of the keys as one may have at a time, `least` of them."""
        while True:
            try:
                return keys, future.result(self._session.port.settings.request_timeout + _GRACE_SECONDS)
            except NotInTime:
                raise ServiceError("timeout", "the read did not end at its deadline: a tier hangs") from None
            except ServiceError as error:
                if error.code == "too_large" and len(keys) > least:
                    # They are larger than those that were read before.
                    keys = keys[: max(least, len(keys) // 2)]
                    self._count = len(keys)
                # Once some of the answer is under way, what others hold is waited for: this request holds nothing now.
                elif error.code == "busy" and start and time.monotonic() <= self._deadline:
                    time.sleep(_BUSY_SECONDS)
                else:
                    raise
            future = self._read(start, keys)


def _close(future: "Future[Reading]") -> None:
    if future.exception() is None:
        future.result().close()


def answer_get(exchange: Exchange, session: Session, head: memoryview) -> None:
    """One answer per window; the bytes go from host memory into the socket."""
    asked = decode(Get, head)
    if asked.unchecked and (asked.digests or asked.limit is not None):
        raise ServiceError(
            "invalid", "an unchecked get with digests or a limit: its bytes are verified whole, by heads"
        )
    for window in _Windows(session, asked):
        with window.reading as reading:
            found = reading.blocks
            digests = b"".join([block.digest for block in found]) if asked.digests else b""
            answer = Got(**_columns(window, found), **_guards(asked, found), digests=digests)
            flags = Flag.MORE if window.more else Flag.NONE
            exchange.answer(encode(answer), [block.data[: asked.limit] for block in found], flags)


def answer_lease(exchange: Exchange, session: Session, head: memoryview) -> None:
    """Where the bytes lie in the shared regions: one hold until it is released, or the connection ends."""
    asked = decode(Lease, head)
    session.require_shared()
    window = _Windows(session, asked).whole()
    try:
        answer = _leased(session, window, asked)
    except BaseException:
        window.reading.close()
        raise
    exchange.owe(encode(answer))


def _leased(session: Session, window: _Window, asked: Lease) -> Leased:
    found = window.reading.blocks
    spans = [span for block in found if (span := block.span) is not None]
    if len(spans) < len(found):
        raise ServiceError("conflict", f"blocks of namespace {asked.ns} lie encoded in host: get them instead")
    regions, offsets = [span.region for span in spans], [span.offset for span in spans]
    columns = _columns(window, found) | _guards(asked, found)
    if not found:
        # Nobody would release it: it would be held for as long as the connection lives.
        window.reading.close()
        return Leased(**columns)
    return Leased(**columns, lease=session.keep(window.reading), regions=regions, offsets=offsets)


def _columns(window: _Window, found: Sequence[Found]) -> dict[str, Any]:
    parents = [block.parent for block in found]
    return {
        "at": [window.start + block.at for block in found],
        "parts": [block.part for block in found],
        "sizes": [block.nbytes for block in found],
        "exact": [block.exact for block in found],
        "depths": [block.depth for block in found],
        "parents": b"".join([parent or _NO_PARENT for parent in parents]) if any(parents) else b"",
        "tiers": pack_runs([block.tier for block in found]),
    }


def _guards(asked: Get | Lease, found: Sequence[Found]) -> dict[str, Any]:
    """What the client verifies unchecked items with."""
    if not asked.unchecked:
        return {}
    guards = [guard for block in found if (guard := block.guard) is not None]
    return {"heads": b"".join([head for head, _ in guards]), "checksums": b"".join([sum_ for _, sum_ in guards])}
