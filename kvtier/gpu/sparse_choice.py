"""Choices: which blocks of one sequence a token's KV heads attend to, in each layer.

A choice is told of every step of its sequence (`follow`), may watch the queries of its prompt (`watch`), names block
positions (`choose`) and may learn how much attention they got (`learn`).
"""

from copy import deepcopy
from typing import Protocol, Self

import torch
from torch import Tensor

from kvtier.errors import FormatMismatch
from kvtier.gpu.block_scores import BlockScores
from kvtier.gpu.storage import DevicePool

__all__ = ["Choice", "HeavyHitters", "QueryBounds", "make_choice"]

# Enough of a prompt's latest queries to tell what its continuation will attend to (SnapKV, arXiv:2404.14469).
_WATCHED_QUERIES = 64


class Choice(Protocol):
    """See the module. Positions are those in the sequence's block table."""

    wants_mass: bool
    ready: bool

    def follow(self, blocks: Tensor, stop: int) -> None:
        """The next step's table, int64 [N], which holds `stop` tokens with the step's own."""
        ...

    def watch(self, layer: int, q: Tensor, blocks: Tensor, stop: int) -> None:
        """Queries of the prompt, [kv_heads, group, T, head_dim], whose last one is token `stop - 1`."""
        ...

    def choose(self, layer: int, q: Tensor, budget: int, sink: int, recent: int) -> Tensor:
        """For queries [kv_heads, group, head_dim], int64 [rows, budget], the last column the table's last block.

        rows: KV heads, or query heads where each of them chooses for itself.
        """
        ...

    def learn(self, layer: int, places: Tensor, mass: Tensor) -> None:
        """The attention that the chosen blocks got, [kv_heads, budget]; only if `wants_mass`."""
        ...

    def copy(self) -> Self:
        """A choice of another sequence, which goes on from this one's blocks."""
        ...


# Quest's own bound is 1: as if one key had every element at its extreme. Measured, less of it ranks blocks better.
_SPREAD = 0.25


class QueryBounds:
    """`quest`: the blocks whose keys may score highest, by the least and the greatest of each key element.

    With m the middle between the two and r half their distance, a block's score is q·m + spread * |q|·r.

    The bounds of full blocks are kept per layer; the last block is always chosen and has none.

    bounds     [layers, places, 2 (least, greatest), kv_heads, head_dim]
    """

    wants_mass = False

    def __init__(self, pool: DevicePool, scores: BlockScores) -> None:
        self.ready = False
        self._scores = scores
        self._blocks = torch.empty(0, dtype=torch.int64, device=pool.device)
        self._bounded = [0] * len(pool.group.layers)
        shape = (len(pool.group.layers), 0, 2, pool.group.kv_heads, pool.group.head_dim)
        self._bounds = torch.empty(shape, dtype=pool.tensor.dtype, device=pool.device)

    def follow(self, blocks: Tensor, stop: int) -> None:
        """See `Choice.follow`. Blocks that were replaced since, say by a swap, get new bounds."""
        common = min(len(blocks), len(self._blocks))
        changed = torch.nonzero(blocks[:common] != self._blocks[:common])
        same = int(changed[0]) if len(changed) else common
        self._bounded = [min(bounded, same) for bounded in self._bounded]
        self._blocks = blocks
        if len(blocks) > self._bounds.shape[1]:
            grown = self._bounds.new_empty((self._bounds.shape[0], 2 * len(blocks), *self._bounds.shape[2:]))
            grown[:, : self._bounds.shape[1]] = self._bounds
            self._bounds = grown

    def watch(self, layer: int, q: Tensor, blocks: Tensor, stop: int) -> None:
        """The prompt has come by: from now on the sequence is sparse."""
        self.ready = True

    def choose(self, layer: int, q: Tensor, budget: int, sink: int, recent: int) -> Tensor:
        """See `Choice.choose`. Each query head chooses for itself: a choice for its whole group recalls less."""
        full = len(self._blocks) - 1
        self._bound(layer, full)
        least, greatest = self._bounds[layer, :full].float().unbind(1)
        queries = q.float()
        scores = torch.einsum("hgd,nhd->hgn", queries, (least + greatest) / 2)
        scores += torch.einsum("hgd,nhd->hgn", queries.abs(), (greatest - least) * (_SPREAD / 2))
        return best_places(scores.flatten(0, 1), budget, sink, recent)

    def _bound(self, layer: int, full: int) -> None:
        first = self._bounded[layer]
        if first < full:
            self._bounds[layer, first:full] = self._scores.bounds(layer, self._blocks[first:full])
            self._bounded[layer] = full

    def learn(self, layer: int, places: Tensor, mass: Tensor) -> None:
        """Nothing is learnt."""

    def copy(self) -> Self:
        """See `Choice.copy`."""
        return deepcopy(self, {id(self._scores): self._scores})


class HeavyHitters:
    """`h2o`: each KV head keeps the blocks that got most attention so far; what it gave up never comes back.

    The prompt's latest queries are the beginning of the sums. A token that is computed once more (by a fork, or after
    a preemption) has been summed up already.

    mass       [layers, kv_heads, places]; minus infinity where a block was given up
    """

    wants_mass = True

    def __init__(self, pool: DevicePool, scores: BlockScores) -> None:
        self.ready = False
        self._scores = scores
        self._count = 0
        self._seen = self._fresh = 0  # tokens whose queries came by; those of this step that had not before
        self._mass = torch.zeros(len(pool.group.layers), pool.group.kv_heads, 0, device=pool.device)

    def follow(self, blocks: Tensor, stop: int) -> None:
        """See `Choice.follow`."""
        self._count = len(blocks)
        self._fresh, self._seen = max(0, stop - self._seen), max(stop, self._seen)
        missing = len(blocks) - self._mass.shape[2]
        if missing > 0:
            self._mass = torch.nn.functional.pad(self._mass, (0, 2 * missing))

    def watch(self, layer: int, q: Tensor, blocks: Tensor, stop: int) -> None:
        """Sum up the attention of the latest queries over each block."""
        self.ready = True
        count = min(_WATCHED_QUERIES, self._fresh)
        if count:
            self._mass[layer, :, : len(blocks)] += self._scores.mass(layer, q[:, :, -count:], blocks, stop)

    def choose(self, layer: int, q: Tensor, budget: int, sink: int, recent: int) -> Tensor:
        """See `Choice.choose`."""
        mass = self._mass[layer, :, : self._count]
        places = best_places(mass[:, :-1], budget, sink, recent)
        kept = torch.full_like(mass, float("-inf"))
        kept.scatter_(1, places, mass.gather(1, places))
        self._mass[layer, :, : self._count] = kept
        return places

    def learn(self, layer: int, places: Tensor, mass: Tensor) -> None:
        """See `Choice.learn`."""
        self._mass[layer].scatter_add_(1, places, mass)

    def copy(self) -> Self:
        """See `Choice.copy`."""
        return deepcopy(self, {id(self._scores): self._scores})


def best_places(scores: Tensor, budget: int, sink: int, recent: int) -> Tensor:
    """Positions int64 [rows, budget] of the best blocks, those that always are chosen among them, the last one last.

    Args:
        scores: [rows, N - 1], of all blocks but the last.
        budget: how many, at most N.
        sink: leading blocks that always are.
        recent: latest ones that are, the last block included.
    """
    rows, others = scores.shape
    wanted = scores.float().clone()
    wanted[:, :sink] = float("inf")
    wanted[:, max(others - recent + 1, 0) :] = float("inf")
    places = wanted.topk(min(budget - 1, others), dim=1).indices
    return torch.cat((places, places.new_full((rows, 1), others)), 1)


def make_choice(kind: str, pool: DevicePool, scores: BlockScores) -> Choice:
    """The choice of a sequence of its own, over the pool's keys.

    Raises:
        FormatMismatch: an unknown kind.
    """
    match kind:
        case "h2o":
            return HeavyHitters(pool, scores)
        case "quest":
            return QueryBounds(pool, scores)
        case _:
            raise FormatMismatch(f"sparse kind {kind!r}: expected h2o or quest")
