"""Scheduler: decides what each step computes, who gets blocks and who gives them up. Pure bookkeeping, no tensors.

One step, seen from here:

    schedule()   absorb transfers -> decodes -> prefills and admissions, in order -> prefetch ahead -> hook.plan
                 (where blocks are missing, those behind in the order give way)
    update()     what the step computed is accounted for, full blocks are published
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import merge
from itertools import count

from kvtier.engine.admission import Admission
from kvtier.engine.books import Books, Counters, Loading, WaitingQueue, by_rank
from kvtier.engine.latency import LoadModel, StepModel, StepWork
from kvtier.engine.orders import make_order
from kvtier.engine.outputs import Sampled
from kvtier.engine.plan import Draft, StepPlan
from kvtier.engine.request import Request, State
from kvtier.engine.room import Room
from kvtier.engine.rules import SchedulingRules
from kvtier.engine.victims import make_victims
from kvtier.errors import RequestError
from kvtier.gpu.pool import BlockPool
from kvtier.hooks import Completed, FinishReason, SchedulerHook, TransferPlan, TransferResults

__all__ = ["Counters", "Scheduler"]

# So many of those that wait are looked at in a step, at most.
_LOOK_AHEAD = 64


class Scheduler:
    """Decodes first, then prefill chunks in the order of the rules, under a token budget and a predicted time.

    Invariants:
        1. A step computes at most `token_budget` tokens, for at most `max_running` requests, further beams not counted.
        2. A block that a step or a load may write has one holder and no name.
        3. The first request in the order always makes progress: only those behind it are preempted for it, and only a
           bounded number of others is admitted while it waits for room.
        4. No request waits for ever: its place in the order only improves against those that come after it.
        5. Steps are run in the order in which they were planned. So what one of them frees may be given to the next,
           also while it is still under way.

    Args:
        pool: the device's blocks.
        max_running: requests that hold device blocks at a time.
        token_budget: tokens that a step computes at most.
        hook: where KV beyond device memory comes from and goes to, if anywhere.
        clock: seconds, for the requests' metrics and for all that depends on time.
        rules: who comes first, and who gives way.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_running: int,
        token_budget: int,
        hook: SchedulerHook | None = None,
        clock: Callable[[], float] = time.perf_counter,
        rules: SchedulingRules | None = None,
    ) -> None:
        rules = rules or SchedulingRules()
        steps, loads = StepModel(), LoadModel()
        order = make_order(
            rules.order,
            ageing=rules.ageing,
            token_budget=token_budget,
            cached_tokens=self._cached_tokens,
            steps=steps,
            loads=loads,
        )
        self._books = Books(pool, rules, max_running, hook, clock, order, steps, loads, WaitingQueue(order))
        self._room = Room(self._books, make_victims(rules.victims, pool, steps, loads, clock))
        self._admission = Admission(self._books, self._room, token_budget)
        self._pool = pool
        self._token_budget = token_budget
        self._arrivals = count()
        self._steps = count()
        self._requests: dict[str, Request] = {}
        self._results = TransferResults()
        self._under_way: dict[int, tuple[StepWork, float]] = {}  # step -> what it computes, since when
        self._latest_end = 0.0

    # ---- requests

    @property
    def counters(self) -> Counters:
        """What happened so far."""
        return self._books.counters

    @property
    def num_waiting(self) -> int:
        """Requests without device blocks, swapped ones included."""
        return len(self._books.waiting)

    @property
    def num_swapped(self) -> int:
        """Requests that were swapped out, or are about to be."""
        return sum(request.state in (State.SWAPPING_OUT, State.SWAPPED) for request in self._books.waiting)

    @property
    def num_loading(self) -> int:
        """Requests whose KV is on its way into device memory."""
        return len(self._books.loading)

    @property
    def num_running(self) -> int:
        """Requests that compute."""
        return len(self._books.running)

    @property
    def busy(self) -> bool:
        """Whether transfers are under way, of live requests or of ended ones."""
        hook = self._books.hook
        return bool(self._books.held) or (hook is not None and hook.busy)

    def get(self, request_id: str) -> Request | None:
        """The live request of that id."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: a live request has its id, or it can never fit into the device pool.
        """
        self._register(request)
        request.order, request.metrics.arrival = request.birth, self._books.clock()
        self._books.waiting.add(request)

    def _register(self, request: Request) -> None:
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in use; ids are unique")
        wanted = self._pool.most_blocks(request.max_tokens, 1)
        if wanted > self._pool.num_blocks:
            raise RequestError(
                f"request {request.id!r} may grow to {request.max_tokens} tokens, which takes {wanted} blocks, the "
                f"device pool has {self._pool.num_blocks}: shorten it, or give the engine more blocks"
            )
        request.birth = next(self._arrivals)
        self._requests[request.id] = request

    def end(self, request_id: str, reason: FinishReason) -> Request | None:
        """A request is through, in whatever state: its blocks are freed, or left to the hook. None for unknown ids."""
        request, books = self._requests.pop(request_id, None), self._books
        if request is None:
            return None
        if request.state is State.RUNNING:
            books.running.remove(request)
        elif books.loading.pop(request_id, None) is None:
            books.waiting.remove(request)
            self._admission.forget(request)
        finished = reason in ("stop", "length")
        books.give_back(request_id, request.end(State.FINISHED if finished else State.ABORTED), reason)
        return request

    def fork(self, parent: Request, child: Request) -> None:
        """Add a request that shares the KV of a live one, copy-on-write, as far as their tokens are the same.

        The child runs from now on; where the parent holds no blocks, or none any more that the child attends to, or the
        places are taken, it waits like any other request, and finds the full blocks that both share. Beams take no
        place: they would wait for each other.

        Args:
            parent: live, in any state.
            child: new; its tokens start with those of `parent` whose KV it is to share.

        Raises:
            RequestError: a live request has the child's id.
        """
        self._register(child)
        child.order, child.metrics.arrival = parent.order, parent.metrics.arrival
        shared = min(parent.num_computed, child.num_tokens - 1)
        ready = parent.state is State.RUNNING and parent.loading_from is None and parent.blocks.serves(shared + 1)
        if not ready or (self._books.num_active >= self._books.max_running and not child.params.beam_width):
            self._books.waiting.add(child)
            return
        child.rank = (*parent.rank[:2], child.birth)
        table = parent.blocks.fork()
        table.truncate(shared)
        child.start_running(table, shared, exact=parent.exact)
        self._books.run(child)
        if self._books.hook is not None:
            self._books.hook.allocated(child, table.ids, 0, table.windowed_ids)

    # ---- one step

    def schedule(self) -> StepPlan:
        """Plan the next step; it may have nothing to compute. To be followed by `update` or `fail`, in this order.

        Under `SchedulingRules.pipelined` the next step may be planned before that: a token that is not known yet is
        planned for all the same, and what a request that has ended meanwhile computes is dropped.
        """
        books, draft = self._books, Draft(self._token_budget)
        books.step = next(self._steps)
        self._absorb_transfers()
        self._plan_decodes(draft)
        self._limit_prefill(draft)
        self._plan_prefills(draft)
        self._prefetch_ahead()
        step = draft.step(books.step, self._pool.block_size)
        plan = draft.seal(step, TransferPlan() if books.hook is None else books.hook.plan(step))
        self._under_way[books.step] = draft.work, books.clock()
        samples = frozenset(plan.samples)
        for at, (request, span) in enumerate(zip(plan.requests, step.spans, strict=True)):
            request.launch(span.stop, samples=at in samples)
        return plan

    def _absorb_transfers(self) -> Completed:
        hook = self._books.hook
        if hook is None:
            return Completed()
        results, self._results = self._results, TransferResults()
        return self._absorb(hook.completed(results))

    def _absorb(self, completed: Completed) -> Completed:
        for request_id, (tokens, exact) in completed.loaded.items():
            loading = self._books.loading.pop(request_id, None)
            if loading is not None:
                self._end_load(loading, tokens, exact=exact)
        for request_id in completed.swapped:
            request = self._requests.get(request_id)
            if request is not None:
                request.finish_swap()
        for request_id in completed.released:
            self._books.let_go(request_id)
        return completed

    def _end_load(self, loading: Loading, tokens: int, *, exact: bool) -> None:
        request = loading.request
        before, seconds = request.num_computed, self._books.clock() - loading.since
        good = self._good(request, tokens, loading.stop)
        request.finish_loading(good, exact=exact)
        # What was allocated for blocks that did not arrive goes back: others may need it before this one does.
        request.blocks.truncate(good)
        self._count_loaded(request, max(0, good - before), seconds)
        self._books.publish(request)
        self._books.run(request)

    def _good(self, request: Request, tokens: int, stop: int) -> int:
        """From which token a request goes on that was to be loaded up to `stop`, of which `tokens` are good."""
        if tokens >= stop:
            return stop
        if not request.blocks.whole:
            # What is before the window of the failed load is not there, and so there is nothing to go on from.
            return 0
        before = request.num_computed if request.loading_from is None else request.loading_from
        return max(before, tokens // self._pool.block_size * self._pool.block_size)

    def _count_loaded(self, request: Request, tokens: int, seconds: float) -> None:
        request.metrics.loaded_tokens += tokens
        request.metrics.load_seconds += seconds
        self._books.counters.loaded += tokens
        self._books.loads.observe(tokens, seconds)

    def _plan_decodes(self, draft: Draft) -> None:
        decodes = [request for request in self._books.running if request.plannable and request.ahead == 1]
        if any(request.drafts for request in decodes):
            self._limit_drafts(decodes, draft.budget)
        for request in decodes:
            # It may have been preempted for one planned before it.
            if request.state is State.RUNNING and draft.budget:
                self._plan_request(request, draft)

    def _limit_drafts(self, decodes: Sequence[Request], budget: int) -> None:
        """Guesses get what the decodes' own tokens leave over, of the budget and of the blocks: nobody loses by one."""
        size, tokens = self._pool.block_size, budget - len(decodes)
        own = sum(request.blocks.missing(request.reach + 1, request.reach) for request in decodes)
        blocks = max(0, self._pool.free_blocks - own)
        for request in decodes:
            first = request.reach + 1
            room = max(request.blocks.capacity_tokens, -(-first // size) * size) - first
            request.drafts = request.drafts[: max(0, min(tokens, room + blocks * size))]
            tokens -= len(request.drafts)
            blocks -= max(0, -(-(len(request.drafts) - room) // size))

    def _limit_prefill(self, draft: Draft) -> None:
        """Leave so much of the budget that the step takes no longer than its decodes may wait for their next token."""
        target = draft.tightest_target
        if target is None:
            return
        work = draft.work
        limit = self._books.steps.prefill_limit(work.decodes, work.context, target)
        if limit is not None:
            # A block at least: a target that cannot be met must not stop all prefill.
            draft.budget = min(draft.budget, max(limit, self._pool.block_size))

    def _plan_prefills(self, draft: Draft) -> None:
        """Chunks of running requests and admissions of waiting ones, whoever comes first."""
        books, admission = self._books, self._admission
        admission.begin()
        prefills = [request for request in books.running if request.plannable and request.ahead > 1]
        for request in merge(prefills, list(books.waiting.head(_LOOK_AHEAD)), key=by_rank):
            if request.state is State.RUNNING:
                if draft.budget:
                    self._plan_request(request, draft)
            elif not admission.is_closed(draft):
                admission.consider(request, draft)

    def _plan_request(self, request: Request, draft: Draft) -> None:
        table, start = request.blocks, request.reach
        reachable = table.capacity_tokens + self._pool.free_blocks * self._pool.block_size
        stop = min(request.goal, start + draft.budget, max(reachable, start + 1))
        if self._room.make(request, stop, draft):
            draft.compute(request, stop, table.extend(stop, start))

    def _prefetch_ahead(self) -> None:
        books = self._books
        if books.hook is not None:
            for request in list(books.waiting)[: books.rules.prefetch_ahead]:
                if request.state is State.WAITING:
                    books.hook.prefetch(request)

    def _cached_tokens(self, request: Request) -> int:
        keys = request.chain[: request.reusable_blocks]
        return self._pool.leading(keys, exact=not request.lossy) * self._pool.block_size

    # ---- after the step

    def update(self, plan: StepPlan, sampled: Sequence[Sampled], results: TransferResults) -> frozenset[str]:
        """The step was run; returns the requests for which it was to no avail, because a load failed within it.

        Others for which nothing could be sampled end: what was computed of them is not published.

        Args:
            plan: of the earliest `schedule` that was not followed by this.
            sampled: one for each of `plan.samples`.
            results: what the worker hook reported at its end.
        """
        self._results = results
        began = self._under_way[plan.step.index][1]
        now = self._measure(plan)
        void = self._settle_loads(plan, now - began)
        for at, result in zip(plan.samples, sampled, strict=True):
            if result.error is not None and plan.requests[at].id not in void:
                self.end(plan.requests[at].id, "error")
        for request, span in zip(plan.requests, plan.step.spans, strict=True):
            self.counters.computed += span.stop - span.start
            if request.id not in void:
                request.advance(span.stop)
        for at, result in zip(plan.samples, sampled, strict=True):
            plan.requests[at].land()
            if plan.requests[at].id in self._requests and plan.requests[at].id not in void:
                plan.requests[at].append(result.tokens, now)
        for request in plan.requests:
            if request.state is State.RUNNING:
                if not request.guessing:
                    # Blocks that held nothing but drafts that were wrong.
                    request.blocks.truncate(request.reach)
                self._books.publish(request)
                request.blocks.leave_behind(request.num_computed)
        self._count_slots()
        return void

    def _settle_loads(self, plan: StepPlan, seconds: float) -> frozenset[str]:
        """What the step was to load while it computed from it: who computed from nothing, and goes back."""
        if not plan.arriving:
            return frozenset()
        loaded, void = self._absorb_transfers().loaded, set()
        for request_id, stop in plan.arriving.items():
            request, (tokens, exact) = self._requests.get(request_id), loaded.get(request_id, (0, True))
            if tokens < stop:
                void.add(request_id)
            if request is None or request.loading_from is None:
                void.add(request_id)  # it has ended or lost its blocks meanwhile
                continue
            before, good = request.loading_from, self._good(request, tokens, stop)
            request.settle_load(good, exact=exact or good == before)
            if good < stop:
                request.blocks.truncate(good)
            self._count_loaded(request, max(0, good - before), seconds)
        return frozenset(void)

    def fail(self, plan: StepPlan, results: TransferResults) -> None:
        """The step could not be run: its requests end, all others go on with the next step."""
        self._results = results
        self._under_way.pop(plan.step.index, None)
        for request in plan.requests:
            self.end(request.id, "error")

    def cancel(self, plan: StepPlan) -> None:
        """A planned step will not be run, since the one before it failed: its requests start over."""
        self._under_way.pop(plan.step.index, None)
        for at in plan.samples:
            plan.requests[at].land()
        for request in plan.requests:
            if request.state is State.RUNNING:
                self._books.running.remove(request)
                self._books.give_back(request.id, request.preempt(), "preempt")
                self._books.waiting.add(request)
        jobs = (*plan.transfers.loads, *plan.transfers.saves, *plan.transfers.evacuations)
        self._results = replace(self._results, failed=self._results.failed | dict.fromkeys(jobs, 0))

    def _measure(self, plan: StepPlan) -> float:
        """How long the step took goes to the model; returns the time."""
        now = self._books.clock()
        work, began = self._under_way.pop(plan.step.index)
        self._books.steps.observe(work, now - max(began, self._latest_end))
        self._latest_end = now
        self.counters.steps += bool(plan.requests)
        return now

    def _count_slots(self) -> None:
        size, counters = self._pool.block_size, self.counters
        tokens = [(request, request.num_computed) for request in self._books.running]
        tokens += [(loading.request, loading.stop) for loading in self._books.loading.values()]
        for request, used in tokens:
            gone = request.blocks.gone * size
            counters.slots_held += request.blocks.capacity_tokens - gone
            counters.slots_reached += -(-used // size) * size - gone
            counters.slots_used += used - gone
