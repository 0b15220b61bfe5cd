"""Sampler: logits to tokens, one draw per row, the same draw in whatever batch the row is.

A row's randomness is a function of (seed, position in the output) alone: SplitMix64 (Steele, Lea, Flood 2014) as
a counter-based generator. So a request that was preempted, or that shares its steps with others, goes on as if alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.engine.params import SamplingParams
from kvtier.errors import ModelError

__all__ = ["Draw", "derived_seed", "sample", "uniforms"]

# Sorting a whole vocabulary takes ten times as long as its few likeliest tokens, which nearly always cover `top_p`.
_HEAD = 512
_FOLD = 8
_ID_BITS = 32
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Draw(NamedTuple):
    """One row's sampling: its params, and the coordinates of its randomness. The logits are adjusted already."""

    params: SamplingParams
    seed: int
    position: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token per row.

    Args:
        logits: float32 [R, vocab].
        draws: R of them.

    Raises:
        ModelError: a row's largest logit is not finite, so the model computed nonsense.
    """
    best, tokens = logits.max(dim=-1)
    if not torch.isfinite(best).all():
        raise ModelError("the model's logits are not finite numbers: check its weights, or use dtype float32")
    random = [row for row, draw in enumerate(draws) if not draw.params.greedy]
    if random:
        rows = torch.tensor(random, device=logits.device)
        tokens[rows] = _draw_rows(logits[rows], best[rows], [draws[row] for row in random])
    chosen: list[int] = tokens.tolist()
    return chosen


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """Element `indices[i]` of the stream of `seeds[i]`: float64 [R] in [0, 1)."""
    return (_stream(seeds, indices) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derived_seed(seed: int, number: int) -> int:
    """A seed for the `number`-th request of an engine whose own seed is `seed`."""
    return int(_stream([seed], [number])[0])


def _stream(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.uint64]:
    steps = np.asarray(indices, dtype=np.uint64) + np.uint64(1)
    # The seed is mixed before it is added, or neighbouring seeds would be each other's streams, shifted.
    return _mix(_mix(np.asarray(seeds, dtype=np.uint64)) + steps * _GOLDEN)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _draw_rows(logits: Tensor, best: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Sampled tokens int64 [R], of rows with a temperature above 0; `best` float32 [R] is each row's largest logit."""
    device = logits.device
    heat = torch.tensor([draw.params.temperature for draw in draws], dtype=torch.float32, device=device)
    heat.clamp_(min=torch.finfo(torch.float32).tiny)
    # Shifted first: the quotient by a tiny temperature can then overflow to -inf only.
    probabilities = torch.softmax((logits - best[:, None]) / heat[:, None], dim=-1)
    points = torch.from_numpy(uniforms([draw.seed for draw in draws], [draw.position for draw in draws])).to(device)
    tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
    limited = torch.tensor([_is_limited(draw.params) for draw in draws], device=device)
    if limited.any():
        params = [draw.params for draw, is_limited in zip(draws, limited.tolist(), strict=True) if is_limited]
        tokens[limited] = _from_likeliest(probabilities[limited], points[limited], params)
    free = ~limited
    if free.any():
        mass = probabilities[free].double().cumsum(dim=-1)
        tokens[free] = _invert(mass, mass[:, -1], points[free])
    return tokens


def _is_limited(params: SamplingParams) -> bool:
    return bool(params.top_k) or params.top_p < 1 or params.min_p > 0


def _from_likeliest(probabilities: Tensor, points: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Tokens int64 [R] of rows with a limit; `probabilities` float32 [R, vocab], points float64 [R]."""
    device, vocab = probabilities.device, probabilities.shape[-1]
    ranks = torch.tensor([min(one.top_k or vocab, vocab) for one in params], device=device)
    shares = torch.tensor([one.top_p for one in params], dtype=torch.float64, device=device)
    floors = torch.tensor([one.min_p for one in params], dtype=torch.float64, device=device)
    width = min(vocab, max(_HEAD, *(one.top_k for one in params)))
    while True:
        weights, ids = _likeliest(probabilities, width)
        mass = weights.cumsum(dim=-1)
        reachable = mass.gather(1, ranks.clamp(max=width)[:, None] - 1).squeeze(1)
        # top_p is a share of what top_k leaves over.
        goal = shares * torch.where(ranks < vocab, reachable, 1.0)
        kept = ((mass - weights) < goal[:, None]) & (torch.arange(width, device=device) < ranks[:, None])
        kept &= weights >= (floors * weights[:, 0])[:, None]
        # A share of what top_k leaves may be too small a number to be told from 0.
        kept[:, 0] = True
        last = kept.sum(dim=-1, keepdim=True) - 1
        # Of tokens as likely as the last one here, which of them are here is chance.
        if width == vocab or bool((weights.gather(1, last) > weights[:, -1:]).all()):
            break
        width = min(vocab, 8 * width)
    total = mass.gather(1, last).squeeze(1)
    return ids.gather(1, _invert(mass, total, points)[:, None]).squeeze(1)


def _likeliest(probabilities: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest probabilities, best first, float64, and their tokens int64, both [R, width].

    Equal ones come in the order of their tokens, whatever the width and the other rows: in bfloat16 many are equal, and
    `topk` has them in an order that depends on both.
    """
    likeliest, ids = _largest(probabilities, width)
    # Not negative, so that their bits are in the same order as they are.
    bits = likeliest.view(torch.int32).to(torch.int64)
    order = (bits << _ID_BITS | (1 << _ID_BITS) - 1 - ids).argsort(dim=-1, descending=True)
    return likeliest.gather(1, order).double(), ids.gather(1, order)


def _largest(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """What `topk` finds in float32 [R, N], unsorted and in half the time: it looks at fewer.

    values [R, N] as rows of `_FOLD` each, and a rest:

        . . . . . 7 . . .
        9 . . . . . . . .        the largest lie in the columns whose own largest are the largest: 9 and 7,
        . . . . . 8 . . .        so of these columns all, and the rest, are candidates
        . .
    """
    columns = values.shape[1] // _FOLD
    whole = columns * _FOLD
    if columns < 2 * width:
        return values.topk(width, dim=-1, sorted=False)
    best = values[:, :whole].reshape(-1, _FOLD, columns).amax(1).topk(width, dim=-1, sorted=False).indices
    places = best[:, None] + torch.arange(0, whole, columns, device=values.device)[:, None]
    rest = torch.arange(whole, values.shape[1], device=values.device).expand(len(values), -1)
    candidates = torch.cat((places.flatten(1), rest), 1)
    largest, found = values.gather(1, candidates).topk(width, dim=-1, sorted=False)
    return largest, candidates.gather(1, found)


def _invert(mass: Tensor, total: Tensor, points: Tensor) -> Tensor:
    """Index int64 [R] of the first entry whose cumulative `mass` [R, N] exceeds `points` of `total`, both [R]."""
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(mass, torch.minimum(points * total, below)[:, None], right=True).squeeze(1)
