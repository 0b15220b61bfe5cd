"""The sequences of a request: it may ask for several, which fork from its prompt's KV."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvtier.engine.beam_group import BeamGroup
from kvtier.engine.outputs import RequestOutput, TokenLogprobs
from kvtier.engine.request import MARK, Request
from kvtier.engine.sampler import derived_seed
from kvtier.engine.text import TextStream
from kvtier.hooks import FinishReason

__all__ = ["LiveRequest", "LiveSequence", "siblings"]


@dataclass(slots=True)
class LiveSequence:
    """One sequence: what the scheduler computes, and what the user sees of it.

    Args:
        request: the scheduler's.
        stream: the output as text.
        owner: the request that asked for it.
        index: which of its sequences.
        logprobs: of the output tokens, if asked for.
    """

    request: Request
    stream: TextStream
    owner: "LiveRequest"
    index: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def last_output(self, reason: FinishReason) -> RequestOutput:
        """All there will be."""
        self.stream.close()
        return self.output(reason)

    def output(self, reason: FinishReason | None) -> RequestOutput:
        """What there is now; `reason` if that is all."""
        request, params, delta = self.request, self.request.params, self.stream.take()
        scores = self.logprobs[: request.num_output]
        return RequestOutput(
            id=self.owner.id,
            prompt_tokens=request.prompt_len,
            token_ids=tuple(request.tokens[request.prompt_len :]),
            text=self.stream.taken,
            delta=delta,
            finish_reason=reason,
            metrics=replace(request.metrics),
            index=self.index,
            logprobs=None if params.logprobs is None else tuple(scores),
            prompt_logprobs=None if params.prompt_logprobs is None else (None, *request.scores),
            cumulative_logprob=None if params.logprobs is None else sum(score.logprob for score in scores),
        )


@dataclass(slots=True)
class LiveRequest:
    """A request as its user knows it.

    Args:
        id: the user's.
        beams: its beam search, if it asked for one.
        unforked: sequences that wait for the prompt's KV.
        live: sequences that are computed, by the ids that the scheduler knows them by.
    """

    id: str
    beams: BeamGroup | None = None
    unforked: list[LiveSequence] = field(default_factory=list)
    live: dict[str, LiveSequence] = field(default_factory=dict)


def siblings(request: Request) -> Iterator[Request]:
    """The other sequences that a request's params ask for: same prompt, randomness of their own.

    They are no longer asked for the prompt's log-probabilities, nor for siblings.
    """
    params = replace(request.params, n=1, prompt_logprobs=None)
    for index in range(1, 1 if params.beam_width else request.params.n):
        yield request.sibling(f"{request.id}{MARK}{index}", params, derived_seed(request.seed, index))
