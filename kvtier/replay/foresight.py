"""Hints that a replay gives: what an all-knowing caller would say, half of it wrong, or what the trace itself says."""

import random
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, get_args

from kvtier.errors import ConfigError
from kvtier.hints import NO_HINT, Hint
from kvtier.replay.trace import Trace, TraceRequest

__all__ = ["HINT_MODES", "Foresight", "HintMode", "HintSource", "SessionHints", "hint_source"]

HintMode: TypeAlias = Literal["none", "true", "half-wrong", "trace"]
HINT_MODES: tuple[str, ...] = get_args(HintMode)

_DEAD = Hint(reuse="none")


class HintSource(Protocol):
    """Says what is known of a request's blocks when it is served."""

    def hints(self, number: int, request: TraceRequest) -> Sequence[Hint]:
        """One hint per block of the `number`-th request. Called once per request, in order."""
        ...


class Foresight:
    """Per block and use: `reuse = none` where the trace never uses the block again.

    Args:
        trace: what is going to happen.
        wrong: share of the hints that say the opposite, drawn at random with `seed`.
    """

    def __init__(self, trace: Trace, *, wrong: float = 0.0, seed: int = 0) -> None:
        self._last = [0] * trace.blocks
        for number, request in enumerate(trace.requests):
            for block in request.blocks:
                self._last[block] = number
        self._wrong = wrong
        self._dice = random.Random(seed)  # noqa: S311  which hints are wrong is no secret

    def hints(self, number: int, request: TraceRequest) -> Sequence[Hint]:
        """See `HintSource.hints`."""
        last = self._last
        if not self._wrong:
            return [_DEAD if last[block] == number else NO_HINT for block in request.blocks]
        draw, wrong = self._dice.random, self._wrong
        return [_DEAD if (last[block] == number) != (draw() < wrong) else NO_HINT for block in request.blocks]


class SessionHints:
    """What a trace says itself: to which session a prompt belongs. Its end is told by the request."""

    def hints(self, number: int, request: TraceRequest) -> Sequence[Hint]:
        """See `HintSource.hints`."""
        return [Hint(session=request.session)] * len(request.blocks)


def hint_source(mode: str, trace: Trace, seed: int) -> HintSource | None:
    """The source of a mode's hints; None where no hints are given.

    Raises:
        ConfigError: an unknown mode, or a trace that names no sessions.
    """
    if mode == "none":
        return None
    if mode == "true":
        return Foresight(trace)
    if mode == "half-wrong":
        return Foresight(trace, wrong=0.5, seed=seed)
    if mode != "trace":
        raise ConfigError(f"hints {mode!r}: expected one of {', '.join(HINT_MODES)}")
    if all(request.session is None for request in trace.requests):
        raise ConfigError(
            f"hints 'trace': a trace of kind {trace.kind} names no sessions; expected none, true, half-wrong"
        )
    return SessionHints()
