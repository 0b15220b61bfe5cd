"""Scheduler half: decides what to load and save, in the process that owns the store. Never touches bytes.

A request's way through it:

    match       look up -> acquire (Pending) -> leased, offered
    allocated   fetch into host
    plan        fetched -> a load job for the worker; newly full blocks -> a save job
    completed   loaded -> lease ends; saved -> put into the store, staging freed
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

from kvtier.connector.futures import settled
from kvtier.connector.saves import SaveQueue
from kvtier.cpu import StagingRegion
from kvtier.hooks import Completed, FinishReason, Load, Match, Pending, RequestView, Step, TransferPlan, TransferResults
from kvtier.keys import Namespace, namespace_index, store_keys
from kvtier.store import Lease, TieredStore

__all__ = ["TierScheduler"]


@dataclass(slots=True)
class _Loading:
    """A request between its first match and the end of its load.

    blocks of the chain   [0 ........ first) [first ...... stop) [stop ...
                           on the device      to be loaded        to be computed
    """

    acquired: "Future[Lease]"
    offered_from: int = 0
    device_blocks: tuple[int, ...] = ()
    found_in: tuple[str, ...] = ()
    first: int = 0
    stop: int = 0
    fetched: "Future[int] | None" = None
    good: int = 0
    job: int | None = None
    abandoned: bool = False


@dataclass(slots=True)
class _Outbox:
    """What the next `completed` has to report."""

    loaded: dict[str, tuple[int, bool]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)


class TierScheduler:
    """Implements `kvtier.hooks.SchedulerHook` over a store, for one uniform layout on one worker.

    Args:
        store: the block store; this half uses it, and does not close it.
        namespace: what the engine's KV is compatible with.
        block_size: tokens per block.
        staging: memory of the worker's saves, with slots of one raw block.
    """

    def __init__(self, store: TieredStore, namespace: Namespace, block_size: int, staging: StagingRegion) -> None:
        self._store = store
        self._mask = namespace.mask()
        self._block_size = block_size
        self._loading: dict[str, _Loading] = {}
        self._by_job: dict[int, str] = {}
        self._jobs = count(1)
        self._saves = SaveQueue(store, namespace_index(namespace.digest), self._mask, block_size, staging)
        self._outbox = _Outbox()
        self._prefill_rate = store.metrics.prefill_rate

    # ---- looking up

    def match(self, request: RequestView, device_tokens: int) -> Match | Pending:
        """See `SchedulerHook.match`. At least one token of the request is always left to compute."""
        state = self._loading.get(request.id)
        if state is not None and state.abandoned:
            # An earlier life of this request (preempted while loading) has not let go of its blocks yet.
            return Pending()
        if state is None:
            usable = min(len(request.chain), (request.num_tokens - 1) // self._block_size)
            keys = store_keys(request.chain[:usable], self._mask)
            run = len(self._store.match(keys).tiers)
            if run * self._block_size <= device_tokens:
                return Match(0)
            state = _Loading(self._store.acquire(keys[:run], request.id))
            self._loading[request.id] = state
        if not state.acquired.done():
            return Pending()
        state.offered_from = device_tokens // self._block_size
        offered = len(self._lease(state).blocks) - state.offered_from
        if offered <= 0:
            self._give_up(request.id)
            return Match(0)
        return Match(offered * self._block_size, self._exact(state))

    @staticmethod
    def _lease(state: _Loading) -> Lease:
        return settled(state.acquired, Lease(""))

    def _exact(self, state: _Loading) -> bool:
        return all(handle.ref.exact for _, handle in self._lease(state).blocks)

    def allocated(self, request: RequestView, block_ids: Sequence[int], external_tokens: int) -> None:
        """See `SchedulerHook.allocated`."""
        if external_tokens == 0:
            self._give_up(request.id)
            return
        state = self._loading[request.id]
        state.first = state.offered_from
        state.stop = state.first + external_tokens // self._block_size
        state.device_blocks = tuple(block_ids[state.first : state.stop])
        state.found_in = tuple(self._lease(state).tiers()[state.first : state.stop])
        state.fetched = self._store.fetch(self._lease(state), state.first, state.stop)

    def finished(self, request_id: str, reason: FinishReason) -> bool:
        """See `SchedulerHook.finished`: holds the blocks only while a load is writing to them."""
        self._saves.forget(request_id)
        state = self._loading.get(request_id)
        if state is None:
            return False
        state.abandoned = True
        self._reap(request_id, state)
        return state.job is not None

    def _give_up(self, request_id: str) -> None:
        state = self._loading.get(request_id)
        if state is not None:
            state.abandoned = True
            self._reap(request_id, state)

    def _reap(self, request_id: str, state: _Loading) -> None:
        """Drop an abandoned request as soon as no thread and no copy uses its lease."""
        busy = not state.acquired.done() or (state.fetched is not None and not state.fetched.done())
        if busy or state.job is not None:
            return
        self._store.release(self._lease(state))
        del self._loading[request_id]

    # ---- transfers

    def plan(self, step: Step) -> TransferPlan:
        """See `SchedulerHook.plan`."""
        loads: dict[int, tuple[Load, ...]] = {}
        for request_id, state in list(self._loading.items()):
            if state.abandoned:
                self._reap(request_id, state)
            elif state.fetched is not None and state.job is None and state.fetched.done():
                self._start_load(request_id, state, settled(state.fetched, 0), loads)
        saves = self._saves.plan(step, self._jobs)
        return TransferPlan(loads, saves, self._saves.fences(step.written, planned=saves))

    def _start_load(self, request_id: str, state: _Loading, fetched: int, loads: dict[int, tuple[Load, ...]]) -> None:
        state.good = fetched
        if fetched == 0:
            self._end_load(request_id, state, 0)
            return
        stop = state.first + fetched
        spans = self._store.spans(self._lease(state), state.first, stop)
        state.job = next(self._jobs)
        self._by_job[state.job] = request_id
        loads[state.job] = tuple(map(Load, spans, state.device_blocks))

    def completed(self, results: TransferResults) -> Completed:
        """See `SchedulerHook.completed`."""
        ended = dict.fromkeys(results.finished) | results.failed
        for job, copied in ended.items():
            request_id = self._by_job.pop(job, None)
            if request_id is not None:
                state = self._loading[request_id]
                self._end_load(request_id, state, state.good if copied is None else copied)
            else:
                self._saves.copied(job, copied)
        self._saves.collect()
        outbox, self._outbox = self._outbox, _Outbox()
        return Completed(outbox.loaded, frozenset(outbox.failed), tuple(outbox.released))

    def _end_load(self, request_id: str, state: _Loading, good: int) -> None:
        for (_, handle), tier in zip(self._lease(state).blocks[state.first :][:good], state.found_in, strict=False):
            self._store.metrics.loaded_bytes.labels(tier).inc(handle.nbytes)
        if state.abandoned:
            self._outbox.released.append(request_id)
        else:
            self._outbox.loaded[request_id] = ((state.first + good) * self._block_size, self._exact(state))
            if good < state.stop - state.first:
                self._outbox.failed.add(request_id)
        self._store.release(self._lease(state))
        del self._loading[request_id]

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """See `SchedulerHook.observe_prefill`."""
        if seconds > 0:
            self._prefill_rate.set(tokens / seconds)

    @property
    def busy(self) -> bool:
        """See `SchedulerHook.busy`."""
        return bool(self._loading or self._outbox.loaded or self._outbox.released) or self._saves.busy
