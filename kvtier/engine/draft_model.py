"""DraftModel: a small model guesses what a large one will say (Leviathan et al., arXiv:2211.17192).

It keeps KV of its own, in step with the requests by their tokens alone:

    computed   [a b c d x y]      KV of these tokens is in the draft's pool; x y were guesses
    tokens     [a b c d e]        what the request has now
                       ^ kept     the rest is computed anew

It draws with the randomness of the position that it guesses for, so that two models that agree draw the same token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq

import torch

from kvtier.engine.drafting import Wish
from kvtier.engine.models.base import CausalLM
from kvtier.engine.sampler import Draw, sample
from kvtier.errors import ConfigError
from kvtier.gpu.attention import make_attention
from kvtier.gpu.storage import make_pool, size_pool
from kvtier.gpu.table import BlockTable

__all__ = ["DraftModel", "check_vocabulary"]


@dataclass(slots=True)
class _State:
    """The draft's side of a request."""

    table: BlockTable
    computed: list[int] = field(default_factory=list)
    agreed: int = 0  # leading tokens that were the request's own when last looked at

    def keep(self, tokens: Sequence[int]) -> None:
        """Void what was computed for tokens that the request does not have, and its last one: that has to say more."""
        pairs = zip(self.computed[self.agreed :], tokens[self.agreed :], strict=False)
        self.agreed += sum(1 for _ in takewhile(lambda pair: eq(*pair), pairs))
        self.agreed = min(self.agreed, len(tokens) - 1)
        del self.computed[self.agreed :]
        self.table.truncate(self.agreed)


@dataclass(slots=True)
class _Job:
    """One wish in the making: `fresh` are the tokens that the next pass computes. Implements `AttentionSpan`."""

    wish: Wish
    state: _State
    fresh: list[int]
    drafts: list[int] = field(default_factory=list)

    @property
    def block_ids(self) -> Sequence[int]:
        return self.state.table.ids

    @property
    def windowed_ids(self) -> Sequence[int]:
        return self.state.table.windowed_ids

    @property
    def start(self) -> int:
        return len(self.state.computed)

    @property
    def stop(self) -> int:
        return self.start + len(self.fresh)

    @property
    def draw(self) -> Draw:
        request = self.wish.request
        return Draw(request.params, request.seed, request.num_output + len(self.drafts))


class DraftModel:
    """Proposes what a second model says. Implements `kvtier.engine.drafting.Proposer`.

    Args:
        model: of the same vocabulary as the large one.
        memory_bytes: for its KV. Requests that do not fit get no drafts.
        block_size: tokens per block.
        token_budget: tokens of prompts that it computes at most between two steps.

    Raises:
        CapacityError: the memory is too small for one block.
    """

    def __init__(self, model: CausalLM, memory_bytes: int, block_size: int, token_budget: int) -> None:
        self._model = model
        layout = model.layout(block_size)
        self._pool = make_pool(layout, size_pool(layout, memory_bytes), model.device)
        self._attention = make_attention(self._pool, model.config)
        self._budget = token_budget
        self._states: dict[str, _State] = {}

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        """See `Proposer.propose`."""
        jobs = list(self._jobs(wishes))
        behind = [job for job in jobs if job.stop < job.wish.request.num_tokens]
        active = [job for job in jobs if job.stop == job.wish.request.num_tokens]
        self._compute(behind, ())
        while active:
            for job, token in zip(active, self._compute(active, [job.draw for job in active]), strict=True):
                job.drafts.append(token)
                job.fresh = [token]
            active = [job for job in active if len(job.drafts) < job.wish.length]
        made = {job.wish.request.id: tuple(job.drafts) for job in jobs}
        return [made.get(wish.request.id, ()) for wish in wishes]

    def _jobs(self, wishes: Sequence[Wish]) -> Iterator[_Job]:
        budget, limit = self._budget, self._model.config.max_positions
        for wish in wishes:
            tokens, stop = wish.request.tokens, wish.request.num_tokens + wish.length - 1
            state = self._states.setdefault(wish.request.id, _State(self._pool.blocks.table()))
            state.keep(tokens)
            start = len(state.computed)
            if budget == 0 or stop > limit or state.table.missing(stop, start) > self._pool.blocks.free_blocks:
                continue
            state.table.extend(stop, start)
            # Half a prompt is computed all the same: the rest follows next time.
            fresh = tokens[start : start + budget]
            budget -= len(fresh)
            yield _Job(wish, state, fresh)

    def _compute(self, jobs: Sequence[_Job], draws: Sequence[Draw]) -> list[int]:
        """One forward pass; what it says comes next, for as many jobs as there are draws."""
        if not jobs:
            return []
        device = self._model.device
        with torch.inference_mode():
            self._attention.plan(jobs)
            ids = torch.tensor([token for job in jobs for token in job.fresh], device=device)
            positions = torch.tensor([at for job in jobs for at in range(job.start, job.stop)], device=device)
            rows = torch.tensor([len(job.fresh) for job in jobs], device=device).cumsum(0) - 1
            logits = self._model.forward(ids, positions, self._attention, rows[: len(draws)])
            for job in jobs:
                job.state.computed += job.fresh
            return sample(logits, draws) if draws else []

    def forget(self, request_id: str) -> None:
        """See `Proposer.forget`."""
        state = self._states.pop(request_id, None)
        if state is not None:
            state.table.release()


def check_vocabulary(large: int, draft: int) -> None:
    """A draft model speaks of the large one's tokens.

    Raises:
        ConfigError: the vocabularies differ in size.
    """
    if large != draft:
        raise ConfigError(
            f"the draft model has {draft} tokens, the model {large}: expected a draft model with the same vocabulary"
        )
