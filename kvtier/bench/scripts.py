"""What a bench asks, and when, as data: scripts of turns, whose texts are written when they are sent."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, get_args

from kvtier.errors import ConfigError

__all__ = ["ARRIVALS", "Arrivals", "Pace", "Piece", "Script", "Turn"]

Arrivals: TypeAlias = Literal["poisson", "fixed"]
ARRIVALS: tuple[str, ...] = get_args(Arrivals)


class Piece(NamedTuple):
    """A run of text: equal labels are equal texts, and a shorter one begins a longer one."""

    label: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Args:
        pieces: what is said, one behind the other.
        output_tokens: of the answer, at most.
        pause: seconds between the answer before it and this turn.
        is_first: nothing that this prompt begins with was sent before.
    """

    pieces: tuple[Piece, ...]
    output_tokens: int
    is_first: bool
    pause: float = 0.0

    @property
    def tokens(self) -> int:
        """Of what is said."""
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Script:
    """One conversation: each turn is sent with all turns and answers before it.

    Args:
        turns: one or more.
        at: seconds after the start of the bench at which it begins; None: as soon as there is a place for it.
        session: what a server may be told it belongs to.
        ends_session: no script after this one belongs to it.
    """

    turns: tuple[Turn, ...]
    session: str
    at: float | None = None
    ends_session: bool = True

    @property
    def tokens(self) -> int:
        """The longest prompt and its answer."""
        return sum(turn.tokens + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Pace:
    """When scripts begin, and how long people think.

    Args:
        rate: scripts per second; None: each as soon as there is a place for it.
        arrivals: `poisson`: gaps and pauses are drawn from exponential distributions; `fixed`: all are their mean.
    """

    rate: float | None = None
    arrivals: Arrivals = "poisson"

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate {self.rate:g}: expected a number of starts per second, above 0")
        if self.arrivals not in ARRIVALS:
            raise ConfigError(f"arrivals {self.arrivals!r}: expected one of {', '.join(ARRIVALS)}")

    def draw(self, mean: float, dice: random.Random) -> float:
        """One gap or pause in seconds."""
        return dice.expovariate(1 / mean) if mean and self.arrivals == "poisson" else mean

    def start(self, scripts: Sequence[Script], dice: random.Random) -> tuple[Script, ...]:
        """The same scripts, each with the time at which it begins."""
        if self.rate is None:
            return tuple(scripts)
        at, started = 0.0, []
        for script in scripts:
            started.append(replace(script, at=at))
            at += self.draw(1 / self.rate, dice)
        return tuple(started)
