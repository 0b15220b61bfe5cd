"""What a request wants of its logits before a token is chosen: penalties, biases, ends that come too early.

Rows that want nothing are left alone and cost nothing.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvtier.engine.counts import TokenCounts
from kvtier.engine.params import SamplingParams

__all__ = ["adjust", "is_adjusted"]


def is_adjusted(params: SamplingParams, num_output: int) -> bool:
    """Whether `adjust` would change the logits of the token behind `num_output` output tokens."""
    return params.penalized or bool(params.logit_bias) or num_output < params.min_tokens


def adjust(
    row: Tensor, params: SamplingParams, num_output: int, ends: Iterable[int], counts: TokenCounts | None
) -> None:
    """Change one row of logits in place: penalties, then biases, then the ends that are too early.

    Args:
        row: float32 [vocab].
        params: of the request.
        num_output: tokens of its output so far.
        ends: tokens that would end it.
        counts: up to date; None unless `params.penalized`.
    """
    if counts is not None:
        _penalize(row, params, counts)
    if params.logit_bias:
        row[list(params.logit_bias)] += torch.tensor(
            list(params.logit_bias.values()), dtype=row.dtype, device=row.device
        )
    if num_output < params.min_tokens:
        row[list(ends)] = float("-inf")


def _penalize(row: Tensor, params: SamplingParams, counts: TokenCounts) -> None:
    if params.repetition_penalty != 1:
        present = torch.tensor(list(counts.present), device=row.device)
        scores = row[present]
        row[present] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if counts.output and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(counts.output), device=row.device)
        times = torch.tensor(list(counts.output.values()), dtype=row.dtype, device=row.device)
        row[ids] -= params.presence_penalty + params.frequency_penalty * times
