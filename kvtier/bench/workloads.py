"""The kinds of traffic that a bench makes up."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

from kvtier.bench.scripts import Pace, Piece, Script, Turn
from kvtier.errors import ConfigError

__all__ = ["WORKLOADS", "Conversations", "MadeUp", "SharedPrefix", "Unrelated", "Workload"]

_LEAST: Mapping[str, float] = {"think": 0.0, "spread": 0.0}


class Workload(Protocol):
    """A kind of traffic with its sizes."""

    def scripts(self, pace: Pace, seed: int) -> tuple[Script, ...]:
        """All that will be asked, in the order in which it begins."""
        ...

    def describe(self) -> str:
        """It in half a line."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUp(ABC):
    """A workload whose lengths are drawn around means.

    Args:
        prompt_tokens: of a prompt whose beginning was not sent before.
        output_tokens: of an answer, at most.
        spread: lengths are drawn between (1 - spread) and (1 + spread) times these.

    Raises:
        ConfigError: a size is too small, or none.
    """

    kind: ClassVar[str]
    """The name that users give it."""

    prompt_tokens: int = 512
    output_tokens: int = 32
    spread: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), _LEAST.get(one.name, 1)
            if not least <= value < float("inf"):
                raise ConfigError(f"{one.name.replace('_', '-')} {value:g}: expected at least {least:g}")
        if self.spread > 1:
            raise ConfigError(f"spread {self.spread:g}: expected a share between 0 and 1")

    def scripts(self, pace: Pace, seed: int) -> tuple[Script, ...]:
        """See `Workload.scripts`."""
        dice = random.Random(f"{seed}/{self.kind}")  # noqa: S311  no secret
        return pace.start(self._scripts(pace, dice), dice)

    def _length(self, mean: int, dice: random.Random) -> int:
        return max(1, round(mean * dice.uniform(1 - self.spread, 1 + self.spread))) if self.spread else mean

    @abstractmethod
    def _scripts(self, pace: Pace, dice: random.Random) -> Sequence[Script]:
        """In their order, without times."""

    @abstractmethod
    def describe(self) -> str:
        """See `Workload.describe`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations(MadeUp):
    """Chats that take turns: each history comes back after the others may have pushed it out.

    Args:
        chats, turns: how many, and of how many requests each.
        prompt_tokens: of the first question of a chat.
        turn_tokens: of each further one.
        think: mean seconds between an answer and the next question.
        output_tokens, spread: see `MadeUp`.
    """

    kind = "conversations"

    chats: int = 8
    turns: int = 4
    turn_tokens: int = 64
    think: float = 0.0

    def _scripts(self, pace: Pace, dice: random.Random) -> Sequence[Script]:
        return [
            Script(tuple(self._turn(chat, number, pace, dice) for number in range(self.turns)), f"chat-{chat}")
            for chat in range(self.chats)
        ]

    def _turn(self, chat: int, number: int, pace: Pace, dice: random.Random) -> Turn:
        tokens = self._length(self.turn_tokens if number else self.prompt_tokens, dice)
        pause = pace.draw(self.think, dice) if number else 0.0
        piece = Piece(f"chat {chat} turn {number}", tokens)
        return Turn((piece,), self._length(self.output_tokens, dice), is_first=not number, pause=pause)

    def describe(self) -> str:
        """See `Workload.describe`."""
        return (
            f"{self.chats} chats of {self.turns} turns: {self.prompt_tokens} tokens, then {self.turn_tokens} more each "
            f"time, answers of {self.output_tokens}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix(MadeUp):
    """Questions about documents, in random order, each sent behind its document.

    Args:
        documents, questions: how many, and how many about each.
        prompt_tokens: of a document.
        turn_tokens: of a question.
        output_tokens, spread: see `MadeUp`.
    """

    kind = "shared-prefix"

    documents: int = 4
    questions: int = 8
    turn_tokens: int = 32

    def _scripts(self, pace: Pace, dice: random.Random) -> Sequence[Script]:
        documents = [
            Piece(f"document {number}", self._length(self.prompt_tokens, dice)) for number in range(self.documents)
        ]
        order = [(document, number) for number in range(self.questions) for document in range(self.documents)]
        dice.shuffle(order)
        left = [self.questions] * self.documents
        scripts = []
        for document, number in order:
            question = Piece(f"document {document} question {number}", self._length(self.turn_tokens, dice))
            is_first = left[document] == self.questions
            left[document] -= 1
            turn = Turn((documents[document], question), self._length(self.output_tokens, dice), is_first)
            scripts.append(Script((turn,), f"document-{document}", ends_session=not left[document]))
        return scripts

    def describe(self) -> str:
        """See `Workload.describe`."""
        return (
            f"{self.questions} questions about each of {self.documents} documents: {self.prompt_tokens} tokens, "
            f"questions of {self.turn_tokens}, answers of {self.output_tokens}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrelated(MadeUp):
    """Prompts that have nothing in common.

    Args:
        requests: how many.
        prompt_tokens, output_tokens, spread: see `MadeUp`.
    """

    kind = "random"

    requests: int = 32

    def _scripts(self, pace: Pace, dice: random.Random) -> Sequence[Script]:
        scripts = []
        for number in range(self.requests):
            piece = Piece(f"request {number}", self._length(self.prompt_tokens, dice))
            turn = Turn((piece,), self._length(self.output_tokens, dice), is_first=True)
            scripts.append(Script((turn,), f"request-{number}"))
        return scripts

    def describe(self) -> str:
        """See `Workload.describe`."""
        return f"{self.requests} unrelated prompts of {self.prompt_tokens} tokens, answers of {self.output_tokens}"


WORKLOADS: Mapping[str, type[MadeUp]] = {one.kind: one for one in (Conversations, SharedPrefix, Unrelated)}
"""By the name that users give them."""
