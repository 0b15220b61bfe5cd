"""Proposers guess a request's next tokens; the engine computes them with the next step and keeps what was right."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtier.engine.request import Request

__all__ = ["PromptLookup", "Proposer", "Wish"]

_LONGEST, _SHORTEST = 4, 2


class Wish(NamedTuple):
    """A request for which up to `length` draft tokens, at least 1, are wanted."""

    request: Request
    length: int


class Proposer(Protocol):
    """Guesses tokens. Called from the engine's thread, between steps."""

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        """Draft tokens for each wish, at most as many as wanted; none where there is no idea."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended. Unknown ids are tolerated."""
        ...


class _Index:
    """Where a sequence's latest n-grams were seen before. Each token is looked at once.

    tokens  ... a b c | x y z ... a b c |        the end was seen before, at `match`: x y z is the guess
                      ^ match
    """

    __slots__ = ("_ends", "_indexed", "match")

    def __init__(self) -> None:
        self.match: int | None = None
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def follow(self, tokens: Sequence[int]) -> None:
        for end in range(self._indexed + 1, len(tokens) + 1):
            self.match = None
            # The longest n-gram that was seen before decides; the latest place counts.
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                gram = tuple(tokens[end - size : end])
                self.match = self._ends.get(gram, self.match)
                self._ends[gram] = end
        self._indexed = len(tokens)


class PromptLookup:
    """Guesses that what followed the latest tokens earlier in prompt or output follows them again.

    After prompt lookup decoding (Saxena 2023), with an index that grows with the sequence.
    """

    def __init__(self) -> None:
        self._indices: dict[str, _Index] = {}

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        """See `Proposer.propose`."""
        return [self._proposed(wish) for wish in wishes]

    def _proposed(self, wish: Wish) -> tuple[int, ...]:
        tokens = wish.request.tokens
        index = self._indices.setdefault(wish.request.id, _Index())
        index.follow(tokens)
        if index.match is None:
            return ()
        # Where the guess runs into its own beginning, the text goes round in a circle.
        period = len(tokens) - index.match
        return tuple(tokens[index.match + at % period] for at in range(wish.length))

    def forget(self, request_id: str) -> None:
        """See `Proposer.forget`."""
        self._indices.pop(request_id, None)
