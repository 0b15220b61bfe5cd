"""SamplingParams: how one request's output is chosen, and when it ends."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvtier.engine.sparse import Sparse
from kvtier.errors import RequestError

__all__ = ["SamplingParams"]

_MAX_SEED = 2**64 - 1
_MAX_SEQUENCES = 256
_MAX_LOGPROBS = 1024
_MAX_BIAS = 100.0
_MAX_TEMPERATURE = 1e30  # float32 holds it
_MAX_LENGTH_PENALTY = 10.0  # the power of a length: a far larger one is no number any more
_MAX_PENALTY = 100.0
_LEAST_REPETITION, _MOST_REPETITION = 0.01, 100.0
_MAX_TARGET = 86_400.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated on construction.

    Args:
        max_tokens: tokens to generate at most; None is as many as the context takes.
        min_tokens: tokens to generate before one that ends the output may be chosen; nor does a `stop` text end it that
            they complete.
        n: sequences to generate from the prompt, whose KV they share.
        beam_width: search with so many beams instead of token by token, and return the `n` best outputs; 0: no.
        length_penalty: of beam search: outputs are ranked by logprob / length ** length_penalty.
        temperature: 0 picks the likeliest token (greedy); above, logits are divided by it.
        top_k: sample among the k likeliest tokens only; 0 is no limit.
        top_p: sample among the likeliest tokens that together have this probability, after `top_k`.
        min_p: sample only among tokens at least this share as likely as the likeliest, after `top_p`.
        repetition_penalty: divides the logits, where they are positive, of all tokens of prompt and output so far, and
            multiplies them where they are negative (Keskar et al., arXiv:1909.05858); 1 is none.
        presence_penalty: subtracted from the logits of tokens that the output holds.
        frequency_penalty: subtracted from them once for each time that the output holds them.
        logit_bias: token id -> what is added to its logit, -100..100.
        logprobs: report log-probabilities of the output tokens, and of so many likeliest ones beside each; None: none.
        prompt_logprobs: likewise for the prompt, all of which is computed then: no cached prefix is used for it.
        seed: makes the output reproducible, whatever else runs in the batch; None draws from the engine's seed.
        stop: texts that end the output, which is cut before them.
        stop_token_ids: tokens that end the output, beside the model's end-of-sequence tokens.
        ignore_eos: go on after the model's end-of-sequence tokens.
        priority: class of the request, the lower the more important.
        ttft_target: seconds in which the first token is wanted.
        tpot_target: seconds per further token that are wanted.
        speculate: let the engine guess tokens ahead, where it is set up to; the output is the same.
        sparse: which blocks the output attends to, where that is not all; the output is then another one. None: all.
        accept_lossy: reuse KV that went through a lossy format; the output may differ. None: as the tiers are set.
        cache_salt: a secret of those who may find each other's KV, and so learn from the time to the first token what
            was sent before: a request without it, or with another one, finds it in no tier. None: nobody's secret.

    Raises:
        RequestError: a value is out of range.
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    n: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    priority: int = 0
    ttft_target: float | None = None
    tpot_target: float | None = None
    speculate: bool = True
    sparse: Sparse | None = None
    accept_lossy: bool | None = None
    cache_salt: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_integers()
        self._check_numbers()
        if self.sparse is not None and not isinstance(self.sparse, Sparse):
            raise RequestError(f"sparse={self.sparse!r}: expected Sparse(kind, ...), or none")
        if self.accept_lossy not in (None, True, False):
            raise RequestError(f"accept_lossy={self.accept_lossy!r}: expected true, false, or none for the default")
        if not (self.cache_salt is None or _is_salt(self.cache_salt)):
            raise RequestError(f"cache_salt={self.cache_salt!r}: expected a text of UTF-8 that is not empty, or none")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.beam_width:
            self._check_beams()
        object.__setattr__(self, "stop", _stop_texts(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))

    def _check_integers(self) -> None:
        for name, low, high in (
            ("max_tokens", 1, None),
            ("min_tokens", 0, None),
            ("n", 1, _MAX_SEQUENCES),
            ("beam_width", 0, _MAX_SEQUENCES),
            ("top_k", 0, None),
            ("logprobs", 0, _MAX_LOGPROBS),
            ("prompt_logprobs", 0, _MAX_LOGPROBS),
            ("seed", 0, _MAX_SEED),
            ("priority", -_MAX_SEED, _MAX_SEED),
        ):
            value = getattr(self, name)
            if value is not None or name in ("min_tokens", "n", "beam_width", "top_k", "priority"):
                _check_integer(name, value, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens}: expected at most max_tokens={self.max_tokens}")

    def _check_numbers(self) -> None:
        if not (_is_real(self.temperature) and 0 <= self.temperature <= _MAX_TEMPERATURE):
            raise RequestError(f"temperature={self.temperature!r}: expected a number in 0..{_MAX_TEMPERATURE:g}")
        if not (_is_real(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError(f"top_p={self.top_p!r}: expected a number above 0 and at most 1")
        if not (_is_real(self.min_p) and 0 <= self.min_p <= 1):
            raise RequestError(f"min_p={self.min_p!r}: expected a number in 0..1")
        least, most = _LEAST_REPETITION, _MOST_REPETITION
        if not (_is_real(self.repetition_penalty) and least <= self.repetition_penalty <= most):
            raise RequestError(
                f"repetition_penalty={self.repetition_penalty!r}: expected a number in {least}..{most:g}; 1 is none"
            )
        for name, most in (
            ("presence_penalty", _MAX_PENALTY),
            ("frequency_penalty", _MAX_PENALTY),
            ("length_penalty", _MAX_LENGTH_PENALTY),
        ):
            if not (_is_real(getattr(self, name)) and abs(getattr(self, name)) <= most):
                raise RequestError(
                    f"{name}={getattr(self, name)!r}: expected a number in -{most:g}..{most:g}; 0 is none"
                )
        for name in ("ttft_target", "tpot_target"):
            value = getattr(self, name)
            if value is not None and not (_is_real(value) and 0 < value <= _MAX_TARGET):
                raise RequestError(f"{name}={value!r}: expected seconds, above 0 and at most a day, or none")

    def _check_beams(self) -> None:
        if self.n > self.beam_width:
            raise RequestError(f"n={self.n} with beam_width={self.beam_width}: expected at most as many as beams")
        for name, neutral in (("temperature", 0), ("stop", ()), ("logprobs", None), ("prompt_logprobs", None)):
            if getattr(self, name) != neutral:
                raise RequestError(
                    f"{name}={getattr(self, name)!r} with beam_width={self.beam_width}: drop one of them"
                )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, so that nothing is drawn."""
        return self.temperature == 0 or self.top_k == 1

    def ends(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end the output, with a model whose end-of-sequence tokens are `eos_ids`."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | eos_ids

    @property
    def penalized(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _is_salt(value: object) -> bool:
    # Half a surrogate pair has no bytes of its own.
    return isinstance(value, str) and bool(value) and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    whole = value if isinstance(value, int) and not isinstance(value, bool) else low - 1
    if whole < low or (high is not None and whole > high):
        limit = f"at least {low}" if high is None else f"{low}..{high}"
        raise RequestError(f"{name}={value!r}: expected an integer, {limit}")


def _biases(biases: Mapping[int, float]) -> Mapping[int, float]:
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias={biases!r}: expected a mapping of token ids to numbers")
    for token, bias in biases.items():
        _check_integer("logit_bias token", token, 0)
        if not (_is_real(bias) and abs(bias) <= _MAX_BIAS):
            raise RequestError(f"logit_bias of token {token} = {bias!r}: expected a number in -100..100")
    return dict(biases)


def _stop_texts(texts: Iterable[str]) -> tuple[str, ...]:
    listed = () if isinstance(texts, str) else tuple(texts)
    if isinstance(texts, str) or not all(isinstance(text, str) and text for text in listed):
        raise RequestError(f"stop={texts!r}: expected a sequence of non-empty texts")
    return listed


def _token_ids(ids: Iterable[int]) -> frozenset[int]:
    listed = frozenset(ids)
    for token in listed:
        _check_integer("stop_token_ids", token, 0)
    return listed
