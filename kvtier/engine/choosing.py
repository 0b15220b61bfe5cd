"""Chooser: logits become tokens, one request after the other, whatever shares their batch.

Draft tokens are verified here. Every row chooses its token by itself, with the randomness of its own position; a draft
is accepted as long as it is what was chosen. So the output, drawn or greedy, is token for token the one without drafts,
and an accepted draft model's guess has the chance that Leviathan et al. (arXiv:2211.17192) give to a point mass.

    span of a decode with drafts       [t  d0 d1 d2)
    chosen, row by row                  d0 d1 x  y       accepted: d0 d1, then x; y is of no use
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import NamedTuple

import torch
from torch import Tensor

from kvtier.engine.beam import candidates_per_beam
from kvtier.engine.logits import adjust, is_adjusted
from kvtier.engine.logprobs import token_logprobs
from kvtier.engine.outputs import Sampled
from kvtier.engine.plan import StepPlan
from kvtier.engine.request import Request
from kvtier.engine.sampler import Draw, sample

__all__ = ["Chooser", "Rows"]


class _Run(NamedTuple):
    """Consecutive rows of the flat batch, of one request: the one that follows token `position`, and those behind."""

    request: Request
    first: int
    length: int
    position: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step's flat batch whose logits are wanted.

    Args:
        sampled: one run of rows for each of the plan's samples.
        scored: rows whose next token is known, of prompts that want log-probabilities.
    """

    sampled: tuple[_Run, ...]
    scored: tuple[_Run, ...]

    @classmethod
    def of(cls, plan: StepPlan) -> "Rows":
        """What a plan wants."""
        sampled, scored, first, samples = [], [], 0, frozenset(plan.samples)
        for at, (request, span) in enumerate(zip(plan.requests, plan.step.spans, strict=True)):
            if at in samples:
                last = request.num_tokens - 1
                sampled.append(_Run(request, first + last - span.start, span.stop - last, last))
            if request.to_be_scored and span.start < request.prompt_len - 1:
                known = min(span.stop, request.prompt_len - 1) - span.start
                scored.append(_Run(request, first, known, span.start))
            first += span.stop - span.start
        return cls(tuple(sampled), tuple(scored))

    def indices(self) -> list[int]:
        """Row numbers, in the order in which `Chooser.choose` expects their logits."""
        return [row for run in (*self.sampled, *self.scored) for row in range(run.first, run.first + run.length)]


class Chooser:
    """Chooses tokens.

    Args:
        eos_ids: tokens that end an output, unless its request ignores them.
    """

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids

    def choose(self, rows: Rows, logits: Tensor) -> list[Sampled]:
        """What each of the plan's samples got, or why it got nothing. Scores of prompts are left with their requests.

        Args:
            rows: of the plan.
            logits: float32 [R, vocab], of `rows.indices()`.
        """
        count = sum(run.length for run in rows.sampled)
        self._score(rows.scored, logits[count:])
        if not count:
            return []
        try:
            return self._chosen(rows.sampled, logits[:count])
        except Exception:  # noqa: BLE001  # whatever it was, choosing for each alone says whose it is
            return self._chosen_alone(rows.sampled, logits)

    def _chosen_alone(self, runs: Sequence[_Run], logits: Tensor) -> list[Sampled]:
        """As `_chosen`, of each request by itself: what goes wrong with one costs no other."""
        results: list[Sampled] = []
        first = 0
        for run in runs:
            try:
                results += self._chosen([run], logits[first : first + run.length])
            except Exception as error:  # noqa: BLE001  # it is the request's
                results.append(Sampled((), error=error))
            first += run.length
        return results

    def _chosen(self, runs: Sequence[_Run], logits: Tensor) -> list[Sampled]:
        draws = [
            Draw(run.request.params, run.request.seed, run.request.num_output + at)
            for run in runs
            for at in range(run.length)
        ]
        tokens = iter(sample(self._adjusted(runs, logits), draws))
        results = [Sampled(tuple(self._accepted(run, tokens))) for run in runs]
        return self._with_candidates(runs, self._with_logprobs(runs, results, logits), logits)

    def _accepted(self, run: _Run, tokens: Iterator[int]) -> list[int]:
        chosen = [next(tokens) for _ in range(run.length)]
        good = sum(1 for _ in takewhile(bool, map(eq, chosen, run.request.drafts)))
        return chosen[: good + 1]

    def _adjusted(self, runs: Sequence[_Run], logits: Tensor) -> Tensor:
        wanted, first = [], 0
        for run in runs:
            request = run.request
            wanted += [
                (first + at, request, request.num_output + at)
                for at in range(run.length)
                if is_adjusted(request.params, request.num_output + at) and not request.params.beam_width
            ]
            first += run.length
        if not wanted:
            return logits
        own = logits.clone()
        for row, request, num_output in wanted:
            self._adjust(own[row], request, num_output)
        return own

    def _adjust(self, row: Tensor, request: Request, num_output: int) -> None:
        if request.counts is not None:
            request.counts.follow(request.tokens)
        adjust(row, request.params, num_output, request.params.ends(self._eos_ids), request.counts)

    def _with_candidates(self, runs: Sequence[_Run], results: list[Sampled], logits: Tensor) -> list[Sampled]:
        first = 0
        for at, run in enumerate(runs):
            if run.request.params.beam_width:
                results[at] = Sampled((), candidates=self._candidates(run.request, logits[first]))
            first += run.length
        return results

    def _candidates(self, request: Request, row: Tensor) -> tuple[tuple[int, float], ...]:
        # As transformers does it: penalties and masks change log-probabilities here, which are not normalised again.
        scores = torch.log_softmax(row, dim=-1)
        self._adjust(scores, request, request.num_output)
        wanted = candidates_per_beam(request.params.beam_width, request.params.ends(self._eos_ids))
        best, tokens = scores.topk(min(wanted, len(scores)))
        return tuple(zip(tokens.tolist(), best.tolist(), strict=True))

    def _with_logprobs(self, runs: Sequence[_Run], results: list[Sampled], logits: Tensor) -> list[Sampled]:
        rows: list[int] = []
        tokens: list[int] = []
        tops: list[int] = []
        first = 0
        for run, result in zip(runs, results, strict=True):
            if (top := run.request.params.logprobs) is not None:
                rows += range(first, first + len(result.tokens))
                tokens += result.tokens
                tops += [top] * len(result.tokens)
            first += run.length
        if not rows:
            return results
        found = iter(token_logprobs(logits[torch.tensor(rows, device=logits.device)], tokens, tops))
        return [
            result
            if run.request.params.logprobs is None
            else Sampled(result.tokens, tuple(next(found) for _ in result.tokens))
            for run, result in zip(runs, results, strict=True)
        ]

    def _score(self, runs: Sequence[_Run], logits: Tensor) -> None:
        first = 0
        for run in runs:
            request, start = run.request, run.position + 1
            tokens = request.tokens[start : start + run.length]
            tops = [request.params.prompt_logprobs or 0] * run.length
            scores = token_logprobs(logits[first : first + run.length], tokens, tops)
            # A request that lost its blocks half-way starts over: what is known already stays.
            request.scores += scores[max(0, len(request.scores) - run.position) :]
            first += run.length
