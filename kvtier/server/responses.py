"""What completions and chats have in common as the client reads them: the head, usage, logprobs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvtier.engine import RequestMetrics, RequestOutput
from kvtier.server.generation import Event

__all__ = ["Finals", "Head", "Usage", "Writer", "finite", "usage_of"]

Finals: TypeAlias = Mapping[tuple[int, int], RequestOutput]
"""The last output of every sequence, by prompt and index."""

_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Head:
    """What every response and every event of a stream begins with."""

    id: str
    created: int
    model: str

    def of(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A body of that kind."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class Usage(NamedTuple):
    """Tokens of one request. Of the prompts' tokens: found in device memory, loaded from the tiers."""

    prompt: int
    output: int
    device: int
    loaded: int

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it; `device_tokens` and `loaded_tokens` say where the cached ones were."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
            "prompt_tokens_details": {
                "cached_tokens": self.device + self.loaded,
                "device_tokens": self.device,
                "loaded_tokens": self.loaded,
            },
        }


class Writer(Protocol):
    """Writes one request's response."""

    @property
    def head(self) -> Head:
        """What bodies begin with."""
        ...

    @property
    def chunk_kind(self) -> str:
        """`object` of a stream's events."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        ...

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """An event of the stream; None where there is nothing to say yet."""
        ...

    def whole(self, finals: Finals) -> dict[str, Any]:
        """The response in one piece, without its usage."""
        ...


def usage_of(finals: Finals, *, hidden: int = 0) -> Usage:
    """Tokens over all sequences.

    Args:
        finals: of every sequence.
        hidden: output tokens of each that the client did not ask for.
    """
    firsts = [output for (_, index), output in finals.items() if index == 0]
    found = [_found(output.metrics, output.prompt_tokens) for output in firsts]
    return Usage(
        prompt=sum(output.prompt_tokens for output in firsts),
        output=sum(len(output.token_ids) - hidden for output in finals.values()),
        device=sum(device for device, _ in found),
        loaded=sum(loaded for _, loaded in found),
    )


def _found(metrics: RequestMetrics, prompt: int) -> tuple[int, int]:
    # What was found again after a preemption is counted again, and may be output.
    device = min(metrics.cached_tokens, prompt)
    return device, min(metrics.loaded_tokens, prompt - device)


def finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, _LEAST_LOGPROB)
