"""SamplingParams: how one request's output is chosen, and when it ends."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.errors import RequestError

__all__ = ["SamplingParams"]

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated on construction.

    Args:
        max_tokens: tokens to generate at most; None is as many as the context takes.
        temperature: 0 picks the likeliest token (greedy); above, logits are divided by it.
        top_k: sample among the k likeliest tokens only; 0 is no limit.
        top_p: sample among the likeliest tokens that together have this probability, after `top_k`.
        seed: makes the output reproducible, whatever else runs in the batch; None draws from the engine's seed.
        stop: texts that end the output, which is cut before them.
        stop_token_ids: tokens that end the output, beside the model's end-of-sequence tokens.
        ignore_eos: go on after the model's end-of-sequence tokens.
        accept_lossy: reuse KV that went through a lossy format; the output may differ. None: as the tiers are set.

    Raises:
        RequestError: a value is out of range.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    accept_lossy: bool | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, _MAX_SEED)
        _check_integer("top_k", self.top_k, 0)
        if not (_is_real(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature={self.temperature!r}: expected a finite number, at least 0")
        if not (_is_real(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError(f"top_p={self.top_p!r}: expected a number above 0 and at most 1")
        if self.accept_lossy not in (None, True, False):
            raise RequestError(f"accept_lossy={self.accept_lossy!r}: expected true, false, or none for the default")
        object.__setattr__(self, "stop", _stop_texts(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, so that nothing is drawn."""
        return self.temperature == 0 or self.top_k == 1


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    whole = value if isinstance(value, int) and not isinstance(value, bool) else low - 1
    if whole < low or (high is not None and whole > high):
        limit = f"at least {low}" if high is None else f"{low}..{high}"
        raise RequestError(f"{name}={value!r}: expected an integer, {limit}")


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
