"""Who answers in `kvtier chat`: a model in this process, or a server."""

import asyncio
import http.client
import json
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import SplitResult, urlsplit
from uuid import uuid4

from kvtier.client.bearer import bearer
from kvtier.engine.outputs import RequestOutput
from kvtier.engine.params import SamplingParams
from kvtier.errors import ConfigError, KVTierError
from kvtier.hints import RequestHints

if TYPE_CHECKING:
    from kvtier.api import AsyncLLM

__all__ = ["LocalPartner", "Partner", "RemotePartner", "Style", "Turn"]

_CONNECT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Style:
    """How answers are chosen."""

    max_tokens: int | None
    temperature: float
    seed: int | None


@dataclass(frozen=True, slots=True)
class Turn:
    """What one answer took. found: tokens of the prompt whose KV was there already, by where. Times are seconds."""

    prompt_tokens: int
    output_tokens: int
    ttft: float
    tpot: float
    found: Mapping[str, int] = field(default_factory=dict)


class Partner(Protocol):
    """Somebody to talk to."""

    @property
    def name(self) -> str:
        """The model's."""
        ...

    @property
    def turn(self) -> Turn | None:
        """What the last answer took; None if it was interrupted before that was known."""
        ...

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Generator[str, None, None]:
        """Answer a conversation piece by piece. Raises KVTierError."""
        ...

    def close(self) -> None:
        """No more will be asked."""
        ...


class LocalPartner:
    """A model in this process. Implements `Partner`.

    Args:
        llm: closed at the end.
        name: of the model.
        style: of the answers.
    """

    def __init__(self, llm: "AsyncLLM", name: str, style: Style) -> None:
        self.name = name
        self.turn: Turn | None = None
        self._llm = llm
        self._params = SamplingParams(max_tokens=style.max_tokens, temperature=style.temperature, seed=style.seed)
        self._hints = RequestHints(session=f"chat-{uuid4().hex}")
        self._runner = asyncio.Runner()

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Generator[str, None, None]:
        """One request; its session is the process's."""
        self.turn = None
        before = self._llm.loaded_bytes()
        stream = self._llm.chat(messages, self._params, hints=self._hints)
        try:
            while (output := self._runner.run(_next(stream))) is not None:
                if output.delta:
                    yield output.delta
                if output.finish_reason is not None:
                    self.turn = self._took(output, before)
        finally:
            # Whoever stops listening stops the request.
            self._runner.run(_close(stream))

    def _took(self, output: RequestOutput, before: Mapping[str, int]) -> Turn:
        metrics = output.metrics
        loaded = {name: nbytes - before[name] for name, nbytes in self._llm.loaded_bytes().items()}
        total = max(1, sum(loaded.values()))
        # One format in the gateway means one size of a token, wherever it was found.
        found = {name: round(metrics.loaded_tokens * nbytes / total) for name, nbytes in loaded.items()}
        return Turn(
            output.prompt_tokens,
            metrics.output_tokens,
            metrics.ttft,
            metrics.tpot,
            {"device": metrics.cached_tokens} | found,
        )

    def close(self) -> None:
        """Close the model and its tiers."""
        self._runner.close()
        self._llm.close()


async def _next(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(stream, None)


async def _close(stream: AsyncGenerator[RequestOutput, None]) -> None:
    await stream.aclose()


class RemotePartner:
    """An OpenAI-compatible server. Implements `Partner`.

    Args:
        url: its address, with or without `/v1`.
        api_key: sent with each request, if there is one.
        style: of the answers.

    Raises:
        ConfigError: the address is none, or no header can carry the key.
        KVTierError: the server cannot be reached, or has no model.
    """

    def __init__(self, url: str, api_key: str | None, style: Style) -> None:
        parts = _address(url)
        self.turn: Turn | None = None
        self._url = url
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/") or "/v1"
        self._headers = {"Content-Type": "application/json"} | bearer(api_key)
        chosen = {"max_tokens": style.max_tokens, "temperature": style.temperature, "seed": style.seed}
        self._style = {name: value for name, value in chosen.items() if value is not None}
        self.name = self._first_model()

    def _first_model(self) -> str:
        rows = json.loads(self._ask("GET", "/models", None).read())["data"]
        if not rows:
            raise KVTierError(f"{self._url}: the server has no model")
        return str(rows[0]["id"])

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Generator[str, None, None]:
        """One streamed chat completion."""
        self.turn = None
        body = {"model": self.name, "messages": list(messages), "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self._style}
        began = time.perf_counter()
        first = last = began
        with self._ask("POST", "/chat/completions", body) as response:
            for event in self._events(response):
                for choice in event.get("choices", ()):
                    delta = choice["delta"].get("content")
                    if delta:
                        last = time.perf_counter()
                        first = last if first == began else first
                        yield delta
                if event.get("usage"):
                    self.turn = _turn(event["usage"], first - began, last - first)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        try:
            for line in response:
                name, _, data = line.decode().strip().partition(": ")
                if name == "data" and data != "[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise KVTierError(f"{self._url}: {event['error']['message']}")
                    yield event
        except (OSError, http.client.HTTPException) as error:
            raise KVTierError(f"{self._url}: the answer broke off: {error}") from error

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        connection = self._connect(self._host, timeout=_CONNECT_SECONDS)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, data, {**self._headers, "Connection": "close"})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise KVTierError(f"{self._url}: {error}: is the server running there?") from error
        if response.status != http.HTTPStatus.OK:
            raise KVTierError(f"{self._url}: {_message(response)}")
        return response

    def close(self) -> None:
        """Nothing is held between two answers."""


def _address(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ConfigError(f"--url {url!r}: expected something like http://127.0.0.1:8000")
    return parts


def _message(response: http.client.HTTPResponse) -> str:
    text = response.read().decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):
        return f"{response.status}: {json.loads(text)['error']['message']}"
    return f"{response.status} {response.reason}: {text[:200]}"


def _turn(usage: Mapping[str, Any], ttft: float, rest: float) -> Turn:
    output = usage["completion_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    # Servers other than kvtier's do not say where.
    found = {"cache": details.get("cached_tokens") or 0}
    if "device_tokens" in details:
        found = {"device": details["device_tokens"], "tiers": details["loaded_tokens"]}
    return Turn(usage["prompt_tokens"], output, ttft, rest / max(1, output - 1), found)
