"""A world around the scheduler: a connector over a dict, a device of numbers, both driven step by step."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from scheduler_device import Device, continuation
from scheduler_fate import Fate, RandomFate

from kvtier.engine.outputs import Sampled
from kvtier.engine.params import SamplingParams
from kvtier.engine.plan import Draft, StepPlan
from kvtier.engine.request import Request, State
from kvtier.engine.rules import SchedulingRules
from kvtier.engine.scheduler import Scheduler
from kvtier.gpu.mixed import MixedBlockPool
from kvtier.gpu.pool import BlockPool
from kvtier.hooks import NO_BLOCK, Completed, Load, Match, Pending, Save, Step, TransferPlan, TransferResults
from kvtier.layout import Span

__all__ = ["Connector", "Fate", "Offer", "RandomFate", "Stored", "Swap", "World"]


@dataclass
class Stored:
    content: list[int]
    exact: bool


@dataclass
class Swap:
    """What is kept of a request that was swapped out: its tokens up to `stop`, from block `first` on privately."""

    first: int
    stop: int
    exact: bool
    job: int
    private: list[list[int]] | None = None


@dataclass
class Offer:
    """A look-up of one request, and the load that may follow."""

    waits: int
    keys: list[bytes]
    first: int = 0
    block_ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    job: int | None = None
    good: int = 0
    abandoned: bool = False
    stop: int = 0
    exact: bool = True
    private: list[list[int]] = field(default_factory=list)


class Connector:
    """Both hook halves over a dict.

    Saves read the device as late as the protocol allows: at a fence, or when they end. Loads leave garbage behind
    from their start to their end.
    """

    def __init__(self, device: Device, fate: Fate) -> None:
        self.device = device
        self.fate = fate
        self.store: dict[bytes, Stored] = {}
        self.jobs = 0
        self.offers: dict[str, Offer] = {}
        self.orphans: dict[int, str] = {}
        self.load_jobs: dict[int, tuple[str, tuple[Load, ...], list[list[int]], bool]] = {}
        self.save_jobs: dict[int, tuple[tuple[Save, ...], list[tuple[bytes, bool]], list[list[int]] | None]] = {}
        self.saved: dict[str, int] = {}
        self.swaps: dict[str, Swap] = {}
        self.leaving: dict[int, tuple[str, tuple[Save, ...], list[tuple[bytes, bool]], list[list[int]] | None]] = {}
        self.evacuations: dict[int, tuple[Save, ...]] = {}
        self.prefetched: list[str] = []
        self.told: set[int] = set()  # jobs that the worker half knows of, and has not reported
        self.arrived: dict[int, int] = {}  # overlapped loads of this step, and how many of their blocks came

    # ---- scheduler half

    def _saves(self, block_ids: Sequence[int], windowed_ids: Sequence[int], first: int) -> tuple[Save, ...]:
        """Of whole blocks; the span says where the windowed part is."""
        slots = windowed_ids or [0] * len(block_ids)
        assert NO_BLOCK not in slots[first:]
        return tuple(
            Save(block, Span(slot, 0, 1)) for block, slot in zip(block_ids[first:], slots[first:], strict=True)
        )

    def swap_out(
        self,
        request: Request,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        exact: bool,
        forced: bool,
        windowed_ids: Sequence[int] = (),
    ) -> bool:
        assert request.id not in self.swaps
        assert len(block_ids) == -(-num_tokens // self.device.size)
        if not self.fate.swaps():
            return False
        full = num_tokens // self.device.size if exact else 0
        gone = block_ids.count(NO_BLOCK) + windowed_ids.count(NO_BLOCK)
        if min(self.saved.get(request.id, 0), full) < gone:
            return False
        first = min(self.saved.pop(request.id, 0), full)
        job = self._next_job()
        self.evacuations[job] = self._saves(block_ids, windowed_ids, first)
        keys = [(key, True) for key in request.chain[first:full]]
        assert len(keys) == full - first
        self.leaving[job] = request.id, self.evacuations[job], keys, None
        self.swaps[request.id] = Swap(full, num_tokens, exact, job)
        return True

    def prefetch(self, request: Request) -> None:
        assert request.state is State.WAITING
        self.prefetched.append(request.id)

    def match(self, request: Request, device_tokens: int) -> Match | Pending:
        offer, swap = self.offers.get(request.id), self.swaps.get(request.id)
        if swap is not None:
            assert request.state is State.SWAPPED
        if offer is None:
            keys = []
            lossy = request.id.startswith("lossy") and swap is None
            for key in request.chain[: request.reusable_blocks if swap is None else swap.first]:
                if key not in self.store or not (self.store[key].exact or lossy):
                    break
                keys.append(key)
            kept = swap is not None and swap.private and max(len(keys), device_tokens // self.device.size) >= swap.first
            if len(keys) * self.device.size <= device_tokens and not kept:
                return Match(0)
            offer = self.offers[request.id] = Offer(self.fate.lookup_steps(), keys)
        assert not offer.abandoned
        if offer.waits:
            offer.waits -= 1
            return Pending()
        offer.first = device_tokens // self.device.size
        rest = offer.keys[offer.first :]
        if swap is not None and swap.private and offer.first <= swap.first <= max(offer.first, len(offer.keys)):
            return Match(swap.stop - device_tokens, swap.exact, self.fate.copy_seconds())
        if not rest:
            del self.offers[request.id]
            return Match(0)
        exact = all(self.store[key].exact for key in offer.keys)
        return Match(len(rest) * self.device.size, exact, self.fate.copy_seconds())

    def allocated(
        self, request: Request, block_ids: Sequence[int], external_tokens: int, windowed_ids: Sequence[int] = ()
    ) -> None:
        swap = self.swaps.pop(request.id, None)
        if external_tokens == 0:
            self.offers.pop(request.id, None)
            return
        offer, size = self.offers[request.id], self.device.size
        offer.stop = offer.first * size + external_tokens
        if swap is not None and offer.stop == swap.stop:
            offer.private = swap.private or []
            offer.exact = swap.exact
        count = -(-external_tokens // size)
        offer.keys = offer.keys[: offer.first + count - len(offer.private)]
        offer.block_ids = tuple(block_ids[offer.first : offer.first + count])
        offer.slots = tuple((windowed_ids or [0] * len(block_ids))[offer.first : offer.first + count])
        gone = offer.block_ids.count(NO_BLOCK)
        assert gone < count
        assert len(offer.block_ids) == count == len(offer.keys[offer.first :]) + len(offer.private)

    def plan(self, step: Step) -> TransferPlan:
        loads, saves, overlapped = {}, {}, set()
        computing = {span.request.id for span in step.spans}
        for request_id, offer in self.offers.items():
            if not offer.block_ids or offer.job is not None:
                continue
            if request_id in computing or self.fate.load_starts():
                offer.job = self._next_job()
                gone = offer.block_ids.count(NO_BLOCK)
                places = zip(offer.block_ids[gone:], offer.slots[gone:], strict=True)
                loads[offer.job] = tuple(Load(Span(slot, 0, 1), block) for block, slot in places)
                contents = [list(self.store[key].content) for key in offer.keys[offer.first :]] + offer.private
                del contents[:gone]
                # Both as they are now: a better copy may take their place while this one is on its way.
                exact = all(self.store[key].exact for key in offer.keys) and offer.exact
                self.load_jobs[offer.job] = (request_id, loads[offer.job], contents, exact)
                if request_id in computing:
                    overlapped.add(offer.job)
        void = {self.load_jobs[job][0] for job in overlapped}
        for span in step.spans:
            if span.request.id in void:
                continue
            # Neither drafts nor tokens that are not known yet have a name.
            full = min(span.stop, span.request.num_tokens) // self.device.size
            first = self.saved.get(span.request.id, 0)
            if full > first:
                self.saved[span.request.id] = full
                # What nobody reads any more is not there to be saved; all that follows it is no run.
                first = max(first, span.block_ids.count(NO_BLOCK), span.windowed_ids.count(NO_BLOCK))
                job = self._next_job()
                saves[job] = self._saves(span.block_ids[:full], span.windowed_ids[:full], first)
                keys = [(key, span.exact) for key in span.request.chain[first:full]]
                assert len(keys) == full - first
                self.save_jobs[job] = (saves[job], keys, None)
        fences = {
            job
            for job, (copies, _, read) in self.save_jobs.items()
            if job not in saves and read is None and self._are_written(copies, step)
        }
        evacuations, self.evacuations = self.evacuations, {}
        return TransferPlan(loads, saves, frozenset(fences), evacuations, frozenset(overlapped))

    def _are_written(self, copies: Sequence[Save], step: Step) -> bool:
        slots = {copy.span.region for copy in copies} if self.device.mixed else set()
        return bool(step.written & {copy.block_id for copy in copies} or step.windowed_written & slots)

    def _content(self, copies: Sequence[Save]) -> list[list[int]]:
        return [self.device.content(copy.block_id, copy.span.region) for copy in copies]

    def _next_job(self) -> int:
        self.jobs += 1
        return self.jobs

    def completed(self, results: TransferResults) -> Completed:
        loaded, failed, released, swapped = {}, set(), [], []
        for job in (*results.finished, *results.failed):
            if job in self.leaving:
                swapped += self._left(job, good=job not in results.failed)
                continue
            if job in self.save_jobs:
                _, keys, contents = self.save_jobs.pop(job)
                for (key, exact), content in zip(keys, contents or [], strict=job not in results.failed):
                    if key not in self.store or not self.store[key].exact:
                        self.store[key] = Stored(content, exact)
                continue
            request_id, copies, _, exact = self.load_jobs.pop(job)
            if job in self.orphans:
                released.append(self.orphans.pop(job))
                continue
            offer = self.offers.pop(request_id)
            good = results.failed.get(job, len(copies))
            gone = offer.block_ids.count(NO_BLOCK)
            arrived = offer.stop if good == len(copies) else (offer.first + gone + good) * self.device.size
            loaded[request_id] = (arrived, exact)
            if good < len(copies):
                failed.add(request_id)
        return Completed(loaded, frozenset(failed), tuple(released), tuple(swapped))

    def _left(self, job: int, *, good: bool) -> list[str]:
        """What was swapped out has arrived, unless the copy failed."""
        request_id, _, keys, contents = self.leaving.pop(job)
        assert contents is not None or not good
        contents = contents or []
        for (key, exact), content in zip(keys, contents, strict=False):
            if key not in self.store or not self.store[key].exact:
                self.store[key] = Stored(content, exact)
        swap = self.swaps.get(request_id)
        if swap is None or swap.job != job:
            return []
        swap.private = contents[len(keys) :] if good and self.fate.keeps() else None
        return [request_id]

    def observe_prefill(self, tokens: int, seconds: float, attended: int = 0) -> None: ...

    def finished(self, request_id: str, reason: str) -> bool:
        self.saved.pop(request_id, None)
        self.swaps.pop(request_id, None)
        offer = self.offers.pop(request_id, None)
        if offer is None or offer.job is None:
            return False
        self.orphans[offer.job] = request_id
        return True

    @property
    def busy(self) -> bool:
        return bool(self.offers or self.load_jobs or self.save_jobs or self.leaving)

    # ---- worker half

    def register_pool(self, pool: object) -> None: ...

    def begin(self, plan: TransferPlan) -> None:
        self.told.update(plan.loads, plan.saves, plan.evacuations)
        for job, copies in plan.evacuations.items():
            request_id, _, keys, _ = self.leaving[job]
            contents = self._content(copies)
            self.leaving[job] = request_id, copies, keys, contents
        for job in plan.fences:
            self._read(job)
        for copies in plan.loads.values():
            for copy in copies:
                self.device.fill(copy.block_id, copy.span.region, None)
        for job in plan.overlapped:
            self.arrived[job] = self._arrive(job)

    def _arrive(self, job: int) -> int:
        """Copy what comes of a load; how much of it did."""
        _, copies, contents, _ = self.load_jobs[job]
        good = self.fate.good_copies(len(copies))
        for copy, content in list(zip(copies, contents, strict=True))[:good]:
            self.device.fill(copy.block_id, copy.span.region, content)
        return good

    def wait_layer(self, layer: int) -> None: ...

    def _read(self, job: int) -> None:
        copies, keys, contents = self.save_jobs[job]
        if contents is None:
            self.save_jobs[job] = copies, keys, self._content(copies)

    def end(self, plan: TransferPlan) -> TransferResults:
        finished, failed = [], {}
        for job, (_, copies, _, _) in self.load_jobs.items():
            if job in self.told and (job in self.arrived or self.fate.load_ends()):
                good = self.arrived.pop(job, None)
                good = self._arrive(job) if good is None else good
                if good < len(copies):
                    failed[job] = good
                else:
                    finished.append(job)
        for job in self.save_jobs:
            if job in self.told and job not in plan.saves and self.fate.save_ends():
                self._read(job)
                finished.append(job)
        for job, (_, copies, _, contents) in self.leaving.items():
            if job in self.told and contents is not None and self.fate.save_ends():
                if self.fate.good_copies(len(copies)) < len(copies):
                    failed[job] = 0
                else:
                    finished.append(job)
        self.told.difference_update(finished, failed)
        return TransferResults(tuple(finished), failed)


class World:
    """Scheduler, device and connector, driven step by step."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        max_running: int = 3,
        token_budget: int = 8,
        fate: Fate | None = None,
        rules: SchedulingRules | None = None,
        stops: Collection[int] = (),
        window: int | None = None,
        slots: int = 0,
        cost: Callable[[StepPlan], float] = lambda _: 1.0,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, window)
        if slots and window is not None:
            self.pool = MixedBlockPool(num_blocks, slots, block_size, window)
        self.device = Device(num_blocks, block_size, window, slots)
        self.connector = Connector(self.device, fate) if fate else None
        self.budget, self.max_running = token_budget, max_running
        self.now, self.stops, self.pipelined = 0.0, stops, rules is not None and rules.pipelined
        self.under_way: tuple[StepPlan, list[Sampled], TransferResults] | None = None
        self.scheduler = Scheduler(
            self.pool, max_running, token_budget, self.connector, lambda: self.now, rules or SchedulingRules()
        )
        self.cost = cost
        self.forced: str | None = None
        self.live: dict[str, Request] = {}
        self.outputs: dict[str, tuple[list[int], list[int]]] = {}
        self.indices: list[int] = []
        self.overlapped = self.voided = 0

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, **params: Any) -> Request:
        capacity = self.pool.num_blocks * self.pool.block_size
        request = Request(
            request_id,
            prompt,
            SamplingParams(max_tokens=max_tokens, **params),
            0,
            block_size=self.pool.block_size,
            limit=capacity,
        )
        self.scheduler.add(request)
        self.live[request_id] = request
        return request

    def fork(self, parent: Request, request_id: str, max_tokens: int, **params: Any) -> Request:
        """A request whose prompt is all that another one has so far."""
        child = Request(
            request_id,
            parent.tokens,
            SamplingParams(max_tokens=max_tokens, **params),
            0,
            block_size=self.pool.block_size,
            limit=self.pool.num_blocks * self.pool.block_size,
        )
        self.scheduler.fork(parent, child)
        self.live[request_id] = child
        return child

    @property
    def beams(self) -> int:
        """Forks that run beyond the limit, and are there whatever becomes of their parents."""
        return sum(request.params.beam_width > 0 for request in self.live.values())

    def draft(self, request: Request, drafts: Sequence[int]) -> None:
        """Guess what comes next, as far as the request may still grow."""
        if request.ahead == 1 and not request.pending:
            request.drafts = tuple(drafts[: request.max_tokens - request.num_tokens - 1])

    def abort(self, request_id: str) -> None:
        ended = self.scheduler.end(request_id, "abort")
        assert (ended is not None) == (request_id in self.live)
        self.live.pop(request_id, None)

    def preempt(self, number: int) -> None:
        """Plan a step in which one of the running requests loses its blocks."""
        running = self.scheduler._books.running
        self.forced = running[number % len(running)].id if running else None
        self.step()

    def step(self, *, fails: bool = False) -> StepPlan:
        if self.pipelined:
            return self.pipelined_step()
        plan = self.plan()
        sampled, results = self.run(plan)
        self.now += self.cost(plan)
        if fails:
            unsaved = dict.fromkeys(plan.transfers.saves, 0)
            self.scheduler.fail(plan, TransferResults(results.finished, results.failed | unsaved))
            for request in plan.requests:
                del self.live[request.id]
        else:
            self.land(plan, sampled, results)
        return plan

    def plan(self) -> StepPlan:
        with self._preempting():
            plan = self.scheduler.schedule()
        self.indices.append(plan.step.index)
        assert plan.num_tokens <= self.budget
        assert len(plan.requests) <= self.max_running + self.beams
        assert len({request.id for request in plan.requests}) == len(plan.requests)
        return plan

    @contextmanager
    def _preempting(self) -> Iterator[None]:
        """Whoever is to lose its blocks does, once this step's decodes are planned."""
        name, self.forced = self.forced, None
        limit, room = self.scheduler._limit_prefill, self.scheduler._room

        def limited(draft: Draft) -> None:
            limit(draft)
            for request in [request for request in self.scheduler._books.running if request.id == name]:
                room.preempt(request, draft)

        self.scheduler._limit_prefill = limited  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.scheduler._limit_prefill = limit  # type: ignore[method-assign]

    def run(self, plan: StepPlan) -> tuple[list[Sampled], TransferResults]:
        if self.connector is None:
            return self.device.run(plan), TransferResults()
        self.connector.begin(plan.transfers)
        return self.device.run(plan), self.connector.end(plan.transfers)

    def land(self, plan: StepPlan, sampled: Sequence[Sampled], results: TransferResults) -> None:
        void = self.scheduler.update(plan, sampled, results)
        self.overlapped += len(plan.arriving)
        self.voided += len(void)
        for at, result in zip(plan.samples, sampled, strict=True):
            if plan.requests[at].id in self.live and plan.requests[at].id not in void:
                self._maybe_finish(plan.requests[at], len(result.tokens))

    def pipelined_step(self) -> StepPlan:
        """Plan a step while another one is under way, then account for that one."""
        plan = self.plan()
        self.now += self.cost(plan)
        if self.under_way is not None:
            self.land(*self.under_way)
        self.under_way = plan, *self.run(plan)
        return plan

    def _maybe_finish(self, request: Request, new: int) -> None:
        stops = [at for at in range(request.num_tokens - new, request.num_tokens) if request.tokens[at] in self.stops]
        if stops:
            request.cut(stops[0] + 1)
        if stops or request.num_tokens == request.max_tokens:
            assert self.scheduler.end(request.id, "length") is request
            assert request.state is State.FINISHED
            del self.live[request.id]
            self.outputs[request.id] = request.tokens[: request.prompt_len], request.tokens[request.prompt_len :]

    def drain(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not (self.live or self.scheduler.busy or (self.under_way and self.under_way[0].requests)):
                return
            self.step()
        raise AssertionError(
            f"no progress: {[(r.id, r.state, r.num_computed, r.num_tokens) for r in self.live.values()]}"
        )

    def at_rest(self) -> None:
        """Nothing is left behind: no block, no private object, no promise."""
        self.check()
        assert self.pool.used_blocks == 0
        if self.connector is not None:
            left = (self.connector.swaps, self.connector.offers, self.connector.saved)
            assert not any(left), left

    def check(self) -> None:
        """Books against reality: references, states, contents of every published block."""
        self.pool.check()
        tables = [request.blocks for request in self.live.values() if request.table is not None]
        tables += [table for held in self.scheduler._books.held.values() for table in held]
        references = [block for table in tables for block in table.ids]
        for block in range(self.pool.num_blocks):
            assert self.pool.references(block) == references.count(block)
        if isinstance(self.pool, MixedBlockPool):
            read = {slot for table in tables for slot in table.windowed_ids} - {NO_BLOCK}
            assert self.pool.used_slots == len(read)
        counts = {state: sum(request.state is state for request in self.live.values()) for state in State}
        swapped = counts[State.SWAPPING_OUT] + counts[State.SWAPPED]
        assert swapped == self.scheduler.num_swapped
        assert counts[State.WAITING] + swapped == self.scheduler.num_waiting
        assert counts[State.LOADING] == self.scheduler.num_loading
        assert counts[State.RUNNING] == self.scheduler.num_running
        assert counts[State.RUNNING] + counts[State.LOADING] <= self.max_running + self.beams
        for request in self.live.values():
            assert request.num_computed < request.num_tokens
            assert request.published * self.pool.block_size <= request.num_computed

    def check_outputs(self) -> None:
        for request_id, (prompt, output) in self.outputs.items():
            if not request_id.startswith("lossy"):
                expected = continuation(prompt, len(output), self.device.window, self.device.mixed)
                assert output == expected, request_id
