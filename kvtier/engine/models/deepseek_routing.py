"""DeepSeek's routing of tokens to experts: by group, and with a bias that balances but does not weigh.

DeepSeek-V2 (arXiv:2405.04434) limits a token to the best groups of experts; DeepSeek-V3 (arXiv:2412.19437) scores
with a sigmoid and corrects the choice, not the weights, by a trained bias (`noaux_tc`).
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.engine.models.deepseek_config import Routing

__all__ = ["GroupRouter"]


class GroupRouter:
    """Chooses experts for tokens, in float32.

    Args:
        routing: how.
        weight: [experts, hidden], in any float dtype.
        bias: float32 [experts] that corrects the choice; None where `routing.corrected` is false.
    """

    __slots__ = ("_bias", "_routing", "_weight")

    def __init__(self, routing: Routing, weight: Tensor, bias: Tensor | None) -> None:
        self._routing = routing
        self._weight = weight.float()
        self._bias = bias

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of tokens [T, hidden]: chosen int64 [T, k] and their weights float32 [T, k]."""
        routing = self._routing
        scores = self._scores(functional.linear(x.float(), self._weight))
        ranked = scores if self._bias is None else scores + self._bias
        if routing.kept_groups < routing.groups:
            ranked = self._limited(ranked)
        chosen = ranked.topk(routing.chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if routing.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * routing.scale

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self._routing.scoring == "sigmoid" else logits.softmax(-1)

    def _limited(self, ranked: Tensor) -> Tensor:
        """The scores of experts outside of each token's best groups become -inf."""
        routing = self._routing
        groups = ranked.view(len(ranked), routing.groups, routing.experts // routing.groups)
        standing = groups.topk(routing.votes, dim=-1).values.sum(-1)
        kept = standing.topk(routing.kept_groups, dim=-1).indices
        dropped = torch.ones_like(standing, dtype=torch.bool).scatter_(-1, kept, value=False)
        return groups.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
