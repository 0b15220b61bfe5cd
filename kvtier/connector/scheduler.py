"""Scheduler half: decides what to load and save, in the process that owns the store. Never touches bytes.

A request's way through it:

    swap_out    what was not saved is evacuated, the last block privately
    match       look up -> gate -> acquire (Pending) -> leased, offered; what is kept privately after it
    allocated   fetch into host
    plan        fetched -> a load job for the workers; newly full blocks -> a save job;
                blocks that leave the device and are not in host any more -> an evacuation
    completed   loaded -> lease ends; saved -> put into the store, staging freed

What takes too long on the way is given up and computed instead: a tier that hangs costs its deadline, once.
"""

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kvtier.connector.ahead import Ahead
from kvtier.connector.duplicates import DeviceCopies
from kvtier.connector.futures import done, settled, settles
from kvtier.connector.gate import Gate
from kvtier.connector.hinting import Hinting
from kvtier.connector.looking import LookUps
from kvtier.connector.options import ConnectorOptions
from kvtier.connector.parts import Ended, Parts, Reports
from kvtier.connector.saves import SaveQueue
from kvtier.connector.swapping import Swaps
from kvtier.cost import Decision
from kvtier.cpu import StagingRegion
from kvtier.errors import ConfigError
from kvtier.hooks import (
    NO_BLOCK,
    Completed,
    FinishReason,
    Load,
    Match,
    Pending,
    RequestView,
    Save,
    Step,
    TransferPlan,
    TransferResults,
)
from kvtier.keys import Namespace
from kvtier.store import Lease, Located, PrivateObject, TieredStore
from kvtier.tiers import Owner

__all__ = ["TierScheduler"]

_DONE = done(Lease(""))
_NONE = done(0)


@dataclass(slots=True)
class _Loading:
    """A request between its first match and the end of its load.

    blocks of the chain   [0 ........ first) [first ...... stop) [stop ...
                           on the device      to be loaded        to be computed

    The lease begins at block `base`, which was `first` when it was asked for: what the device has is neither verified
    nor renewed. Or it begins `skipped` blocks after it, where those are behind the model's window: then it counts as a
    whole or not at all. The last blocks to be loaded may be the request's own, `private` ones. `tokens`: those of all
    blocks before `stop`. `origin`: tier of each leased block before it was `promoted`, which is before it is offered,
    or not at all.
    """

    owner: Owner
    acquired: "Future[Lease]"
    deadline: float
    base: int
    first: int
    stop: int
    tokens: int = 0
    skipped: int = 0
    private: tuple[PrivateObject, ...] = ()
    device_blocks: tuple[int, ...] = ()
    windowed_blocks: tuple[int, ...] = ()
    origin: tuple[str, ...] = ()
    found_in: tuple[str, ...] = ()
    promoted: "Future[int] | None" = None
    fetched: "Future[int] | None" = None
    good: int = 0
    job: int | None = None
    moved: list[int] = field(default_factory=list)  # bytes of each block that go into the device
    abandoned: bool = False

    @property
    def lease(self) -> Lease:
        """What was acquired; nothing, if the store's work died."""
        return settled(self.acquired, Lease(""))

    @property
    def held(self) -> int:
        """Leased blocks that are of use."""
        held = len(self.lease) if self.acquired.done() else 0
        if self.promoted is not None:
            held = min(held, settled(self.promoted, 0)) if self.promoted.done() else 0
        return held if not self.skipped or self.base + held == self.stop else 0

    def leased(self, blocks: int) -> tuple[int, int]:
        """Where the first so many blocks to be loaded lie in the lease."""
        start = self.first - self.base
        return max(0, start), start + blocks

    @property
    def working(self) -> "Future[Lease] | Future[int]":
        """The store's latest work on it: until it is done, a thread may be using the lease."""
        return self.fetched or self.promoted or self.acquired


@dataclass(slots=True)
class _Outbox:
    """What the next `completed` has to report."""

    loaded: dict[str, tuple[int, bool]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)


class TierScheduler:
    """Implements `kvtier.hooks.SchedulerHook` over a store.

    Args:
        store: the block store; this half uses it, and does not close it. For blocks in formats other than raw, the
            namespace is registered with it.
        namespace: what the engine's KV is compatible with.
        block_size: tokens per block.
        staging: memory of the workers' saves, with slots of one raw part; one region per part (group by group, in
            each shard by shard).
        options: the rest.

    Raises:
        ConfigError: the number of staging regions is not that of parts.
    """

    def __init__(
        self,
        store: TieredStore,
        namespace: Namespace,
        block_size: int,
        staging: StagingRegion | Sequence[StagingRegion],
        options: ConnectorOptions | None = None,
    ) -> None:
        options = options or ConnectorOptions()
        regions = [staging] if isinstance(staging, StagingRegion) else list(staging)
        self._parts = Parts(namespace, options.groups, options.shards, options.windowed_groups)
        if len(regions) != len(self._parts):
            raise ConfigError(f"{len(regions)} staging regions: expected one for each of {len(self._parts)} parts")
        self._store = store
        self._block_size = block_size
        self._window = options.window_blocks
        self._offers_verified = options.offers == "verified"
        self._gate = Gate(store, block_size, sum(region.slot_bytes for region in regions), options)
        self._copies = DeviceCopies(store, len(self._parts), exclusive=options.copies == "exclusive")
        self._saves = SaveQueue(store, self._parts, block_size, regions, self._copies)
        self._swaps = Swaps(store, self._parts, block_size, self._saves)
        self._lookups = LookUps(store, len(self._parts))
        self._ahead = Ahead(store, self._parts, block_size)
        self._hinting = Hinting(store, self._parts)
        self._loading: dict[str, _Loading] = {}
        self._declined: set[str] = set()  # look-ups that ended with nothing, until the request is admitted
        self._late: list[tuple[Future[Lease] | Future[int], float]] = []
        self._by_job: dict[int, str] = {}
        self._leaving: dict[int, tuple[Save, ...]] = {}
        self._reports = Reports(options.shards)
        self._jobs = count(1)
        self._lives = count(1)
        self._outbox = _Outbox()

    # ---- looking up

    def match(self, request: RequestView, device_tokens: int, *, wait: float = 0.0) -> Match | Pending:
        """See `SchedulerHook.match`. At least one token of the request is always left to compute.

        wait: seconds in which an answer is worth more than the caller's time.
        """
        state, first = self._loading.get(request.id), device_tokens // self._block_size
        if state is not None and (state.fetched is not None or first < state.base - state.skipped):
            # It was given blocks for this already, and was preempted since; or the device lost blocks, and there is a
            # hole before what was leased.
            self._let_go(request.id)
            state = self._loading.get(request.id)
        if state is not None and state.abandoned:
            # An earlier life of this request has not let go of its blocks yet.
            return Pending()
        if state is None and self._lookups.unanswered(request.id, first):
            return Pending()
        if state is None:
            state = self._look_up(request, first)
        if state is None:
            return Pending() if self._lookups.pending(request.id) else Match(0)
        if not self._decided(state, wait):
            if time.monotonic() < state.deadline:
                return Pending()
            self._count_timeout("acquire")
        return self._offer(request.id, state, first)

    def _decided(self, state: _Loading, wait: float) -> bool:
        """Whether it is known what of a look-up can be offered: all that was leased, or what of it came into host."""
        until = time.monotonic() + wait
        if not settles(state.acquired, wait):
            return False
        if not self._offers_verified or not len(state.lease):
            return True
        if state.promoted is None:
            state.origin = tuple(state.lease.tiers())
            state.promoted = self._store.fetch(state.lease, 0, len(state.lease), deadline=state.deadline)
        return settles(state.promoted, until - time.monotonic())

    def _look_up(self, request: RequestView, first: int) -> _Loading | None:
        """Start to lease what is worth loading beyond the `first` blocks, which the device has."""
        usable = min(len(request.chain), (request.num_tokens - 1) // self._block_size)
        swap = self._swaps.get(request.id)
        if swap is not None and first <= swap.first:
            usable = swap.first
        if request.id in self._declined:
            return None
        if swap is not None and swap.objects and swap.first <= first < swap.stop / self._block_size:
            state = self._loading[request.id] = _Loading("", _DONE, math.inf, first, first, first)
            return state
        if usable <= first:
            return None
        # Who was swapped out goes on with what it had, or with equals.
        lossy = request.lossy if swap is None else False
        keys, parts = self._parts.keys(request.chain[first:usable]), len(self._parts)
        found = self._lookups.found(request.id, keys, first, lossy=lossy)
        if found == () and self._store.has_remote:
            # Once is enough: the answer came over a network.
            self._declined.add(request.id)
        if not found:
            return None
        wanted = self._gate.decide(request.id, found, first)
        if wanted == 0:
            self._declined.add(request.id)
            return None
        deadline = time.monotonic() + self._gate.patience(request.id)
        # A life of its own: what an earlier one still holds must not end with this one, nor the other way round.
        owner = f"{request.id}/{next(self._lives)}"
        skipped = 0 if self._window is None else max(0, wanted - self._window)
        keys = keys[skipped * parts : wanted * parts]
        depth = first + skipped
        acquired = self._store.acquire(keys, owner, parts=parts, lossy=lossy, deadline=deadline, depth=depth)
        state = _Loading(owner, acquired, deadline, first + skipped, first, first + wanted, skipped=skipped)
        self._loading[request.id] = state
        return state

    def _offer(self, request_id: str, state: _Loading, first: int) -> Match:
        held, swap = state.held, self._swaps.get(request_id)
        blocks = state.base + held - first if held else 0
        reached = max(state.base + held, first) if held else first
        if swap is not None and swap.objects and swap.first <= reached < swap.stop / self._block_size:
            state.first = first
            tokens = swap.stop - first * self._block_size
            return Match(tokens, swap.exact, self._copy_seconds(state, tokens))
        if blocks <= 0:
            if first < state.stop:
                self._declined.add(request_id)
            self._let_go(request_id)
            return Match(0)
        state.first = first
        tokens, exact = blocks * self._block_size, state.lease.is_exact(*state.leased(blocks))
        return Match(tokens, exact, self._copy_seconds(state, tokens))

    def _copy_seconds(self, state: _Loading, tokens: int) -> float | None:
        return self._gate.copy_seconds(state.lease.tiers(), -(-tokens // self._block_size))

    def explain(self, request_id: str) -> Decision | None:
        """How much of what was found for a request was worth loading, and why; None where nothing was decided."""
        return self._gate.explain(request_id)

    def allocated(
        self, request: RequestView, block_ids: Sequence[int], external_tokens: int, windowed_ids: Sequence[int] = ()
    ) -> None:
        """See `SchedulerHook.allocated`."""
        self._declined.discard(request.id)
        self._lookups.end(request.id)
        self._ahead.end(request.id)
        self._hinting.admitted(request)
        if external_tokens == 0:
            self._let_go(request.id)
            self._swaps.end(request.id)
            return
        state, swap = self._loading[request.id], self._swaps.get(request.id)
        blocks = -(-external_tokens // self._block_size)
        state.stop = state.first + blocks
        state.tokens = state.first * self._block_size + external_tokens
        if swap is not None and state.tokens == swap.stop:
            state.private = swap.objects[max(0, state.first - swap.first) * len(self._parts) :]
        state.first = max(state.first, block_ids.count(NO_BLOCK))
        start, stop = state.leased(state.stop - state.first - self._private_blocks(state))
        state.device_blocks = tuple(block_ids[state.first : state.stop])
        state.windowed_blocks = tuple(windowed_ids[state.first : state.stop])
        state.found_in = (state.origin or tuple(state.lease.tiers()))[start:stop]
        state.deadline = time.monotonic() + self._gate.patience(request.id)
        if state.promoted is not None and stop > start:
            state.fetched = done(stop - start)
            return
        state.fetched = self._store.fetch(state.lease, start, stop, deadline=state.deadline) if stop > start else _NONE

    def _private_blocks(self, state: _Loading) -> int:
        return len(state.private) // len(self._parts)

    def swap_out(
        self,
        request: RequestView,
        block_ids: Sequence[int],
        num_tokens: int,
        *,
        exact: bool,
        forced: bool,
        windowed_ids: Sequence[int] = (),
    ) -> bool:
        """See `SchedulerHook.swap_out`."""
        if not (forced or self._gate.is_worth_keeping(num_tokens, len(block_ids) - block_ids.count(NO_BLOCK))):
            return False
        return self._swaps.swap_out(request, block_ids, windowed_ids, num_tokens, self._jobs, exact=exact)

    def leave(self, request: RequestView, block_ids: Sequence[int], num_tokens: int, *, exact: bool = True) -> None:
        """A request is about to give up its blocks for good: full ones that were not saved yet are, before their reuse.

        Like `swap_out` without a return: they leave by the evacuations of the next `plan`, as far as there is staging
        memory. To be called before `finished`.

        Args:
            request: its blocks change no more.
            block_ids: the block table.
            num_tokens: tokens whose KV the blocks hold.
            exact: see `StepSpan`.
        """
        full = min(num_tokens // self._block_size, len(request.chain), len(block_ids))
        self._leaving |= self._saves.leave_rest(request, block_ids[:full], self._jobs, exact=exact)

    def request_of(self, job: int) -> str:
        """Whose load a job of the latest plan is."""
        return self._by_job[job]

    def found_in(self, request_id: str) -> tuple[str, ...]:
        """Where each block of a load under way was, before it came into host."""
        state = self._loading.get(request_id)
        return () if state is None else state.found_in

    def saved(self, request_id: str) -> int:
        """How many of a request's leading blocks the store has, or will have, or had once."""
        return self._saves.count(request_id)

    @property
    def copying(self) -> bool:
        """Whether blocks are on their way out of the device: a step that may write over them needs fences."""
        return self._saves.copying

    def reset(self) -> None:
        """What is stored of this engine's KV, and what is on its way to the store, is of no more use: all of it goes.

        Waits for the tiers. Loads under way are not stopped.

        Raises:
            BlocksRemain: see `TieredStore.clear`.
        """
        self._saves.void()
        self._declined.clear()
        for request_id in [request_id for request_id, state in self._loading.items() if state.fetched is None]:
            self._let_go(request_id)
        self._store.clear(ns=self._parts.ns)

    def prefetch(self, request: RequestView) -> None:
        """See `SchedulerHook.prefetch`."""
        if request.id not in self._loading:
            self._ahead.prefetch(request)

    def finished(self, request_id: str, reason: FinishReason) -> bool:
        """See `SchedulerHook.finished`: holds the blocks only while a load is writing to them."""
        self._saves.forget(request_id)
        self._ahead.end(request_id)
        self._lookups.end(request_id)
        self._declined.discard(request_id)
        self._hinting.finished(request_id, reason)
        self._hinting.settle(self._saves.is_saving)
        self._let_go(request_id)
        if request_id in self._loading:
            return True
        self._swaps.end(request_id)
        return False

    def _let_go(self, request_id: str) -> None:
        """The request wants nothing any more: drop it, or wait for the job that writes to its blocks."""
        state = self._loading.get(request_id)
        if state is None:
            return
        if state.job is not None:
            state.abandoned = True
            return
        del self._loading[request_id]
        self._release(state)

    def _release(self, state: _Loading) -> None:
        """End the lease as soon as no thread of the store uses it, in that thread or here."""
        state.working.add_done_callback(partial(_end_lease, self._store, state))
        if not state.working.done():
            self._late.append((state.working, state.deadline))

    # ---- transfers

    def plan(self, step: Step) -> TransferPlan:
        """See `SchedulerHook.plan`."""
        evacuations, self._leaving = self._swaps.evacuations() | self._leaving, {}
        evacuations |= self._saves.evacuate(self._copies.leaving(step.written), self._jobs)
        loads: dict[int, tuple[Load, ...]] = {}
        computing, overlapped = {span.request.id for span in step.spans}, set()
        for request_id, state in list(self._loading.items()):
            if state.fetched is None or state.job is not None:
                continue
            if request_id in computing:
                overlapped.add(request_id)
            self._advance_load(request_id, state, loads, urgent=request_id in computing)
        now = time.monotonic()
        self._late = [(work, deadline) for work, deadline in self._late if not work.done() and now < deadline]
        saves = self._saves.plan(step, self._jobs, void=overlapped)
        fences = self._saves.fences(step, planned=saves | evacuations)
        jobs = frozenset(job for job in loads if self._by_job[job] in overlapped)
        return TransferPlan(loads, saves, fences, evacuations, jobs)

    def _advance_load(
        self, request_id: str, state: _Loading, loads: dict[int, tuple[Load, ...]], *, urgent: bool
    ) -> None:
        """Start a load that has come into host, and end one that takes too long; `urgent`: that takes any longer."""
        if state.fetched is not None and state.fetched.done():
            self._start_load(request_id, state, settled(state.fetched, 0), loads)
        elif urgent or time.monotonic() >= state.deadline:
            self._count_timeout("fetch")
            self._end_load(request_id, state, 0)

    def _start_load(self, request_id: str, state: _Loading, fetched: int, loads: dict[int, tuple[Load, ...]]) -> None:
        parts, spans = len(self._parts), []
        if fetched == len(state.device_blocks) - self._private_blocks(state):
            spans = self._swaps.spans(state.private)
        state.good = fetched + len(spans) // parts
        if state.good == 0:
            self._end_load(request_id, state, 0)
            return
        located = self._store.located(state.lease, *state.leased(fetched)) if fetched else []
        located += [Located(span, "raw") for span in spans[: len(spans) // parts * parts]]
        state.job = next(self._jobs)
        places = self._parts.placed(state.device_blocks[: state.good], state.windowed_blocks[: state.good])
        # Parts behind the window of what follows have no place, and stay where they are.
        sizes = [0 if place == NO_BLOCK else span.nbytes for place, (span, _) in zip(places, located, strict=True)]
        state.moved = [sum(sizes[at : at + parts]) for at in range(0, len(sizes), parts)]
        self._gate.link.started(sum(state.moved))
        self._by_job[state.job] = request_id
        loads[state.job] = tuple(
            Load(span, place, fmt, at % parts)
            for at, (place, (span, fmt)) in enumerate(zip(places, located, strict=True))
            if place != NO_BLOCK
        )

    def completed(self, results: TransferResults) -> Completed:
        """See `SchedulerHook.completed`."""
        for ended in self._reports.add(results):
            request_id = self._by_job.pop(ended.job, None)
            if request_id is not None:
                self._loaded(request_id, ended)
            elif not self._swaps.copied(ended.job, ended.good):
                self._saves.copied(ended.job, ended.good)
        self._saves.collect()
        swapped = tuple(self._swaps.collect())
        self._hinting.settle(self._saves.is_saving)
        outbox, self._outbox = self._outbox, _Outbox()
        return Completed(outbox.loaded, frozenset(outbox.failed), tuple(outbox.released), swapped)

    def _loaded(self, request_id: str, ended: Ended) -> None:
        state = self._loading[request_id]
        nbytes = sum(state.moved)
        self._gate.link.ended(nbytes)
        if ended.good is None:
            self._gate.link.observe(nbytes, ended.seconds)
        good = state.good if ended.good is None else ended.good
        named = min(good, len(state.found_in))
        lease, (start, stop) = state.lease, state.leased(named)
        if not state.abandoned:
            refs = [handle.ref for _, handle in lease.part(start, stop)]
            self._copies.filled(state.device_blocks[:named], refs)
            self._copies.stored(state.device_blocks[:named], refs)
        for at, tier in enumerate(state.found_in[:named]):
            self._store.metrics.loaded_bytes.labels(tier).inc(state.moved[at])
            self._gate.learn(tier, lease.nbytes(start + at, start + at + 1))
        self._end_load(request_id, state, good)

    def _end_load(self, request_id: str, state: _Loading, good: int) -> None:
        stop = state.first + good
        if state.abandoned:
            self._outbox.released.append(request_id)
        else:
            tokens = state.tokens if stop == state.stop else stop * self._block_size
            self._outbox.loaded[request_id] = (tokens, self._is_exact(request_id, state, good))
            if stop < state.stop:
                self._outbox.failed.add(request_id)
        self._swaps.end(request_id)
        del self._loading[request_id]
        self._release(state)

    def _is_exact(self, request_id: str, state: _Loading, good: int) -> bool:
        named, swap = len(state.found_in), self._swaps.get(request_id)
        private = swap is None or swap.exact or good <= named
        return private and state.lease.is_exact(*state.leased(min(good, named)))

    def _count_timeout(self, operation: str) -> None:
        self._store.metrics.errors.labels("connector", f"{operation}_timeout").inc()

    def observe_prefill(self, tokens: int, seconds: float, attended: int = 0) -> None:
        """See `SchedulerHook.observe_prefill`."""
        self._gate.observe_prefill(tokens, seconds, attended)

    @property
    def busy(self) -> bool:
        """See `SchedulerHook.busy`. What the store is late with counts until its deadline only."""
        now = time.monotonic()
        late = any(not work.done() and now < deadline for work, deadline in self._late)
        waiting = self._loading or self._outbox.loaded or self._outbox.released
        return bool(late or waiting) or self._saves.busy or self._swaps.busy

    def close(self) -> None:
        """The engine is gone, and what its device held with it: other users of the store take no account of it."""
        self._swaps.close()
        self._copies.close()


def _end_lease(store: TieredStore, state: _Loading, _: "Future[Lease] | Future[int]") -> None:
    store.release(state.lease)
    # The net below it: nothing that this life of the request held outlives it.
    store.release_owner(state.owner)
