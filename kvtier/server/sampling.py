"""From what a request says to `SamplingParams` and `RequestHints`. What was not said keeps the engine's default."""

import re
from typing import Any

from kvtier.engine.params import SamplingParams
from kvtier.engine.sparse import Sparse
from kvtier.errors import RequestError
from kvtier.hints import RequestHints
from kvtier.server.errors import ApiError, as_api_error
from kvtier.server.protocol import ChatBody, CompletionBody, KvHints, SamplingBody, SparseKv

__all__ = ["chat_params", "completion_params", "request_hints"]

_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; chats have no limit but the context."""

_SEEDS = 2**64
"""The engine's seeds have no sign, OpenAI's have: a negative one is as good as any."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
_SHOWN = 40

_AS_IT_IS = frozenset(
    {
        "accept_lossy",
        "beam_width",
        "cache_salt",
        "frequency_penalty",
        "ignore_eos",
        "length_penalty",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "speculate",
        "temperature",
        "top_k",
        "top_p",
        "tpot_target",
        "ttft_target",
    }
)


def completion_params(body: CompletionBody) -> SamplingParams:
    """Params of one prompt of a completion.

    Raises:
        ApiError: a value is out of range, or contradicts another one.
    """
    chosen = _common(body)
    tokens = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0: expected at least 1, unless echo is set", param="max_tokens")
    # To score a prompt costs a step that samples; its token is not shown.
    chosen["max_tokens"] = max(tokens, 1)
    if body.logprobs is not None:
        chosen["logprobs"] = body.logprobs
        if body.echo:
            chosen["prompt_logprobs"] = body.logprobs
    n, best_of = body.n or 1, body.best_of
    if best_of is not None:
        if body.beam_width:
            raise ApiError(
                400, "best_of with beam_width: a beam search gives the n best; drop best_of", param="best_of"
            )
        if best_of < n:
            raise ApiError(400, f"best_of={best_of}: expected at least n={n}", param="best_of")
        if body.stream and best_of > n:
            raise ApiError(400, "best_of: the best are known at the end only, so it excludes stream", param="best_of")
        if best_of > n:
            # The best are those of the largest mean logprob.
            chosen |= {"n": best_of, "logprobs": body.logprobs or 0}
    return _made(chosen)


def chat_params(body: ChatBody) -> SamplingParams:
    """Params of an answer.

    Raises:
        ApiError: a value is out of range, or contradicts another one.
    """
    chosen = _common(body)
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(400, "max_tokens and max_completion_tokens differ: keep one", param="max_tokens")
    chosen["max_tokens"] = next(iter(limits), None)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: expected logprobs to be true beside it", param="top_logprobs")
    if body.logprobs:
        chosen["logprobs"] = body.top_logprobs or 0
    return _made(chosen)


def request_hints(hints: KvHints | None) -> RequestHints | None:
    """What the caller knows of its KV's future.

    Raises:
        ApiError: a value is out of range.
    """
    if hints is None:
        return None
    try:
        return RequestHints(**hints.model_dump(exclude_none=True))
    except RequestError as error:
        raise ApiError(400, f"kv_hints: {error}", param="kv_hints", code="invalid_value") from error


def _common(body: SamplingBody) -> dict[str, Any]:
    # Greedy is the engine's default; OpenAI's clients expect theirs. A beam search draws nothing.
    default = {} if body.beam_width else {"temperature": 1.0}
    chosen: dict[str, Any] = default | body.model_dump(include=set(_AS_IT_IS), exclude_none=True)
    if body.n is not None and body.n > 1:
        chosen["n"] = body.n
    if body.seed is not None:
        chosen["seed"] = body.seed % _SEEDS
    if body.stop is not None:
        chosen["stop"] = tuple(body.stop)
    if body.stop_token_ids is not None:
        chosen["stop_token_ids"] = frozenset(body.stop_token_ids)
    if body.logit_bias:
        chosen["logit_bias"] = _biases(body.logit_bias)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: expected stream to be true beside it", param="stream_options")
    if body.sparse is not None:
        chosen["sparse"] = _sparse(body.sparse)
    return chosen


def _biases(biases: dict[str, float]) -> dict[int, float]:
    # JSON has no integer keys; `int` reads more than the decimal numbers that are one's spelling of a token id.
    for token in biases:
        if _TOKEN_ID.fullmatch(token) is None:
            message = f"logit_bias: {token[:_SHOWN]!r}: expected token ids as keys, in decimal digits"
            raise ApiError(400, message, param="logit_bias")
    return {int(token): bias for token, bias in biases.items()}


def _sparse(sparse: SparseKv) -> Sparse:
    try:
        return Sparse(**sparse.model_dump(exclude_none=True))
    except RequestError as error:
        raise as_api_error(error) from error


def _made(chosen: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**chosen)
    except RequestError as error:
        raise as_api_error(error) from error
