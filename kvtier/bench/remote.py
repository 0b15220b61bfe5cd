"""A server that speaks OpenAI's protocol, as a target. Needs httpx (extra `client`)."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypeVar, get_args
from urllib.parse import urlsplit

import httpx
import msgspec

from kvtier.bench.targets import Failed, Heard, Question, Usage, as_text, printable
from kvtier.client.errors import ClientError, DeadlineExceeded, Interrupted, Unreachable
from kvtier.client.http import session, translated
from kvtier.client.options import ClientOptions
from kvtier.errors import ConfigError

__all__ = ["ENDPOINTS", "Endpoint", "RemoteOptions", "RemoteTarget"]

Endpoint: TypeAlias = Literal["chat", "completions"]
ENDPOINTS: tuple[str, ...] = get_args(Endpoint)

_PATHS: Mapping[str, str] = {"chat": "/chat/completions", "completions": "/completions"}
_CONNECT_SECONDS = 10.0
# Servers end an idle connection after 5 s, as uvicorn has it: none is taken up when that is about to happen.
_KEPT_SECONDS = 2.0
_T = TypeVar("_T")


class _Row(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Row]


class _Said(msgspec.Struct):
    """Of a chat or of a completion. Servers have two names for thoughts."""

    content: str | None = None
    text: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(_Said):
    delta: _Said | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    loaded_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    """Of a stream, or a whole answer."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How a server is asked.

    Args:
        model: which of its models; None: its first.
        endpoint: `chat` or `completions`.
        api_key: sent with each request, if there is one.
        ca_file: certificates that sign the server's, as PEM; None: those of this machine.
        timeout: seconds that it may be silent.
        hints: say which session a request belongs to (`kv_hints`, which kvtier's server knows).
        body: further fields of each request.
    """

    model: str | None = None
    endpoint: Endpoint = "chat"
    api_key: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    timeout: float = 600.0
    hints: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"endpoint {self.endpoint!r}: expected one of {', '.join(ENDPOINTS)}")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout {self.timeout:g}: expected seconds, above 0")


class RemoteTarget:
    """Implements `Target`; see `open`."""

    def __init__(self, place: str, http: httpx.AsyncClient, options: RemoteOptions) -> None:
        self.place = place
        self.model = ""
        self.context: int | None = None
        self._http = http
        self._options = options

    @classmethod
    async def open(cls, url: str, options: RemoteOptions) -> Self:
        """Find a server and its model.

        Args:
            url: its address, with or without `/v1`.
            options: how it is asked.

        Raises:
            ConfigError: the address is none, or the server does not have the model.
            Failed: it cannot be reached, or refuses.
        """
        told = session(
            url if "://" in url else f"http://{url}", options.api_key, ClientOptions(ca_file=options.ca_file)
        )
        base = told.url if urlsplit(told.url).path else f"{told.url}/v1"
        # As many as are asked for: what holds requests back is the bench's matter.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEPT_SECONDS)
        timeout = httpx.Timeout(options.timeout, connect=_CONNECT_SECONDS)
        arguments = told.arguments() | {"base_url": base, "limits": limits, "timeout": timeout}
        target = cls(_shown(url), httpx.AsyncClient(**arguments), options)
        try:
            await target._choose()
        except BaseException:
            await target.close()
            raise
        return target

    async def _choose(self) -> None:
        wanted = self._options.model
        async with self._exchange("GET", "/models", None) as response:
            rows = _decoded(self.place, await response.aread(), _Models).data
        models = {row.id: row for row in rows}
        if not models:
            raise ConfigError(f"{self.place}: GET /models names no model; expected an OpenAI-compatible server")
        if wanted is not None and wanted not in models:
            known = printable(", ".join(models))
            raise ConfigError(f"model {wanted!r}: {self.place} has {known}; name one of these, or none")
        self.model = rows[0].id if wanted is None else wanted
        self.context = models[self.model].max_model_len

    async def count(self, question: Question) -> int | None:
        """See `Target.count`: what the usage of an answer of one token says."""
        async with self._exchange("POST", _PATHS[self._options.endpoint], self._body(question)) as response:
            usage = _decoded(self.place, await response.aread(), _Event).usage
        return None if usage is None else usage.prompt_tokens

    async def answer(self, question: Question) -> AsyncGenerator[Heard, None]:
        """See `Target.answer`: one streamed completion."""
        body = self._body(question) | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._exchange("POST", _PATHS[self._options.endpoint], body) as response:
            ended = False
            async for line in _lines(response):
                if line == b"[DONE]":
                    ended = True
                    continue
                event = _decoded(self.place, line, _Event)
                if event.error:
                    raise Failed("stream_error", f"{self.place}: {_message(event.error)}")
                choices = event.choices or ()
                ended = ended or any(choice.finish_reason is not None for choice in choices)
                said = [choice.delta or choice for choice in choices]
                text = "".join(one.content or one.text or "" for one in said)
                thought = "".join(one.reasoning_content or one.reasoning or "" for one in said)
                if text or thought or event.usage is not None:
                    yield Heard(text, _counted(event.usage), thought)
            if not ended:
                raise Failed(
                    "interrupted", f"{self.place}: the answer broke off: neither [DONE] nor a finish_reason came"
                )

    def _body(self, question: Question) -> dict[str, Any]:
        chosen = {"model": self.model, "max_tokens": question.output_tokens, "temperature": 0}
        if self._options.endpoint == "chat":
            body = chosen | {"messages": list(question.messages)}
        else:
            body = chosen | {"prompt": as_text(question.messages)}
        if self._options.hints and question.session is not None:
            body["kv_hints"] = {"session": question.session, "end_of_session": question.ends_session}
        return body | dict(self._options.body)

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[httpx.Response]:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if content is None else {"Content-Type": "application/json"}
        with _failing(self.place):
            async with self._http.stream(method, path, content=content, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    why = _refusal(await response.aread())
                    raise Failed(f"http_{response.status_code}", f"{self.place}: {response.status_code}: {why}")
                yield response

    async def close(self) -> None:
        """End the connections."""
        await self._http.aclose()


@contextmanager
def _failing(place: str) -> Iterator[None]:
    """Errors of the network become failures by kind."""
    try:
        with translated(place):
            yield
    except ClientError as error:
        raise Failed(_KINDS.get(type(error), "protocol"), str(error)) from error


_KINDS: Mapping[type[ClientError], str] = {
    Unreachable: "unreachable", Interrupted: "interrupted", DeadlineExceeded: "timeout"
}  # fmt: skip


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each event. Lines end with a line feed alone: U+2028 and its like may be within."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _shown(url: str) -> str:
    """Without a name and a password, which are nobody's to read."""
    scheme, separator, rest = url.rpartition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"


def _decoded(place: str, data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = printable(data.decode("utf-8", "replace"))
        raise Failed("protocol", f"{place}: {text!r}: {error}: expected an OpenAI-compatible server") from error


def _refusal(data: bytes) -> str:
    try:
        told = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return printable(data.decode("utf-8", "replace")) or "without a word"
    return _message(told.get("error") or told if isinstance(told, dict) else told)


def _message(error: Any) -> str:
    return printable(str(error["message"] if isinstance(error, dict) and "message" in error else error))


def _counted(told: _Usage | None) -> Usage | None:
    if told is None:
        return None
    details = told.prompt_tokens_details or _Details()
    return Usage(told.prompt_tokens or 0, told.completion_tokens or 0, details.cached_tokens, details.loaded_tokens)
