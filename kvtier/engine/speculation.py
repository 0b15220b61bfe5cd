"""Speculation: who gets draft tokens, how many, and whether they pay at all.

Two things are learnt. Of each request, how many guesses in a row were right: it gets twice as many after all were
right, and after misses a pause that grows. Of the engine, what a step with drafts yields in a second beside one
without, for about as many requests: the poorer kind is only tried now and then.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.engine.drafting import Proposer, Wish
from kvtier.engine.request import Request, State

__all__ = ["PayMeter", "Speculation"]

_log = logging.getLogger(__name__)

_FIRST_COUNT = 2
_LONGEST_PAUSE = 64
_SMOOTHING = 0.2
_TRIALS = 3
_PROBE_EVERY = 100


@dataclass(slots=True)
class _Luck:
    """How a request's guesses have fared."""

    count: int = _FIRST_COUNT
    pause: int = 1
    resting: int = 0

    def learn(self, proposed: int, accepted: int, most: int) -> None:
        if accepted:
            self.pause = 1
            self.count = min(most, 2 * self.count) if accepted == proposed else max(_FIRST_COUNT, accepted + 1)
            return
        self.count = _FIRST_COUNT
        self.resting = self.pause
        self.pause = min(_LONGEST_PAUSE, 2 * self.pause)

    def rest(self) -> None:
        self.resting = self.pause = _LONGEST_PAUSE


@dataclass(slots=True)
class _Rate:
    """Tokens per second of one kind of step."""

    trials: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        weight = 1.0 if not self.trials else _SMOOTHING
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)
        self.trials += 1

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class PayMeter:
    """Tells steps in which drafts pay from those in which they do not, by the number of requests that decode."""

    def __init__(self) -> None:
        self._rates: dict[tuple[int, bool], _Rate] = {}
        self._asked: dict[int, int] = {}

    def pays(self, requests: int) -> bool:
        """Whether the next step should have drafts."""
        size = requests.bit_length()
        plain, drafted = self._rate(size, drafted=False), self._rate(size, drafted=True)
        asked = self._asked[size] = self._asked.get(size, 0) + 1
        if drafted.trials < _TRIALS or plain.trials < _TRIALS:
            return drafted.trials <= plain.trials
        better = drafted.value > plain.value
        return not better if asked % _PROBE_EVERY == 0 else better

    def learn(self, requests: int, tokens: int, seconds: float, *, drafted: bool) -> None:
        """A step of nothing but decodes gave so many tokens in so many seconds."""
        self._rate(requests.bit_length(), drafted=drafted).learn(tokens, seconds)

    def _rate(self, size: int, *, drafted: bool) -> _Rate:
        return self._rates.setdefault((size, drafted), _Rate())


@dataclass(slots=True)
class Speculation:
    """Gives requests draft tokens before a step, and learns from it after.

    Args:
        proposer: makes the guesses.
        most: draft tokens per request and step at most.
        proposed: draft tokens that were computed so far.
        accepted: those that were right.
        errors: exceptions of the proposer. Whose guess it was gets none for a while; nobody's output depends on it.
    """

    proposer: Proposer
    most: int
    proposed: int = 0
    accepted: int = 0
    errors: int = 0
    _meter: PayMeter = field(default_factory=PayMeter)
    _luck: dict[str, _Luck] = field(default_factory=dict)

    def propose(self, requests: Iterable[Request]) -> None:
        """Before a step: give drafts to those of the requests that decode and are likely to make use of them."""
        decoding = [request for request in requests if request.state is State.RUNNING and request.remaining == 1]
        wishes = [wish for wish in map(self._wish, decoding) if wish is not None]
        if not wishes or not self._meter.pays(len(decoding)):
            return
        for wish, drafts in zip(wishes, self._guesses(wishes), strict=True):
            wish.request.drafts = drafts

    def _guesses(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        try:
            return self.proposer.propose(wishes)
        except Exception as error:  # noqa: BLE001  # to guess for each alone says whose it is
            self._count(error)
        return [self._guess_alone(wish) for wish in wishes]

    def _guess_alone(self, wish: Wish) -> tuple[int, ...]:
        try:
            return self.proposer.propose([wish])[0]
        except Exception as error:  # noqa: BLE001  # it is the request's, which goes on without guesses
            self._count(error)
        self._luck[wish.request.id].rest()
        return ()

    def _count(self, error: Exception) -> None:
        self.errors += 1
        # At powers of two: a proposer that always raises must not fill the log.
        if self.errors & (self.errors - 1) == 0:
            _log.error("the proposer raised, and guesses nothing; %d errors so far", self.errors, exc_info=error)

    def _wish(self, request: Request) -> Wish | None:
        params = request.params
        # Penalties make every choice depend on the ones before it, so that rows cannot be chosen on their own.
        if not params.speculate or params.penalized or params.sparse is not None or params.beam_width:
            return None
        # Its sequences fork from the prompt's KV, of which a window may have lost some once guesses were right.
        if params.n > 1 and not request.num_output:
            return None
        luck = self._luck.setdefault(request.id, _Luck())
        if luck.resting:
            luck.resting -= 1
            return None
        count = min(luck.count, self.most, request.max_tokens - request.num_tokens - 1)
        return Wish(request, count) if count > 0 else None

    def learn(self, outcomes: Sequence[tuple[Request, int, int]], seconds: float, *, decodes_only: bool) -> None:
        """After a step.

        Args:
            outcomes: requests that got tokens, how many drafts of each were computed, and how many tokens it got.
            seconds: what the step took.
            decodes_only: nothing else was computed in it.
        """
        for request, proposed, tokens in outcomes:
            if proposed:
                accepted = tokens - 1
                self._luck[request.id].learn(proposed, accepted, self.most)
                request.metrics.draft_tokens += proposed
                request.metrics.accepted_tokens += accepted
                self.proposed += proposed
                self.accepted += accepted
        if decodes_only and outcomes:
            drafted = any(proposed for _, proposed, _ in outcomes)
            self._meter.learn(len(outcomes), sum(tokens for _, _, tokens in outcomes), seconds, drafted=drafted)

    def forget(self, request_id: str) -> None:
        """The sequence has ended."""
        self._luck.pop(request_id, None)
        self.proposer.forget(request_id)
