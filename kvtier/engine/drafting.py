"""Proposers guess a request's next tokens; the engine computes them with the next step and keeps what was right."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.engine.request import Request

__all__ = ["PromptLookup", "Proposer", "Wish"]

_SHORTEST, _LONGEST = 2, 4


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


class _History:
    """A sequence as an array, in which its latest tokens are looked for. Four bytes a token, and no work ahead.

    tokens  ... a b c | x y z ... a b c |        the end was seen before, at `match`: x y z is the guess
                      ^ match
    """

    __slots__ = ("_length", "_tokens")

    def __init__(self) -> None:
        self._length = 0
        self._tokens = np.empty(0, np.int32)

    def match(self, tokens: Sequence[int]) -> int | None:
        """Where the longest n-gram ends that the sequence ends with and had before; of several places the latest."""
        known = self._followed(tokens)
        if len(known) <= _SHORTEST:
            return None
        # Of the shortest one, each place but the last; then those of them that have one token more in common.
        places = np.flatnonzero((known[:-2] == known[-2]) & (known[1:-1] == known[-1])) + _SHORTEST
        for size in range(_SHORTEST + 1, _LONGEST + 1):
            longer = places[places >= size]
            longer = longer[known[longer - size] == known[-size]]
            if not longer.size:
                break
            places = longer
        return int(places[-1]) if places.size else None

    def _followed(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        length = len(tokens)
        if length > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(length + length // 4, 64))
        self._tokens[self._length : length] = tokens[self._length :]
        self._length = length
        return self._tokens[:length]


class PromptLookup:
    """Guesses that what followed the latest tokens earlier in prompt or output follows them again.

    After prompt lookup decoding (Saxena 2023).
    """

    def __init__(self) -> None:
        self._histories: dict[str, _History] = {}

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        """See `Proposer.propose`."""
        return [self._proposed(wish) for wish in wishes]

    def _proposed(self, wish: Wish) -> tuple[int, ...]:
        tokens = wish.request.tokens
        match = self._histories.setdefault(wish.request.id, _History()).match(tokens)
        if match is None:
            return ()
        # Where the guess runs into its own beginning, the text goes round in a circle.
        period = len(tokens) - match
        return tuple(tokens[match + at % period] for at in range(wish.length))

    def forget(self, request_id: str) -> None:
        """See `Proposer.forget`."""
        self._histories.pop(request_id, None)
