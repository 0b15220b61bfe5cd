"""The kinds of traffic that a bench makes up."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias

from kvtier.bench.scripts import Pace, Piece, Script, Turn
from kvtier.errors import ConfigError

__all__ = ["WORKLOADS", "Conversations", "SharedPrefix", "Unrelated", "Workload"]

_LEAST: Mapping[str, float] = {"think": 0.0, "spread": 0.0}


class Workload(Protocol):
    """A kind of traffic with its sizes."""

    def scripts(self, pace: Pace, seed: int) -> tuple[Script, ...]:
        """All that will be asked, in the order in which it begins."""
        ...

    def describe(self) -> str:
        """It in half a line."""
        ...


class _Lengths:
    """Draws lengths around a mean."""

    def __init__(self, spread: float, dice: random.Random) -> None:
        self._spread = spread
        self._dice = dice

    def __call__(self, mean: int) -> int:
        if not self._spread:
            return mean
        return max(1, round(mean * self._dice.uniform(1 - self._spread, 1 + self._spread)))


def _check(workload: "Conversations | SharedPrefix | Unrelated") -> None:
    for one in fields(workload):
        value, least = getattr(workload, one.name), _LEAST.get(one.name, 1)
        if not least <= value < float("inf"):
            raise ConfigError(f"{one.name.replace('_', '-')} {value:g}: expected at least {least:g}")
    if workload.spread > 1:
        raise ConfigError(f"spread {workload.spread:g}: expected a share between 0 and 1")


@dataclass(frozen=True, slots=True)
class Conversations:
    """Chats that take turns: each history comes back after the others may have pushed it out.

    Args:
        chats, turns: how many, and of how many requests each.
        prompt_tokens: of the first question of a chat.
        turn_tokens: of each further one.
        output_tokens: of an answer, at most.
        think: mean seconds between an answer and the next question.
        spread: lengths are drawn between (1 - spread) and (1 + spread) times these.
    """

    chats: int = 8
    turns: int = 4
    prompt_tokens: int = 512
    turn_tokens: int = 64
    output_tokens: int = 32
    think: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def scripts(self, pace: Pace, seed: int) -> tuple[Script, ...]:
        """See `Workload.scripts`."""
        dice = random.Random(f"{seed}/conversations")  # noqa: S311  no secret
        length = _Lengths(self.spread, dice)

        def turn(chat: int, number: int) -> Turn:
            tokens = length(self.turn_tokens if number else self.prompt_tokens)
            pause = pace.draw(self.think, dice) if number else 0.0
            piece = Piece(f"chat {chat} turn {number}", tokens)
            return Turn((piece,), length(self.output_tokens), is_first=not number, pause=pause)

        scripts = [
            Script(tuple(turn(chat, number) for number in range(self.turns)), f"chat-{chat}")
            for chat in range(self.chats)
        ]
        return pace.start(scripts, dice)

    def describe(self) -> str:
        """See `Workload.describe`."""
        return (
            f"{self.chats} chats of {self.turns} turns: {self.prompt_tokens} tokens, then {self.turn_tokens} more each "
            f"time, answers of {self.output_tokens}"
        )


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Questions about documents, in random order, each sent behind its document.

    Args:
        documents, questions: how many, and how many about each.
        prompt_tokens: of a document.
        turn_tokens: of a question.
        output_tokens, spread: see `Conversations`.
    """

    documents: int = 4
    questions: int = 8
    prompt_tokens: int = 512
    turn_tokens: int = 32
    output_tokens: int = 32
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def scripts(self, pace: Pace, seed: int) -> tuple[Script, ...]:
        """See `Workload.scripts`."""
        dice = random.Random(f"{seed}/shared-prefix")  # noqa: S311  no secret
        length = _Lengths(self.spread, dice)
        documents = [Piece(f"document {number}", length(self.prompt_tokens)) for number in range(self.documents)]
        order = [(document, number) for number in range(self.questions) for document in range(self.documents)]
        dice.shuffle(order)
        left = [self.questions] * self.documents
        scripts = []
        for document, number in order:
            question = Piece(f"document {document} question {number}", length(self.turn_tokens))
            is_first = left[document] == self.questions
            left[document] -= 1
            turn = Turn((documents[document], question), length(self.output_tokens), is_first)
            scripts.append(Script((turn,), f"document-{document}", ends_session=not left[document]))
        return pace.start(scripts, dice)

    def describe(self) -> str:
        """See `Workload.describe`."""
        return (
            f"{self.questions} questions about each of {self.documents} documents: {self.prompt_tokens} tokens, "
            f"questions of {self.turn_tokens}, answers of {self.output_tokens}"
        )


@dataclass(frozen=True, slots=True)
class Unrelated:
    """Prompts that have nothing in common.

    Args:
        requests: how many.
        prompt_tokens: of each.
        output_tokens, spread: see `Conversations`.
    """

    requests: int = 32
    prompt_tokens: int = 512
    output_tokens: int = 32
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def scripts(self, pace: Pace, seed: int) -> tuple[Script, ...]:
        """See `Workload.scripts`."""
        dice = random.Random(f"{seed}/random")  # noqa: S311  no secret
        length = _Lengths(self.spread, dice)
        scripts = []
        for number in range(self.requests):
            piece = Piece(f"request {number}", length(self.prompt_tokens))
            turn = Turn((piece,), length(self.output_tokens), is_first=True)
            scripts.append(Script((turn,), f"request-{number}"))
        return pace.start(scripts, dice)

    def describe(self) -> str:
        """See `Workload.describe`."""
        return f"{self.requests} unrelated prompts of {self.prompt_tokens} tokens, answers of {self.output_tokens}"


_Kind: TypeAlias = type[Conversations] | type[SharedPrefix] | type[Unrelated]

WORKLOADS: Mapping[str, _Kind] = {
    "conversations": Conversations,
    "shared-prefix": SharedPrefix,
    "random": Unrelated,
}
"""By the name that users give them."""
