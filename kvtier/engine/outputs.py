"""What the engine tells its users: outputs and their metrics per request, statistics of the engine."""

from dataclasses import dataclass
from typing import NamedTuple

from kvtier.hooks import FinishReason

__all__ = ["EngineStats", "RequestMetrics", "RequestOutput", "Sampled", "TokenLogprobs"]


class TokenLogprobs(NamedTuple):
    """What the model thought of one token.

    token: the one that was chosen, or given. logprob: its natural logarithm of probability, before any of the request's
    own changes to the logits. rank: 1 for the likeliest. top: the likeliest tokens with theirs, best first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Sampled(NamedTuple):
    """What one request got from one step.

    tokens: to be appended, in order: accepted draft tokens, then one more. logprobs: one for each, if asked for.
    candidates: instead of tokens, for beam search: the likeliest ones with their log-probabilities, best first.
    error: why there is nothing, where choosing failed.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    candidates: tuple[tuple[int, float], ...] = ()
    error: Exception | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Where a request's time went and where its KV came from. Times are `time.perf_counter()` seconds.

    Args:
        arrival: when it was added.
        first_token: when its first output token was sampled.
        latest_token: when its latest output token was sampled.
        output_tokens: output tokens so far.
        cached_tokens: tokens whose KV was found in device memory. This and the next two count again after a preemption.
        loaded_tokens: tokens whose KV was loaded through the hook.
        computed_tokens: prompt tokens whose KV was computed.
        load_seconds: time between the allocation of blocks for a load and the load's end.
        preemptions: times that it lost its blocks, and started over or came back.
        draft_tokens: guesses that were computed with it.
        accepted_tokens: those that were right.
    """

    arrival: float = 0.0
    first_token: float | None = None
    latest_token: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    load_seconds: float = 0.0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token; NaN before it."""
        return float("nan") if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 before there are two."""
        if self.output_tokens < 2 or self.first_token is None or self.latest_token is None:
            return 0.0
        return (self.latest_token - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's output so far; the engine makes one whenever a token was sampled.

    Args:
        id: the request's.
        prompt_tokens: length of the prompt.
        token_ids: all output tokens, the one that ended the output included.
        text: all output text, without special tokens and cut before a stop string.
        delta: the end of `text` that is new since the previous output; the deltas together are `text`.
        finish_reason: None while the request goes on.
        metrics: of the request so far; a snapshot.
        index: which of the request's `n` sequences this is.
        logprobs: one for each output token, if asked for.
        prompt_logprobs: one for each prompt token but the first, which has none, if asked for.
        cumulative_logprob: sum over the output tokens, if asked for.
        error: what went wrong, where the finish reason is `error`.
        others: where a caller gets one output per request: its other sequences, best first.
    """

    id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    delta: str
    finish_reason: FinishReason | None
    metrics: RequestMetrics
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cumulative_logprob: float | None = None
    error: Exception | None = None
    others: "tuple[RequestOutput, ...]" = ()

    @property
    def sequences(self) -> "tuple[RequestOutput, ...]":
        """All sequences of the request, best first."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of this moment, counters since the engine was made.

    Args:
        steps: steps with something to compute.
        waiting: requests without device blocks, swapped ones included.
        swapped: those that lost theirs and whose KV is kept in other tiers, or on its way there.
        loading: requests whose KV is on its way into device memory.
        running: requests that compute.
        preemptions: times that a running request lost its blocks.
        swaps: those times that they were kept in other tiers.
        device_hit_tokens: tokens whose KV was found in device memory.
        loaded_tokens: tokens whose KV was loaded through the hook.
        computed_tokens: tokens whose KV was computed.
        draft_tokens: guesses that were computed.
        accepted_tokens: those that were right.
        draft_errors: what the proposer raised; each one costs guesses, and nothing else.
        num_blocks: blocks of the device pool.
        free_blocks: those that no request holds, cached ones included.
        hook_errors: what the hook raised; each one counts as a miss.
        kv_waste: of the token slots that requests held, averaged over all steps: the share without a token, beyond
            the last block of each sequence that has one.
        kv_waste_total: the same share, the rest of the last block included.
    """

    steps: int
    waiting: int
    swapped: int
    loading: int
    running: int
    preemptions: int
    swaps: int
    device_hit_tokens: int
    loaded_tokens: int
    computed_tokens: int
    draft_tokens: int
    accepted_tokens: int
    draft_errors: int
    num_blocks: int
    free_blocks: int
    hook_errors: int
    kv_waste: float
    kv_waste_total: float
