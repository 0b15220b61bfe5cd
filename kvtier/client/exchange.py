"""One request and its answer, as data: what is sent, and what reads what comes. No sockets."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import httpx

from kvtier.client.errors import NotFound, ProtocolError, Refused, refused

__all__ = ["Body", "Call", "Inbox", "JsonReader", "Reader", "pieces", "read_json", "refusal"]

_T = TypeVar("_T")
_Out_co = TypeVar("_Out_co", covariant=True)

_PIECE = 1 << 20
# What a server announces is taken at its word up to here; beyond, memory grows with what arrives.
_PREPARED = 1 << 30
# An error's text; a server that sends more is none of ours.
_LONGEST_ERROR = 1 << 16

Body = Sequence[memoryview | bytes | bytearray]
"""Buffers that are sent one after the other."""


class Reader(Protocol[_Out_co]):
    """Takes the body of an answer as it arrives, and makes the result of it. One for each attempt."""

    def take(self, piece: bytes) -> None:
        """The next bytes."""
        ...

    def result(self) -> _Out_co:
        """After the last byte.

        Raises:
            ClientError: this was no whole answer to the call, or a refusal.
        """
        ...


@dataclass(frozen=True)
class Call(Generic[_T]):
    """What one verb sends, and how its answer is read.

    Args:
        method, path, params, headers, body: of the request.
        reader: headers of an answer that is no refusal -> what reads its body.
        idempotent: it may be made twice.
        missing: codes of a 404 that are no error, and what then is the result.
    """

    method: str
    path: str
    reader: Callable[[httpx.Headers], Reader[_T]]
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body = ()
    idempotent: bool = True
    missing: Mapping[str, _T] = field(default_factory=dict)

    def request(self, session: Any, timeout: float, content: Any) -> httpx.Request:
        """The request, with a length: nothing is sent in chunks."""
        headers = dict(self.headers)
        if self.body:
            headers["Content-Length"] = str(sum(memoryview(piece).nbytes for piece in self.body))
        request: httpx.Request = session.build_request(
            self.method, self.path, params=self.params, headers=headers, content=content, timeout=timeout
        )
        return request

    def answer(self, status: int, headers: httpx.Headers) -> Reader[_T]:
        """What reads the answer that begins so."""
        return self.reader(headers) if 200 <= status < 300 else _Refusing(self, status, headers)


def pieces(body: Body) -> Iterator[memoryview]:
    """The body's bytes, in pieces that a socket takes at once."""
    for one in body:
        view = memoryview(one).cast("B")
        for start in range(0, view.nbytes, _PIECE):
            yield view[start : start + _PIECE]


class Inbox:
    """Reads a body as it is, into one buffer of its announced length, or one that grows."""

    def __init__(self, headers: httpx.Headers) -> None:
        announced = headers.get("Content-Length", "")
        self._buffer = bytearray(min(int(announced), _PREPARED)) if announced.isdigit() else bytearray()
        self._used = 0

    def take(self, piece: bytes) -> None:
        """See `Reader`."""
        self._buffer[self._used : self._used + len(piece)] = piece
        self._used += len(piece)

    def result(self) -> memoryview:
        """What arrived; nobody writes it any more."""
        return memoryview(self._buffer)[: self._used].toreadonly()


class JsonReader(Inbox, Generic[_T]):
    """Reads a body as JSON.

    Args:
        headers: of the answer.
        parse: JSON -> the result.
    """

    def __init__(self, headers: httpx.Headers, parse: Callable[[Any], _T]) -> None:
        super().__init__(headers)
        self._parse = parse

    def result(self) -> _T:  # type: ignore[override]
        """See `Reader`."""
        body = bytes(super().result())
        try:
            return self._parse(json.loads(body) if body else None)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ProtocolError(
                f"{body[:100]!r} is no answer to this call ({error}): is this a kvtier service?"
            ) from error


def read_json(parse: Callable[[Any], _T]) -> Callable[[httpx.Headers], Reader[_T]]:
    """A `Call.reader` for answers in JSON."""
    return lambda headers: JsonReader(headers, parse)


class _Refusing(Generic[_T]):
    """Reads a refusal."""

    def __init__(self, call: Call[_T], status: int, headers: httpx.Headers) -> None:
        self._call = call
        self._status = status
        self._headers = headers
        self._inbox = Inbox(headers)
        self.take = self._inbox.take

    def result(self) -> _T:
        error = refusal(self._status, self._headers, self._inbox.result())
        if isinstance(error, NotFound) and error.code in self._call.missing:
            return self._call.missing[error.code]
        raise error


def refusal(status: int, headers: httpx.Headers, body: memoryview | bytes) -> Refused:
    """The error that an answer tells."""
    code, message = "unknown_block" if status == httpx.codes.NOT_FOUND else "", f"the service answered {status}"
    # HEAD has no body, and a proxy in between writes what it likes.
    if body:
        try:
            told = json.loads(bytes(body[:_LONGEST_ERROR]))["error"]
            code, message = str(told["code"]), str(told["message"])
        except (ValueError, LookupError, TypeError):
            code = "unknown"
    after = headers.get("Retry-After", "")
    return refused(message, status, code, float(after) if after.replace(".", "", 1).isdigit() else None)
