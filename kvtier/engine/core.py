"""Engine: requests in, outputs out, one step at a time, from one thread."""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from operator import index

from kvtier.engine.beam import BeamSearch, Hypothesis
from kvtier.engine.beam_group import BeamGroup
from kvtier.engine.drafting import Proposer
from kvtier.engine.guard import GuardedHook
from kvtier.engine.models.registry import LoadedModel
from kvtier.engine.options import EngineOptions
from kvtier.engine.outputs import EngineStats, RequestOutput, Sampled
from kvtier.engine.params import SamplingParams
from kvtier.engine.pipeline import Pipeline, Ran
from kvtier.engine.plan import StepPlan
from kvtier.engine.request import MARK, Request
from kvtier.engine.runner import Runner
from kvtier.engine.sampler import derived_seed
from kvtier.engine.scheduler import Scheduler
from kvtier.engine.sequences import LiveRequest, LiveSequence, siblings
from kvtier.engine.sparse import Sparse
from kvtier.engine.speculation import Speculation
from kvtier.engine.text import TextStream
from kvtier.engine.tokenizer import IncrementalDecoder
from kvtier.errors import ConfigError, FormatMismatch, RequestError
from kvtier.gpu.pool import PoolListener
from kvtier.gpu.storage import PoolSize, make_pool, size_pool, stored_layout, windowed_blocks
from kvtier.gpu.windows import most_blocks
from kvtier.hints import RequestHints
from kvtier.hooks import NO_BLOCK, FinishReason, SchedulerHook, TransferResults, WorkerHook
from kvtier.layout import Layout

__all__ = ["Engine", "kv_layout", "pool_size"]

# Between two looks at transfers: a look costs as much processor time, of which those transfers may be in need. So the
# next one is put off by a share of what was waited already, and never so long that anybody notices.
_IDLE_SECONDS, _MOST_IDLE_SECONDS = 0.0002, 0.002
_IDLE_SHARE = 1 / 16


class Engine:
    """Continuous batching over paged KV memory. Knows other tiers only as hooks.

    Args:
        model: weights and tokenizer.
        options: sizes and limits.
        hooks: scheduler half and worker half of a KV connector. What the first one raises counts as a miss, and in
            `EngineStats.hook_errors`; what the second one raises fails the step.
        proposer: guesses tokens ahead; the output is the same, sooner. What it raises costs guesses, and is counted in
            `EngineStats.draft_errors`.

    Raises:
        CapacityError: the device memory is too small for one block.
        ConfigError: `max_model_len` is more than the model or the device pool takes, steps are both pipelined and
            guessed ahead, or the model's KV cannot be kept in `kv_format`.
    """

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions | None = None,
        hooks: tuple[SchedulerHook, WorkerHook] | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self.options = options or EngineOptions()
        self._tokenizer = model.tokenizer
        self._vocab = model.config.vocab
        self._hook = GuardedHook(hooks[0]) if hooks else None
        size, self.max_model_len = pool_size(model, self.options)
        if proposer is not None and self.options.scheduling.pipelined:
            raise ConfigError("pipelined steps and guessed tokens exclude each other: guesses need the latest token")
        layout = model.model.layout(self.options.block_size)
        pool = make_pool(layout, size, model.model.device, self.options.kv_format)
        self._blocks = pool.blocks
        self._scheduler = Scheduler(
            pool.blocks,
            self.options.max_running,
            self.options.token_budget,
            self._hook,
            rules=self.options.scheduling,
        )
        graphs = self.options.cuda_graphs and pool.device.type == "cuda"
        worker = hooks[1] if hooks else None
        self._runner = Runner(model.model, pool, model.tokenizer.eos_ids, worker, graphs=graphs)
        self._speculation = None if proposer is None else Speculation(proposer, self.options.draft_tokens)
        self._pipeline = Pipeline(self._run) if self.options.scheduling.pipelined else None
        self._live: dict[str, LiveRequest] = {}  # by the ids that users know
        self._sequences: dict[str, LiveSequence] = {}  # by those that the scheduler knows
        self._numbers = count()
        self._idle_since: float | None = None

    def follow(self, listener: PoolListener) -> None:
        """Have it told which names device blocks get and lose from now on."""
        self._blocks.listener = listener

    # ---- requests

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._live)

    @property
    def busy(self) -> bool:
        """Whether transfers are under way: they need further steps, even when all requests are finished."""
        return self._scheduler.busy or (self._pipeline is not None and self._pipeline.busy)

    def has(self, request_id: str) -> bool:
        """Whether a request of this id is unfinished."""
        return request_id in self._live

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        hints: RequestHints | None = None,
    ) -> None:
        """Queue a request; `step` computes it.

        Args:
            request_id: unique among all requests that this engine ever sees.
            prompt: token ids.
            params: how to sample and when to stop; `max_tokens` ends at the context at the latest.
            hints: what is known of its KV's future; they order evictions, never the output.

        Raises:
            RequestError: the id is in use, the prompt is empty, too long or holds unknown tokens, or the model cannot
                do what the params ask for. Nothing was queued.
        """
        chosen = SamplingParams() if params is None else params
        if not isinstance(chosen, SamplingParams):
            raise RequestError(f"request {request_id!r} has params {chosen!r}: expected SamplingParams")
        if hints is not None and not isinstance(hints, RequestHints):
            raise RequestError(f"request {request_id!r} has hints {hints!r}: expected RequestHints")
        # The scheduler would take it once the request's first sequence has ended, whatever the others do.
        if request_id in self._live:
            raise RequestError(f"request id {request_id!r} is in use; ids are unique")
        if MARK in request_id:
            raise RequestError(
                f"request id {request_id!r}: {MARK!r} is what further sequences are marked by; leave it out"
            )
        tokens = self._checked(request_id, prompt)
        if chosen.sparse is not None:
            self._check_sparse(chosen.sparse)
        if chosen.min_tokens and len(chosen.ends(self._tokenizer.eos_ids)) >= self._vocab:
            raise RequestError(f"request {request_id!r} has min_tokens, but every token ends its output: drop one")
        self._check_token_ids(request_id, chosen.logit_bias, "logit_bias")
        self._check_token_ids(request_id, chosen.stop_token_ids, "stop_token_ids")
        seed = derived_seed(self.options.seed, next(self._numbers)) if chosen.seed is None else chosen.seed
        size, limit = self.options.block_size, self.max_model_len
        request = Request(request_id, tokens, chosen, seed, block_size=size, limit=limit, hints=hints)
        self._scheduler.add(request)
        self._idle_since = None
        live = self._live[request_id] = LiveRequest(request_id, self._beams(request))
        self._begin(live, self._sequence(request, live))
        live.unforked = [self._sequence(other, live, at) for at, other in enumerate(siblings(request), 1)]

    def _checked(self, request_id: str, prompt: Sequence[int]) -> list[int]:
        if not isinstance(prompt, Sequence):
            raise RequestError(f"request {request_id!r} has prompt {prompt!r}: expected a list of token ids")
        if not len(prompt):
            raise RequestError(f"request {request_id!r} has an empty prompt; send at least one token")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"request {request_id!r} has a prompt of {len(prompt)} tokens; with a context of "
                f"{self.max_model_len} it may have {self.max_model_len - 1}: shorten it or raise max_model_len"
            )
        try:
            tokens = [index(token) for token in prompt]
        except TypeError as error:
            raise RequestError(f"request {request_id!r}: expected a prompt of integers: {error}") from error
        self._check_token_ids(request_id, (min(tokens), max(tokens)), "a prompt")
        return tokens

    def _check_sparse(self, sparse: Sparse) -> None:
        try:
            self._runner.allow_sparse()
        except FormatMismatch as error:
            raise RequestError(f"sparse={sparse.kind!r}: not with this model: {error}") from error

    def _check_token_ids(self, request_id: str, tokens: Iterable[int], place: str) -> None:
        for token in tokens:
            if not 0 <= token < self._vocab:
                raise RequestError(
                    f"request {request_id!r} has {place} with token id {token}: expected 0..{self._vocab - 1}"
                )

    def _sequence(self, request: Request, owner: LiveRequest, index: int = 0) -> LiveSequence:
        params = request.params
        stream = TextStream(IncrementalDecoder(self._tokenizer), params.stop, params.min_tokens)
        return LiveSequence(request, stream, owner, index)

    def _beams(self, request: Request) -> BeamGroup | None:
        params = request.params
        if not params.beam_width:
            return None
        most, ends = request.max_tokens - request.prompt_len, params.ends(self._tokenizer.eos_ids)
        return BeamGroup(BeamSearch(params.beam_width, params.length_penalty, most, ends), request)

    def _begin(self, live: LiveRequest, sequence: LiveSequence) -> None:
        live.live[sequence.request.id] = self._sequences[sequence.request.id] = sequence

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request in whatever state; returns what its unfinished sequences had, nothing for unknown ids."""
        return self._cut_short(request_id, "abort")

    def _cut_short(self, request_id: str, reason: FinishReason, error: Exception | None = None) -> list[RequestOutput]:
        live = self._live.get(request_id)
        if live is None:
            return []
        ended, live.unforked = [*live.live.values(), *live.unforked], []
        for sequence in ended:
            self._drop(sequence, reason)
        outputs = [replace(sequence.last_output(reason), error=error) for sequence in ended]
        if live.beams is None:
            return outputs
        # As many as were asked for, whatever the number of beams: whoever counts them waits for no more.
        wanted = range(ended[0].request.params.n)
        return [replace(outputs[at % len(outputs)], index=at) for at in wanted]

    def _end(self, sequence: LiveSequence, reason: FinishReason) -> RequestOutput:
        """A sequence is through; so is its request, if it was the last one."""
        self._drop(sequence, reason)
        return sequence.last_output(reason)

    def _drop(self, sequence: LiveSequence, reason: FinishReason) -> None:
        self._scheduler.end(sequence.request.id, reason)
        self._forget(sequence)

    def _forget(self, sequence: LiveSequence) -> None:
        owner = sequence.owner
        self._runner.forget(sequence.request.id)
        if self._speculation is not None:
            self._speculation.forget(sequence.request.id)
        self._sequences.pop(sequence.request.id, None)
        owner.live.pop(sequence.request.id, None)
        if not (owner.live or owner.unforked):
            self._live.pop(owner.id, None)

    def clear_device_cache(self) -> int:
        """Forget all KV in device memory that no request uses; returns how many blocks that were."""
        return self._blocks.forget()

    # ---- steps

    def step(self) -> list[RequestOutput]:
        """Run one step; returns an output for each request that got a token.

        Without anything to compute it waits a moment for transfers. A request whose token cannot be chosen (its logits
        are no numbers, say) ends with the reason `error`, and its outputs say which. If the step raises, or no token of
        any of its requests can be chosen, the requests that it was to compute are gone, their blocks are free, and all
        others go on with the next step. If planning it raised, all are gone.

        Under `SchedulingRules.pipelined` the outputs are those of the step before, and the next one runs meanwhile.
        """
        proposing = self._propose()
        plan = self._plan()
        if self._pipeline is not None:
            return self._exchange(self._pipeline, plan)
        try:
            ran = self._run(plan)
        except BaseException:
            self._fail(plan)
            raise
        return self._land(ran, proposing)

    def _plan(self) -> StepPlan:
        """The next step. Half made, because planning raised, it is lost, and all requests with it: any may be torn."""
        try:
            return self._scheduler.schedule()
        except BaseException:
            self._abort_all(self._live)
            raise

    def _abort_all(self, request_ids: Iterable[str]) -> None:
        """End these requests, each of them whatever happens to the others."""
        with ExitStack() as stack:
            for request_id in request_ids:
                stack.callback(self.abort, request_id)

    def _exchange(self, pipeline: Pipeline, plan: StepPlan) -> list[RequestOutput]:
        """Account for the step under way, and start the next one."""
        earlier = pipeline.plan
        try:
            ran = pipeline.wait()
        except BaseException:
            if earlier is not None:
                self._fail(earlier)
            self._scheduler.cancel(plan)
            raise
        try:
            outputs = [] if ran is None else self._land(ran, 0.0)
        except BaseException:
            self._scheduler.cancel(plan)
            raise
        if any(output.error is not None for output in outputs):
            self._scheduler.cancel(plan)  # it may compute what would follow the token that was not chosen
        else:
            pipeline.start(plan)
        return outputs

    def _run(self, plan: StepPlan) -> Ran:
        self._runner.begin(plan)
        began = time.perf_counter()
        sampled = self._runner.compute(plan)
        seconds = time.perf_counter() - began
        return Ran(plan, sampled, self._runner.end(plan.transfers, _spoiled(plan, sampled)), seconds)

    def _land(self, ran: Ran, proposing: float) -> list[RequestOutput]:
        """What a step brought goes to its requests, or they end; `proposing`: seconds that its guesses took."""
        try:
            return self._account(ran, proposing)
        except BaseException:
            self._end_failed(ran.plan, ran.results)
            raise

    def _account(self, ran: Ran, proposing: float) -> list[RequestOutput]:
        plan, sampled = ran.plan, ran.sampled
        self._observe(plan, ran.seconds)
        self._learn(plan, sampled, proposing + ran.seconds)
        void = self._scheduler.update(plan, sampled, ran.results)
        for request_id in void:
            self._runner.forget(request_id)  # what it learnt of attention it learnt from nothing
        results = [
            (plan.requests[at], result)
            for at, result in zip(plan.samples, sampled, strict=True)
            if plan.requests[at].id not in void
        ]
        landed = [(request, result) for request, result in results if result.error is None]
        outputs = [
            output
            for request, result in results
            if result.error is not None and (sequence := self._sequences.get(request.id)) is not None
            for output in self._cut_short(sequence.owner.id, "error", result.error)
        ]
        for request in plan.requests:
            if request.id not in self._sequences:
                self._runner.forget(request.id)  # it ended while the step was under way
        if not (ran.results.finished or ran.results.failed):
            self._pause(plan)
        for request, _ in landed:
            sequence = self._sequences.get(request.id)
            if sequence is not None:
                self._fork(sequence.owner)
        return outputs + [output for request, result in landed for output in self._advance(request, result)]

    def _pause(self, plan: StepPlan) -> None:
        """After a step that had nothing to compute; what has just begun is soon looked at again."""
        now = time.perf_counter()
        if plan.requests or plan.transfers.loads or self._idle_since is None:
            self._idle_since = now
        if not plan.requests:
            time.sleep(min(max(_IDLE_SECONDS, _IDLE_SHARE * (now - self._idle_since)), _MOST_IDLE_SECONDS))

    def _fork(self, live: LiveRequest) -> None:
        """The prompt's KV is there: the sequences that wait for it share it from now on."""
        if live.unforked:
            (first,) = live.live.values()
            for sequence in live.unforked:
                self._scheduler.fork(first.request, sequence.request)
                self._runner.fork(first.request.id, sequence.request.id)
                self._begin(live, sequence)
            live.unforked = []

    def _fail(self, plan: StepPlan) -> None:
        transfers = plan.transfers
        jobs = (*transfers.loads, *transfers.saves, *transfers.evacuations)
        results = TransferResults(failed=dict.fromkeys(jobs, 0))
        try:
            results = self._runner.cancel(transfers)
        finally:
            self._end_failed(plan, results)

    def _end_failed(self, plan: StepPlan, results: TransferResults) -> None:
        """The requests of a step that failed are gone, with all their sequences."""
        sequences = [self._sequences[request.id] for request in plan.requests if request.id in self._sequences]
        failed = dict.fromkeys(sequence.owner.id for sequence in sequences)
        try:
            self._scheduler.fail(plan, results)
        finally:
            self._abort_all(failed)

    def _propose(self) -> float:
        """Seconds that the guesses for this step took."""
        if self._speculation is None:
            return 0.0
        began = time.perf_counter()
        self._speculation.propose(sequence.request for sequence in self._sequences.values())
        return time.perf_counter() - began

    def _learn(self, plan: StepPlan, sampled: Sequence[Sampled], seconds: float) -> None:
        if self._speculation is None:
            return
        spans = plan.step.spans
        outcomes = [
            (plan.requests[at], spans[at].stop - plan.requests[at].num_tokens, len(result.tokens))
            for at, result in zip(plan.samples, sampled, strict=True)
            if result.error is None
        ]
        decodes = all(span.start == span.request.num_tokens - 1 for span in spans)
        self._speculation.learn(outcomes, seconds, decodes_only=decodes)

    def _observe(self, plan: StepPlan, seconds: float) -> None:
        # Without a sampled token nobody waited for the device, and a decode's time says little about prefill.
        prefill = plan.samples and all(span.stop - span.start > 1 for span in plan.step.spans)
        if self._hook is not None and prefill and not plan.arriving:
            attended = sum((span.stop**2 - span.start**2) // 2 for span in plan.step.spans)
            self._hook.observe_prefill(plan.num_tokens, seconds, attended)

    def _advance(self, request: Request, sampled: Sampled) -> list[RequestOutput]:
        sequence = self._sequences.get(request.id)
        if sequence is None:
            return []  # a beam that another one's candidates have ended, or a request that ended meanwhile
        if sequence.owner.beams is not None:
            return self._search(sequence, sequence.owner.beams, sampled)
        sequence.logprobs += sampled.logprobs
        first = request.num_tokens - len(sampled.tokens)
        for length, token in enumerate(sampled.tokens, first + 1):
            reason = self._finish_reason(request, sequence.stream, token, length)
            if reason is not None:
                request.cut(length)
                return [self._end(sequence, reason)]
        return [sequence.output(None)]

    def _search(self, sequence: LiveSequence, group: BeamGroup, sampled: Sampled) -> list[RequestOutput]:
        """A beam brought its candidates; returns the outputs if that ends the search."""
        if not group.bring(sequence.request, sampled.candidates):
            return []
        for child, parent in group.advance(self._scheduler, time.perf_counter()):
            self._runner.fork(parent.id, child.id)
        owner, beams = sequence.owner, {beam.id for beam in group.beams}
        for beam in group.beams:
            if beam.id not in owner.live:
                self._begin(owner, self._sequence(beam, owner))
        for gone in [other for request_id, other in owner.live.items() if request_id not in beams]:
            self._forget(gone)
        if not group.search.done:
            return []
        best = group.search.hypotheses()[: sequence.request.params.n]
        return [self._found(sequence, hypothesis, index) for index, hypothesis in enumerate(best)]

    def _found(self, sequence: LiveSequence, hypothesis: Hypothesis, index: int) -> RequestOutput:
        stream = TextStream(IncrementalDecoder(self._tokenizer))
        for token in hypothesis.tokens:
            stream.push(token)
        stream.close()
        request = sequence.request
        return RequestOutput(
            id=sequence.owner.id,
            prompt_tokens=request.prompt_len,
            token_ids=hypothesis.tokens,
            text=stream.text,
            delta=stream.take(),
            finish_reason="stop" if hypothesis.ended else "length",
            metrics=replace(request.metrics, output_tokens=len(hypothesis.tokens)),
            index=index,
            cumulative_logprob=hypothesis.logprob,
        )

    def _finish_reason(self, request: Request, stream: TextStream, token: int, length: int) -> FinishReason | None:
        params = request.params
        if token in params.stop_token_ids or (token in self._tokenizer.eos_ids and not params.ignore_eos):
            return "stop"
        if stream.push(token):
            return "stop"
        return "length" if length >= request.max_tokens else None

    # ---- statistics

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        held, speculation = max(counters.slots_held, 1), self._speculation
        return EngineStats(
            steps=counters.steps,
            waiting=scheduler.num_waiting,
            swapped=scheduler.num_swapped,
            loading=scheduler.num_loading,
            running=scheduler.num_running,
            preemptions=counters.preemptions,
            swaps=counters.swaps,
            device_hit_tokens=counters.device_hits,
            loaded_tokens=counters.loaded,
            computed_tokens=counters.computed,
            draft_tokens=0 if speculation is None else speculation.proposed,
            accepted_tokens=0 if speculation is None else speculation.accepted,
            draft_errors=0 if speculation is None else speculation.errors,
            num_blocks=self._blocks.num_blocks,
            free_blocks=self._blocks.num_blocks - self._blocks.used_blocks,
            hook_errors=0 if self._hook is None else self._hook.errors,
            kv_waste=(counters.slots_held - counters.slots_reached) / held,
            kv_waste_total=(counters.slots_held - counters.slots_used) / held,
        )


def kv_layout(model: LoadedModel, options: EngineOptions) -> Layout:
    """The layout of an engine's blocks as its hooks move them: what a connector is to be told.

    Raises:
        ConfigError: the model's KV cannot be kept in `kv_format`.
    """
    layout = model.model.layout(options.block_size)
    try:
        return stored_layout(layout, options.kv_format)
    except FormatMismatch as error:
        raise ConfigError(f"kv_format={options.kv_format!r} is not for this model: {error}; use raw") from error


def pool_size(model: LoadedModel, options: EngineOptions) -> tuple[PoolSize, int]:
    """What an engine would be made with, before any memory is taken: blocks of the pool, tokens of the context.

    Raises:
        CapacityError: the device memory is too small for one block.
        ConfigError: `max_model_len` is more than the model or the device pool takes, or its KV cannot be kept in
            `kv_format`.
    """
    layout = kv_layout(model, options)
    if options.num_blocks is None:
        size = size_pool(layout, options.memory_bytes or 0, options.max_running, options.token_budget)
    elif len(layout.groups) == 1:
        size = PoolSize(options.num_blocks)
    else:
        wanted = windowed_blocks(layout, options.max_running, options.token_budget)
        size = PoolSize(options.num_blocks, min(options.num_blocks, wanted))
    blocks = size.blocks
    held = most_blocks(model.config.max_positions, 1, options.block_size, layout.groups[0].window)
    most = model.config.max_positions if held <= blocks else blocks * options.block_size
    if options.max_model_len is not None and options.max_model_len > most:
        raise ConfigError(
            f"max_model_len={options.max_model_len}: the model takes {model.config.max_positions} tokens and the "
            f"device pool {blocks * options.block_size}; choose at most {most}, or give the pool more memory"
        )
    return size, options.max_model_len or most


def _spoiled(plan: StepPlan, sampled: Sequence[Sampled]) -> frozenset[int]:
    """Device blocks of the requests whose token could not be chosen: what is in them may be no numbers.

    Raises:
        Exception: the first one's, if it is so of all requests of the step, and none of them may still turn out to have
            computed from a load that failed.
    """
    failed = [(at, result.error) for at, result in zip(plan.samples, sampled, strict=True) if result.error is not None]
    if failed and len(failed) == len(plan.requests) and not plan.arriving:
        raise failed[0][1]
    spans = [plan.step.spans[at] for at, _ in failed]
    return frozenset(block for span in spans for block in (*span.block_ids, *span.windowed_ids)) - {NO_BLOCK}
