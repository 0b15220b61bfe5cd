"""Request: one sequence's tokens, blocks and state. States change here and nowhere else.

WAITING -> LOADING -> RUNNING -> FINISHED
WAITING -> RUNNING                              nothing to load, or within the step
RUNNING -> WAITING                              preempted, to start over
RUNNING -> SWAPPING_OUT -> SWAPPED              preempted, to go on where it was
SWAPPED -> LOADING -> RUNNING                   and so it does
SWAPPED -> RUNNING                              likewise, or the device still holds all that could be kept
WAITING, SWAPPING_OUT -> FINISHED               with the last token of a step that was under way
WAITING, SWAPPING_OUT, SWAPPED -> FINISHED      a beam that no other one continues
any but FINISHED -> ABORTED
"""

import enum
from collections.abc import Sequence
from dataclasses import replace

from kvtier.engine.counts import TokenCounts
from kvtier.engine.outputs import RequestMetrics, TokenLogprobs
from kvtier.engine.params import SamplingParams
from kvtier.errors import RequestError
from kvtier.gpu.table import BlockTable
from kvtier.hints import RequestHints
from kvtier.keys import Chain, salted

__all__ = ["MARK", "Request", "State"]

MARK = "#"
"""Between a request's id and the number of a further sequence, in the ids that the scheduler knows."""


class State(enum.Enum):
    """Where a request is on its way. Only RUNNING ones compute; LOADING and RUNNING ones hold device blocks.

    SWAPPING_OUT: preempted, its KV is on its way to other tiers; SWAPPED: it has arrived, as far as it could be kept.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    SWAPPING_OUT = "swapping out"
    SWAPPED = "swapped"
    FINISHED = "finished"
    ABORTED = "aborted"


_NEXT = {
    # FINISHED: it was preempted while the step that sampled its last token was under way.
    State.WAITING: {State.LOADING, State.RUNNING, State.FINISHED, State.ABORTED},
    State.LOADING: {State.RUNNING, State.ABORTED},
    State.RUNNING: {State.WAITING, State.SWAPPING_OUT, State.FINISHED, State.ABORTED},
    State.SWAPPING_OUT: {State.SWAPPED, State.FINISHED, State.ABORTED},
    # RUNNING at once: the device still has all that could be kept.
    State.SWAPPED: {State.LOADING, State.RUNNING, State.FINISHED, State.ABORTED},
    State.FINISHED: set(),
    State.ABORTED: set(),
}


class Request:
    """A prompt, its params and what became of them. Implements `kvtier.hooks.RequestView`.

    tokens     [0 .......... num_computed) [num_computed ...... num_tokens) [drafts ..........)
                KV is in the block table    to be computed; 1 of them:       guesses, computed with
                                            a decode; none: it pauses        them and then verified
    blocks     [0 .... published)           named in the device's prefix index

    While steps that compute it are under way, KV up to `reach` will be there once they have run, and `pending` tokens
    beyond `tokens` will be known. Only the scheduler looks that far ahead.

    Invariants:
        1. 0 <= published * block_size <= num_computed <= num_tokens.
        2. `chain` names every full block of `tokens`, computed or not; of sparse requests those of the prompt alone,
           because no other may be shared.
        3. `exact` is true if and only if all KV in the table, or that was swapped out, was computed from exact KV.
        4. The table is there exactly while LOADING or RUNNING.

    Args:
        request_id: unique among all requests that the engine ever sees.
        prompt: at least one token id.
        params: how to sample and when to stop.
        seed: of the request's random draws.
        block_size: tokens per block.
        limit: tokens of prompt and output together at which the output ends, for lack of context.
        hints: what is known of its blocks' future.
    """

    __slots__ = (
        "_block_size",
        "_chain",
        "_chained",
        "bereft",
        "birth",
        "counts",
        "drafts",
        "exact",
        "guessing",
        "hints",
        "id",
        "loading_from",
        "max_tokens",
        "metrics",
        "num_computed",
        "offered",
        "order",
        "overtaken",
        "params",
        "pending",
        "prompt_len",
        "published",
        "rank",
        "reach",
        "resumed",
        "scores",
        "seed",
        "settled",
        "state",
        "table",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        block_size: int,
        limit: int,
        hints: RequestHints | None = None,
    ) -> None:
        self.id = request_id
        self.params = params
        self.hints = hints
        self.seed = seed
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        wanted = limit if params.max_tokens is None else self.prompt_len + params.max_tokens
        self.max_tokens = min(wanted, limit)
        self._plan_afresh()
        self.state = State.WAITING
        self.table: BlockTable | None = None
        self.metrics = RequestMetrics()
        self.counts = TokenCounts(self.tokens) if params.penalized else None
        self.scores: list[TokenLogprobs] = []
        self._block_size = block_size
        self._chain = Chain(block_size, salted(params.cache_salt))
        self._chain.extend(self.tokens)
        self._chained = self.prompt_len
        self.settled = False  # a beam whose candidates are there, so that it needs no blocks before its next token
        self._forget_progress()

    def _plan_afresh(self) -> None:
        """What only the scheduler writes: places in its queues, and what steps under way will bring."""
        self.order = 0  # of arrival; a fork has its parent's
        self.birth = 0
        self.rank: tuple[float, int, int] = (0.0, 0, 0)  # the smallest first
        self.overtaken = 0  # by how many, since it did not fit
        self.offered = 0  # tokens, by the hook, at its latest look-up
        self.resumed = 0  # the step that gave it blocks
        self.bereft = -1  # the step that took them
        self.pending = 0
        self.guessing = False

    def sibling(self, request_id: str, params: SamplingParams, seed: int) -> "Request":
        """Another request with the same prompt."""
        return Request(
            request_id,
            self.tokens[: self.prompt_len],
            params,
            seed,
            block_size=self._block_size,
            limit=self.max_tokens,
            hints=self.hints,
        )

    def twin(self, request_id: str) -> "Request":
        """Another request that has come as far as this one, in the same way."""
        other = self.sibling(request_id, self.params, self.seed)
        other.append(self.tokens[self.prompt_len :], 0.0)
        other.metrics = replace(self.metrics)
        return other

    def _forget_progress(self) -> None:
        self.num_computed = self.reach = 0
        self.published = 0
        self.exact = True
        self.drafts: tuple[int, ...] = ()
        # While the step under way also loads KV that it computes from: tokens whose KV was there before.
        self.loading_from: int | None = None

    @property
    def chain(self) -> Sequence[bytes]:
        """Chain keys of the full blocks of `tokens`."""
        return self._chain.keys

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.tokens)

    @property
    def lossy(self) -> bool | None:
        """Whether it may be computed from KV that is not exact; None: as the tiers are set."""
        return self.params.accept_lossy

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def ahead(self) -> int:
        """Tokens to be computed beyond what steps under way will have done, the token that they sample included."""
        return len(self.tokens) + self.pending - self.reach

    @property
    def plannable(self) -> bool:
        """Whether the next step may compute it, while others are under way.

        Not where those decide more than one token, or which one, or none: drafts are verified, beams chosen among,
        loads may fail.
        """
        unknown = self.guessing or (self.pending > 0 and self.params.beam_width > 0) or self.loading_from is not None
        return self.ahead > 0 and not unknown and len(self.tokens) + self.pending < self.max_tokens

    @property
    def goal(self) -> int:
        """Up to where the next step computes it, if it may: its own tokens and the drafts that follow them."""
        return len(self.tokens) + (self.pending or len(self.drafts))

    def inputs(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of what a step computes: the request's own, then its drafts."""
        own = self.tokens[start:stop]
        return own + list(self.drafts[: stop - len(self.tokens)]) if stop > len(self.tokens) else own

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def reusable_blocks(self) -> int:
        """Leading blocks that a cache may provide: at least the last token is always computed, for its logits."""
        return 0 if self.to_be_scored else min(len(self.chain), (len(self.tokens) - 1) // self._block_size)

    @property
    def to_be_scored(self) -> bool:
        """Whether prompt tokens still want their log-probabilities, for which all before them is computed."""
        return self.params.prompt_logprobs is not None and len(self.scores) < self.prompt_len - 1

    @property
    def blocks(self) -> BlockTable:
        """The block table of a request that holds one.

        Raises:
            RequestError: it is neither LOADING nor RUNNING.
        """
        if self.table is None:
            raise RequestError(f"request {self.id!r} is {self.state.value} and holds no blocks")
        return self.table

    def launch(self, stop: int, *, samples: bool) -> None:
        """A step was planned that computes up to `stop`, and then samples or not."""
        # How many of its drafts are right is not known before it has run.
        self.guessing = stop > len(self.tokens) + self.pending
        self.reach = min(stop, len(self.tokens) + self.pending)
        self.pending += samples

    def land(self) -> None:
        """A step that sampled has ended; what it sampled is appended now, or by whoever chooses among it."""
        self.pending -= 1
        self.guessing = False

    def advance(self, stop: int) -> None:
        """KV of the tokens up to `stop` was computed. Draft tokens among them do not count: `append` verifies them.

        Where the request lost its blocks since the step was planned, nothing was.
        """
        if self.table is None:
            return
        self.metrics.computed_tokens += max(0, min(stop, self.prompt_len) - self.num_computed)
        self.num_computed = min(stop, len(self.tokens))
        if self.params.sparse is not None and stop > self.prompt_len:
            self.exact = False

    def append(self, tokens: Sequence[int], now: float) -> None:
        """Further output tokens, sampled at `now`; of all but the last one the KV was computed with the drafts."""
        if not tokens:
            return
        self.settled = False
        metrics = self.metrics
        metrics.first_token = now if metrics.first_token is None else metrics.first_token
        metrics.latest_token = now
        metrics.output_tokens += len(tokens)
        for token in tokens:
            self._append(token)
        if self.table is not None:
            self.num_computed += len(tokens) - 1
        self.reach = max(self.reach, self.num_computed)
        self.drafts = ()

    def cut(self, num_tokens: int) -> None:
        """Of an ended request: only the first `num_tokens` tokens are output, those behind the end are not."""
        self.metrics.output_tokens -= len(self.tokens) - num_tokens
        del self.tokens[num_tokens:]

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) % self._block_size == 0 and self.params.sparse is None:
            self._chain.extend(self.tokens[self._chained :])
            self._chained = len(self.tokens)

    def start_loading(self, table: BlockTable, device_tokens: int, *, exact: bool = True) -> None:
        """WAITING, SWAPPED -> LOADING: the first `device_tokens` tokens are a prefix hit, the next ones are coming."""
        self._move(State.LOADING)
        self._take(table, device_tokens, exact=exact)

    def start_running(self, table: BlockTable, device_tokens: int, *, exact: bool = True) -> None:
        """WAITING, SWAPPED -> RUNNING: the table's first `device_tokens` tokens are a prefix hit, and exact or not."""
        self._move(State.RUNNING)
        self._take(table, device_tokens, exact=exact)

    def start_overlapped(self, table: BlockTable, device_tokens: int, stop: int, *, exact: bool) -> None:
        """WAITING, SWAPPED -> RUNNING: tokens [device_tokens, stop) come with the step that computes the next ones."""
        self._move(State.RUNNING)
        self._take(table, stop, exact=exact)
        self.published = device_tokens // self._block_size
        self.loading_from = device_tokens

    def settle_load(self, good_tokens: int, *, exact: bool) -> None:
        """What a step was to load has ended; before anything else that it brought is accounted for."""
        self.loading_from = None
        self.exact = self.exact and exact
        if good_tokens < self.num_computed:
            self._go_back(good_tokens)

    def _go_back(self, good_tokens: int) -> None:
        self.num_computed = self.reach = good_tokens
        self.published = min(self.published, good_tokens // self._block_size)

    def _take(self, table: BlockTable, device_tokens: int, *, exact: bool) -> None:
        self.table = table
        self.exact = exact
        self.num_computed = self.reach = device_tokens
        self.published = device_tokens // self._block_size

    def finish_loading(self, good_tokens: int, *, exact: bool) -> None:
        """LOADING -> RUNNING: KV of the first `good_tokens` tokens is there, the rest is to be computed."""
        self._move(State.RUNNING)
        self.exact = self.exact and (exact or good_tokens == self.num_computed)
        self._go_back(good_tokens)

    def preempt(self) -> BlockTable:
        """RUNNING -> WAITING: gives up its blocks, to start over; returns them."""
        self._move(State.WAITING)
        self._forget_progress()
        return self._give_table()

    def swap_out(self) -> BlockTable:
        """RUNNING -> SWAPPING_OUT: gives up its blocks, to go on where it was; returns them."""
        self._move(State.SWAPPING_OUT)
        exact = self.exact
        self._forget_progress()
        self.exact = exact
        return self._give_table()

    def finish_swap(self) -> None:
        """SWAPPING_OUT -> SWAPPED: what could be kept of its KV has arrived where it is kept."""
        self._move(State.SWAPPED)

    def end(self, state: State) -> BlockTable | None:
        """Any -> FINISHED or ABORTED: gives up its blocks, if it holds any; returns them."""
        self._move(state)
        return None if self.table is None else self._give_table()

    def _give_table(self) -> BlockTable:
        table, self.table = self.blocks, None
        return table

    def _move(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise RequestError(
                f"request {self.id!r} cannot go from {self.state.value} to {state.value}; "
                f"only to {sorted(following.value for following in _NEXT[self.state])}"
            )
        self.state = state
