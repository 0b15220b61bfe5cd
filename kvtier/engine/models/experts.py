"""Mixture of experts: routing, and experts that each run once over the tokens which chose them.

After Shazeer et al. (arXiv:1701.06538) and, for the layer's shape, Mixtral (Jiang et al., arXiv:2401.04088) and
Qwen2-MoE (arXiv:2407.10671).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvtier.engine.models.layers import silu_times
from kvtier.engine.models.linear import Linear
from kvtier.errors import ModelError

__all__ = ["Experts", "MixtureMlp", "SharedExpert", "softmax_routing"]


class Experts:
    """Gated MLPs, of which each token runs through a few.

    Tokens are sorted by expert, so an expert's weights are read once a step, and not at all if nobody chose it. A
    token's result is summed in the order in which it lists its experts, in float32: it depends on the token alone,
    up to what the products themselves make of other numbers of rows.

    Args:
        gate_up: per expert, [M, hidden] -> [M, 2 * intermediate], gate first.
        down: per expert, [M, intermediate] -> [M, hidden].

    Raises:
        ModelError: no expert, or not as many `down` as `gate_up`.
    """

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Sequence[Linear], down: Sequence[Linear]) -> None:
        if not gate_up or len(gate_up) != len(down):
            raise ModelError(f"{len(gate_up)} gate_up and {len(down)} down products: expected one of each per expert")
        self._gate_up = tuple(gate_up)
        self._down = tuple(down)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            x: [T, hidden].
            chosen: int64 [T, k], the experts of each token.
            weights: [T, k], in any float dtype.

        Returns:
            [T, hidden], in the dtype of `x`.
        """
        tokens, choices = chosen.shape
        if not tokens:
            return torch.zeros_like(x)
        slots = chosen.reshape(-1)
        order = slots.argsort(stable=True)
        results = self._run(x.index_select(0, order // choices), torch.bincount(slots, minlength=len(self._down)))
        by_choice = torch.empty_like(results).index_copy_(0, order, results).view(tokens, choices, -1)
        total = by_choice[:, 0] * weights[:, :1].float()
        for choice in range(1, choices):
            total += by_choice[:, choice] * weights[:, choice : choice + 1].float()
        return total.to(x.dtype)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, `counts` for each, through their experts."""
        # On CUDA this waits for the routing: how many rows a product has is decided on the host.
        pieces = torch.split(rows, counts.tolist())
        experts = zip(self._gate_up, self._down, pieces, strict=True)
        return torch.cat([down(silu_times(gate_up(piece))) for gate_up, down, piece in experts if len(piece)])


def softmax_routing(logits: Tensor, choices: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Choose each token's most probable experts.

    Args:
        logits: [T, experts], the router's.
        choices: k, experts per token.
        normalise: weights of a token sum to 1 (Mixtral; Qwen's `norm_topk_prob`), instead of being probabilities.

    Returns:
        chosen int64 [T, k], most probable first; weights float32 [T, k].
    """
    weights, chosen = logits.float().softmax(-1).topk(choices, dim=-1)
    return chosen, weights / weights.sum(-1, keepdim=True) if normalise else weights


class SharedExpert(NamedTuple):
    """An MLP that every token runs through, scaled by sigmoid(gate(x)) (Qwen2-MoE). gate: [T, hidden] -> [T, 1]."""

    mlp: Callable[[Tensor], Tensor]
    gate: Linear


class MixtureMlp:
    """Router, experts and, where the model has one, a shared expert: what stands for a dense MLP.

    Args:
        router: [T, hidden] -> logits [T, experts].
        experts: what is chosen from.
        choices: experts per token.
        normalise: see `softmax_routing`.
        shared: added to every token.
    """

    __slots__ = ("_choices", "_experts", "_normalise", "_router", "_shared")

    def __init__(
        self, router: Linear, experts: Experts, choices: int, *, normalise: bool, shared: SharedExpert | None = None
    ) -> None:
        self._router = router
        self._experts = experts
        self._choices = choices
        self._normalise = normalise
        self._shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        chosen, weights = softmax_routing(self._router(x), self._choices, normalise=self._normalise)
        routed = self._experts(x, chosen, weights)
        if self._shared is None:
            return routed
        return routed + self._shared.gate(x).sigmoid() * self._shared.mlp(x)
