"""Beam search over one request, as transformers defines it: pure bookkeeping, no tensors, no blocks.

Each step, every running beam brings its likeliest next tokens. The best of all of them go on as the next beams; one
that ends is a finished hypothesis if it is among the `width` best, and competes by score = logprob / length ** penalty.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

__all__ = ["BeamSearch", "Candidate", "Continuation", "Hypothesis", "candidates_per_beam"]


def candidates_per_beam(width: int, ends: Collection[int]) -> int:
    """How many tokens each beam has to bring: enough that those which end an output leave `width` beams to go on."""
    return max(2, 1 + len(ends)) * width


class Candidate(NamedTuple):
    """A token that may follow a beam, and its log-probability."""

    token: int
    logprob: float


class Continuation(NamedTuple):
    """A beam of the next step: which beam of this one it continues, and with what."""

    parent: int
    token: int
    logprob: float


class Hypothesis(NamedTuple):
    """A finished output.

    tokens: the output. logprob: of all of them together. score: what it is ranked by. ended: by a token that ends it.
    """

    tokens: tuple[int, ...]
    logprob: float
    score: float
    ended: bool


@dataclass(slots=True)
class _Beam:
    tokens: tuple[int, ...]
    logprob: float


@dataclass(slots=True)
class BeamSearch:
    """One request's beams.

    Args:
        width: beams, and hypotheses that are kept.
        length_penalty: above 0 favours long outputs, below 0 short ones.
        most: output tokens at most.
        ends: tokens that end an output.
    """

    width: int
    length_penalty: float
    most: int
    ends: frozenset[int]
    _beams: list[_Beam] = field(default_factory=lambda: [_Beam((), 0.0)])
    _finished: list[Hypothesis] = field(default_factory=list)
    done: bool = False

    def advance(self, brought: Sequence[Sequence[Candidate]]) -> list[Continuation]:
        """One step.

        Args:
            brought: of each beam, in the order of the last result, its `candidates_per_beam` likeliest, best first.

        Returns:
            The beams of the next step, best first; none once the search is `done`.
        """
        best = self._best(brought)
        length = len(self._beams[0].tokens) + 1
        over = [length == self.most or choice.token in self.ends for choice in best]
        self._finish([choice for choice, ends in zip(best[: self.width], over, strict=False) if ends], length)
        going = [choice for choice, ends in zip(best, over, strict=True) if not ends][: self.width]
        self.done = not going or not self._may_improve(going[0].logprob, length)
        if self.done:
            return []
        self._beams = [_Beam((*self._beams[choice.parent].tokens, choice.token), choice.logprob) for choice in going]
        return going

    def hypotheses(self) -> list[Hypothesis]:
        """What was found, best first."""
        return list(self._finished)

    def _best(self, brought: Sequence[Sequence[Candidate]]) -> list[Continuation]:
        choices = [
            Continuation(parent, candidate.token, beam.logprob + candidate.logprob)
            for parent, (beam, candidates) in enumerate(zip(self._beams, brought, strict=True))
            for candidate in candidates
        ]
        return sorted(choices, key=attrgetter("logprob"), reverse=True)[: candidates_per_beam(self.width, self.ends)]

    def _finish(self, choices: Sequence[Continuation], length: int) -> None:
        for choice in choices:
            tokens = (*self._beams[choice.parent].tokens, choice.token)
            score = self._score(choice.logprob, length)
            self._finished.append(Hypothesis(tokens, choice.logprob, score, choice.token in self.ends))
        self._finished.sort(key=attrgetter("score"), reverse=True)
        del self._finished[self.width :]

    def _may_improve(self, logprob: float, length: int) -> bool:
        if len(self._finished) < self.width:
            return True
        return self._score(logprob, length) > self._finished[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self.length_penalty)
