"""Who is asked, whatever it is: the protocol, and what can go wrong by kind."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtier.errors import KVTierError

__all__ = ["Failed", "Heard", "Question", "Target", "Usage", "as_text", "printable"]

_LONGEST_MESSAGE = 400


class Failed(KVTierError):
    """A request failed.

    Args:
        kind: one word of why, the same for all that failed alike.
        message: the whole of it.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Question:
    """One request.

    Args:
        messages: the conversation so far, `{"role", "content"}` each.
        output_tokens: of the answer, at most.
        session: that it is a turn of.
        ends_session: it is the last one.
    """

    messages: Sequence[Mapping[str, str]]
    output_tokens: int
    session: str | None = None
    ends_session: bool = False


class Usage(NamedTuple):
    """Tokens of one request, as its target counted them.

    cached_tokens: of the prompt, not computed; loaded_tokens: of those, found in a tier below device memory. None where
    the target does not say.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    loaded_tokens: int | None


class Heard(NamedTuple):
    """What arrived at once: text of the answer, a reasoning model's thoughts before it, and at the end the usage.

    Thoughts are output tokens, and no part of the history.
    """

    text: str
    usage: Usage | None = None
    thought: str = ""


class Target(Protocol):
    """A model that can be asked many things at a time. `close` ends it.

    Args:
        model: its name.
        place: where it is.
        context: tokens that a prompt and its answer may have together; None: it does not say.
    """

    model: str
    place: str
    context: int | None

    def answer(self, question: Question) -> AsyncGenerator[Heard, None]:
        """Answer piece by piece, greedily. Closing the generator aborts the request.

        Raises:
            Failed: it was refused or broke off.
        """
        ...

    async def count(self, question: Question) -> int | None:
        """Tokens of the prompt; None: it does not say.

        Raises:
            Failed: it was refused or broke off.
        """
        ...

    async def close(self) -> None:
        """Nothing more will be asked."""
        ...


def as_text(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation for models without a chat template: each prompt begins with the one before and its answer."""
    return "".join(f"{one['content']}\n" if one["role"] == "assistant" else one["content"] for one in messages)


def printable(text: str) -> str:
    """The beginning of what a server says, without what would steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in text[:_LONGEST_MESSAGE]).strip()
