"""Log-probabilities of tokens, from the model's own logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtier.engine.outputs import TokenLogprobs

__all__ = ["token_logprobs"]


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """What the model thought of one token in each row.

    Args:
        logits: float32 [R, vocab], not adjusted.
        tokens: R token ids.
        tops: R numbers of likeliest tokens to report beside them.
    """
    if not tokens:
        return []
    scores = torch.log_softmax(logits, dim=-1)
    own = scores.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = ((scores > own).sum(dim=-1) + 1).tolist()
    width = min(max(tops), logits.shape[-1])
    best, ids = scores.topk(width, dim=-1)
    return [
        TokenLogprobs(token, score, rank, tuple(zip(likeliest[:top], values[:top], strict=True)))
        for token, score, rank, likeliest, values, top in zip(
            tokens, own[:, 0].tolist(), ranks, ids.tolist(), best.tolist(), tops, strict=True
        )
    ]
