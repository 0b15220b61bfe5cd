"""Which engine gets a request: the one with the least work before the answer can begin. Pure functions.

    work = tokens that it has to compute for this prompt      prompt - what it has, each token worth its tier's share
         + tokens of prompts that it is computing already
         + `decode_tokens` for each request under way

After the cost function of NVIDIA Dynamo's KV router: overlap and load in one unit, so that a long prefix outweighs a
short queue, and a long queue a short prefix.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import xxhash

__all__ = ["Candidate", "Choice", "Reason", "Weights", "choose"]

Reason: TypeAlias = Literal["prefix", "spill", "load"]
"""prefix: it has the most of the prompt. spill: another has more, and too much to do. load: nobody has anything."""


class Weights(NamedTuple):
    """shares: what a token is worth, by `index.Level`. decode_tokens: what a request under way weighs."""

    shares: tuple[float, ...]
    decode_tokens: int


class Candidate(NamedTuple):
    """name: of the engine. found: leading tokens of the prompt that it has, by `index.Level`. computing: tokens that it
    computes for other prompts. active: requests under way.
    """

    name: str
    found: Sequence[int]
    computing: int
    active: int


class Choice(NamedTuple):
    """at: place of the engine among the candidates."""

    at: int
    reason: Reason


def choose(candidates: Sequence[Candidate], tokens: int, anchor: bytes, weights: Weights) -> Choice:
    """The engine with the least work; of equals, that with the fewest requests, and then always the same for a prompt.

    Args:
        candidates: at least one.
        tokens: of the prompt.
        anchor: what prompts with the same beginning have in common; equal anchors prefer the same idle engine.
        weights: see `Weights`.
    """
    saved = [sum(share * found for share, found in zip(weights.shares, one.found, strict=True)) for one in candidates]

    def work(at: int) -> tuple[float, int, int]:
        one = candidates[at]
        load = one.computing + weights.decode_tokens * one.active
        return tokens - saved[at] + load, one.active, xxhash.xxh3_64_intdigest(anchor + one.name.encode())

    chosen = min(range(len(candidates)), key=work)
    most = max(saved)
    if not most:
        return Choice(chosen, "load")
    return Choice(chosen, "prefix" if saved[chosen] == most else "spill")
