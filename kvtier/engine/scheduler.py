"""Scheduler: decides what each step computes, who gets blocks and who gives them up. Pure bookkeeping, no tensors.

One step, seen from here:

    schedule()   absorb transfers -> plan running -> (make room) -> admit waiting -> hook.plan
    update()     what the step computed is accounted for, full blocks are published
"""

import enum
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from kvtier.engine.outputs import Sampled
from kvtier.engine.plan import Draft, StepPlan
from kvtier.engine.request import Request, State
from kvtier.errors import RequestError
from kvtier.gpu.pool import BlockPool
from kvtier.gpu.table import BlockTable
from kvtier.hooks import FinishReason, Pending, SchedulerHook, TransferPlan, TransferResults

__all__ = ["Counters", "Scheduler"]

_by_arrival = attrgetter("order")

# Requests whose look-up is under way do not hold up those behind them, but only this many are asked about in a step.
_MAX_SKIPS = 16


@dataclass(slots=True)
class Counters:
    """What happened so far, in tokens unless it says otherwise. Slots: room for a token, held for one step.

    Args:
        steps: steps with something to compute.
        preemptions: times that a running request lost its blocks.
        device_hits: found in device memory.
        loaded: loaded through the hook.
        computed: computed.
        slots_held: slots in the tables of loading and running requests.
        slots_reached: those in blocks that hold a token.
        slots_used: those that hold a token.
    """

    steps: int = 0
    preemptions: int = 0
    device_hits: int = 0
    loaded: int = 0
    computed: int = 0
    slots_held: int = 0
    slots_reached: int = 0
    slots_used: int = 0


class _Loading(NamedTuple):
    """A request whose tokens up to `stop` are on their way, and since when."""

    request: Request
    stop: int
    since: float


class _Admission(enum.Enum):
    ADMITTED = enum.auto()
    SKIPPED = enum.auto()
    BLOCKED = enum.auto()


class Scheduler:
    """First come, first served: decodes first, then prefill chunks, under a token budget.

    Invariants:
        1. A step computes at most `token_budget` tokens, for at most `max_running` requests.
        2. A block that a step or a load may write has one holder and no name.
        3. The oldest request always makes progress: only younger ones are preempted for it, and nobody else is
           admitted while it waits for room.

    Args:
        pool: the device's blocks.
        max_running: requests that hold device blocks at a time.
        token_budget: tokens that a step computes at most.
        hook: where KV beyond device memory comes from and goes to, if anywhere.
        clock: seconds, for the requests' metrics.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_running: int,
        token_budget: int,
        hook: SchedulerHook | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counters = Counters()
        self._pool = pool
        self._max_running = max_running
        self._token_budget = token_budget
        self._hook = hook
        self._clock = clock
        self._arrivals = count()
        self._steps = count()
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # both in order of arrival
        self._running: list[Request] = []
        self._loading: dict[str, _Loading] = {}
        self._held: dict[str, deque[BlockTable]] = {}  # of ended requests, by the hook
        self._results = TransferResults()
        self._stalled: tuple[Request, int] | None = None  # who did not fit into how many spare blocks

    # ---- requests

    @property
    def num_waiting(self) -> int:
        """Requests without device blocks."""
        return len(self._waiting)

    @property
    def num_loading(self) -> int:
        """Requests whose KV is on its way into device memory."""
        return len(self._loading)

    @property
    def num_running(self) -> int:
        """Requests that compute."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether transfers are under way, of live requests or of ended ones."""
        return bool(self._held) or (self._hook is not None and self._hook.busy)

    def get(self, request_id: str) -> Request | None:
        """The live request of that id."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: a live request has its id, or it can never fit into the device pool.
        """
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in use; ids are unique")
        capacity = self._pool.num_blocks * self._pool.block_size
        if request.max_tokens > capacity:
            raise RequestError(
                f"request {request.id!r} may grow to {request.max_tokens} tokens, the device pool holds {capacity}: "
                f"shorten it, or give the engine more blocks"
            )
        request.order = next(self._arrivals)
        request.metrics.arrival = self._clock()
        self._requests[request.id] = request
        self._waiting.append(request)

    def end(self, request_id: str, reason: FinishReason) -> Request | None:
        """A request is through, in whatever state: its blocks are freed, or left to the hook. None for unknown ids."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.state is State.WAITING:
            self._waiting.remove(request)
        elif request.state is State.RUNNING:
            self._running.remove(request)
        self._loading.pop(request_id, None)
        finished = reason in ("stop", "length")
        self._give_back(request_id, request.end(State.FINISHED if finished else State.ABORTED), reason)
        return request

    def _give_back(self, request_id: str, table: BlockTable | None, reason: FinishReason) -> None:
        held = self._hook is not None and self._hook.finished(request_id, reason)
        if table is None:
            return
        if held:
            self._held.setdefault(request_id, deque()).append(table)
        else:
            table.release()

    def fork(self, parent: Request, child: Request) -> None:
        """Add a request that shares the KV of a live one, copy-on-write, as far as their tokens are the same.

        The child runs from now on, beyond `max_running` if need be; where the parent holds no blocks, it waits like any
        other request.

        Args:
            parent: waiting, loading or running.
            child: new; its tokens start with those of `parent` whose KV it is to share.

        Raises:
            RequestError: a live request has the child's id.
        """
        self.add(child)
        child.order, child.metrics.arrival = parent.order, parent.metrics.arrival
        if parent.state is not State.RUNNING:
            self._waiting.sort(key=_by_arrival)
            return
        self._waiting.remove(child)
        table, shared = parent.blocks.fork(), min(parent.num_computed, child.num_tokens - 1)
        table.truncate(shared)
        child.start_running(table, shared, exact=parent.exact)
        insort(self._running, child, key=_by_arrival)
        if self._hook is not None:
            self._hook.allocated(child, table.ids, 0)

    # ---- one step

    def schedule(self) -> StepPlan:
        """Plan the next step; it may have nothing to compute. To be followed by `update` or `fail`."""
        draft = Draft(self._token_budget)
        self._absorb_transfers()
        self._plan_running(draft)
        if not draft.withdrawn:
            self._admit_waiting(draft)
        step = draft.step(next(self._steps), self._pool.block_size)
        return draft.seal(step, TransferPlan() if self._hook is None else self._hook.plan(step))

    def _absorb_transfers(self) -> None:
        if self._hook is None:
            return
        results, self._results = self._results, TransferResults()
        completed = self._hook.completed(results)
        for request_id, (tokens, exact) in completed.loaded.items():
            loading = self._loading.pop(request_id, None)
            if loading is not None:
                self._end_load(loading, tokens, exact=exact)
        for request_id in completed.released:
            tables = self._held.get(request_id)
            if tables:
                tables.popleft().release()
                if not tables:
                    del self._held[request_id]

    def _end_load(self, loading: "_Loading", tokens: int, *, exact: bool) -> None:
        request, size = loading.request, self._pool.block_size
        before = request.num_computed
        good = max(before, min(tokens, loading.stop) // size * size)
        request.finish_loading(good, exact=exact)
        # What was allocated for blocks that did not arrive goes back: others may need it before this one does.
        request.blocks.truncate(good)
        request.metrics.loaded_tokens += good - before
        request.metrics.load_seconds += self._clock() - loading.since
        self.counters.loaded += good - before
        self._publish(request)
        insort(self._running, request, key=_by_arrival)

    def _plan_running(self, draft: Draft) -> None:
        decodes = [request for request in self._running if request.remaining == 1]
        prefills = [request for request in self._running if request.remaining > 1]
        for request in (*decodes, *prefills):
            if draft.budget == 0:
                return
            # It may have been preempted for one planned before it.
            if request.state is State.RUNNING:
                self._plan_request(request, draft)

    def _plan_request(self, request: Request, draft: Draft) -> None:
        table, start = request.blocks, request.num_computed
        reachable = table.capacity_tokens + self._pool.free_blocks * self._pool.block_size
        stop = min(request.num_tokens + len(request.drafts), start + draft.budget, max(reachable, start + 1))
        if self._make_room(request, stop, draft):
            draft.compute(request, stop, table.extend(stop, start))

    def _make_room(self, request: Request, stop: int, draft: Draft) -> bool:
        """Preempt the youngest until `request` can grow to `stop`; False if it cannot in this step."""
        while request.blocks.missing(stop, request.num_computed) > self._pool.free_blocks:
            youngest = self._running[-1]
            if youngest is request and (self._loading or self._held):
                # Those blocks come back without anyone losing work: pause.
                return False
            self._preempt(youngest, draft)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: Request, draft: Draft) -> None:
        draft.withdraw(request)
        self._running.remove(request)
        self._give_back(request.id, request.preempt(), "preempt")
        insort(self._waiting, request, key=_by_arrival)
        request.metrics.preemptions += 1
        self.counters.preemptions += 1

    # ---- admission

    def _admit_waiting(self, draft: Draft) -> None:
        at = 0
        while at < min(len(self._waiting), _MAX_SKIPS) and self._num_active < self._max_running:
            outcome = self._admit(self._waiting[at], draft)
            if outcome is _Admission.BLOCKED:
                return
            if outcome is _Admission.ADMITTED:
                del self._waiting[at]
            else:
                at += 1

    @property
    def _num_active(self) -> int:
        return len(self._running) + len(self._loading)

    def _admit(self, request: Request, draft: Draft) -> _Admission:
        # One block of head-room for each request that is active already, or this one would be preempted right away.
        spare = self._pool.free_blocks - self._num_active
        if self._stalled is not None and self._stalled[0] is request and spare <= self._stalled[1]:
            return _Admission.BLOCKED
        found = self._pool.match(request.chain[: request.reusable_blocks], exact=not request.lossy)
        table = BlockTable(self._pool, found)
        if self._is_on_its_way(request, len(found)):
            table.release()
            return _Admission.SKIPPED
        device_tokens = table.capacity_tokens
        external = self._offered(request, device_tokens)
        fits = table.missing(request.num_tokens, device_tokens) + self._num_active <= self._pool.free_blocks
        if external is None or not fits or (external == 0 and draft.budget == 0):
            table.release()
            if external is None:
                return _Admission.SKIPPED
            self._stalled = None if fits else (request, spare)
            return _Admission.BLOCKED
        request.metrics.cached_tokens += device_tokens
        self.counters.device_hits += device_tokens
        exact = all(map(self._pool.is_exact, found))
        if external:
            self._start_load(request, table, device_tokens + external, draft, exact=exact)
        else:
            request.start_running(table, device_tokens, exact=exact)
            insort(self._running, request, key=_by_arrival)
            stop = min(request.num_tokens, device_tokens + draft.budget)
            draft.compute(request, stop, table.extend(stop, device_tokens))
        if self._hook is not None:
            self._hook.allocated(request, table.ids, external)
        return _Admission.ADMITTED

    def _offered(self, request: Request, device_tokens: int) -> int | None:
        """Tokens beyond the device's own that can be loaded, in whole blocks; None if that is not known yet."""
        if self._hook is None:
            return 0
        offer = self._hook.match(request, device_tokens)
        if isinstance(offer, Pending):
            return None
        size = self._pool.block_size
        return min(offer.tokens // size * size, request.reusable_blocks * size - device_tokens)

    def _is_on_its_way(self, request: Request, device_blocks: int) -> bool:
        """Whether an active request will soon publish the next block that this one could take from the device."""
        if device_blocks >= request.reusable_blocks:
            return False
        wanted = request.chain[device_blocks]
        active = (*self._running, *(loading.request for loading in self._loading.values()))
        return any(
            other.published <= device_blocks < len(other.chain)
            and other.chain[device_blocks] == wanted
            # Only blocks that are sure to be exact are worth waiting for, unless others do as well.
            and (request.lossy or (other.exact and not other.lossy))
            for other in active
        )

    def _start_load(self, request: Request, table: BlockTable, stop: int, draft: Draft, *, exact: bool) -> None:
        device_tokens = table.capacity_tokens
        table.extend(stop, device_tokens)
        draft.receive(table.ids[device_tokens // self._pool.block_size :])
        request.start_loading(table, device_tokens, exact=exact)
        self._loading[request.id] = _Loading(request, stop, self._clock())

    # ---- after the step

    def update(self, plan: StepPlan, sampled: Sequence[Sampled], results: TransferResults) -> None:
        """The step was run.

        Args:
            plan: of the last `schedule`.
            sampled: one for each of `plan.samples`.
            results: what the worker hook reported at its end.
        """
        self._results = results
        now = self._clock()
        self.counters.steps += bool(plan.requests)
        for request, span in zip(plan.requests, plan.step.spans, strict=True):
            request.advance(span.stop)
            self.counters.computed += span.stop - span.start
        for at, result in zip(plan.samples, sampled, strict=True):
            plan.requests[at].append(result.tokens, now)
        for request in plan.requests:
            # Blocks that held nothing but drafts that were wrong.
            request.blocks.truncate(request.num_computed)
            self._publish(request)
        self._count_slots()

    def fail(self, plan: StepPlan, results: TransferResults) -> None:
        """The step could not be run: its requests end, all others go on with the next step."""
        self._results = results
        for request in plan.requests:
            self.end(request.id, "error")

    def _publish(self, request: Request) -> None:
        ids, chain = request.blocks.ids, request.chain
        full = request.num_computed // self._pool.block_size
        for at in range(request.published, full):
            self._pool.publish(ids[at], chain[at], request.exact)
        request.published = full

    def _count_slots(self) -> None:
        size, counters = self._pool.block_size, self.counters
        tokens = [(request, request.num_computed) for request in self._running]
        tokens += [(loading.request, loading.stop) for loading in self._loading.values()]
        for request, used in tokens:
            counters.slots_held += request.blocks.capacity_tokens
            counters.slots_reached += -(-used // size) * size
            counters.slots_used += used
