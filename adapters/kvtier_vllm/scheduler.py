"""Scheduler side: vLLM's calls become those of kvtier's scheduler half.

get_num_new_matched_tokens    match: None while blocks are looked up, or come into host
update_state_after_alloc      allocated
build_connector_meta          plan: loads for this step or between steps, saves of blocks that it fills, fences
update_connector_output       completed
request_finished              leave, finished
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvtier.connector import ConnectorOptions, TierScheduler
from kvtier.connector.sharing import RegionServer
from kvtier.cpu import StagingRegion
from kvtier.errors import BlocksRemain, ConfigError
from kvtier.events import EventLog
from kvtier.hooks import NO_BLOCK, Load, Match, Step, StepSpan, TransferPlan, TransferResults
from kvtier.keys import Namespace, namespace_index, store_keys
from kvtier.layout import Layout
from kvtier.store import TieredStore
from kvtier.store.build import open_store
from kvtier_vllm.events import Names
from kvtier_vllm.keys import Tracked, nameable
from kvtier_vllm.messages import StepWork
from kvtier_vllm.settings import Settings
from kvtier_vllm.stats import Figures, KVTierStats

__all__ = ["SchedulerSide"]

_log = logging.getLogger(__name__)

_STAGING_BYTES = 64 << 20
_STAGING_STEPS = 2
# How long the scheduler waits for host to check what it has: nothing else could run meanwhile, or somebody could.
_IDLE_WAIT, _BUSY_WAIT = 0.05, 0.005
# A load that takes longer than this is made between steps, while others are computed.
_SYNC_SECONDS = 0.05
_NO_RESULTS = TransferResults()
_UNSURE_ENDS = ("FINISHED_ABORTED", "FINISHED_ERROR")


class SchedulerSide:
    """One engine's.

    Args:
        name: under which it gives its regions to the workers.
        settings: of the connector.
        namespace: of the blocks.
        layout: of the blocks.
        token_budget: tokens per step; staging holds the blocks of several.
        ahead: whether steps are planned before earlier ones have run.
        events: told what the tiers hold; None: nobody wants to know.

    Raises:
        KVTierError: a tier cannot be opened as it is set.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        namespace: Namespace,
        layout: Layout,
        token_budget: int,
        events: EventLog | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self._block_size = layout.block_size
        self._settings = settings
        self._ahead = ahead
        part_bytes = layout.block_bytes()
        store = open_store(settings.tiering, block_bytes=part_bytes, layout=layout, events=events)
        if store is None:
            raise ConfigError("tiering is off: there is nothing to connect vLLM to")
        self.store: TieredStore = store
        per_step = -(-token_budget // layout.block_size)
        slots = max(_STAGING_STEPS * per_step, _STAGING_BYTES // layout.shards // part_bytes, 1)
        self._staging: list[StagingRegion] = []
        try:
            self._staging += [StagingRegion(part_bytes, slots) for _ in range(layout.shards)]
            regions = [*store.host.regions(), *(share for region in self._staging for share in region.regions())]
            store.register(namespace_index(namespace.digest), layout)
            options = _options(settings, layout.shards)
            self.hook = TierScheduler(store, namespace, layout.block_size, self._staging, options)
            self._server = RegionServer(name, regions)
        except BaseException:
            self._let_go()
            raise
        self.figures = Figures(store.metrics)
        self._mask = namespace.mask()
        self.names = None if events is None else Names(events, namespace_index(namespace.digest), self._block_size)
        self._moved = False
        self.manager: Any = None
        self._requests: dict[str, Tracked] = {}
        self._admitted: set[str] = set()
        self._index = 0
        self._allocated: set[int] = set()
        self._sync: dict[str, Tracked] = {}
        self._reading: dict[str, Tracked] = {}
        self._receiving: dict[str, Tracked] = {}
        self._arriving: dict[Any, str] = {}
        self._ended: list[str] = []
        self._over: set[str] = set()
        self._failed: set[str] = set()
        self._prefill: tuple[int, int, float] | None = None

    # ---- looking up

    def add(self, request: Any) -> None:
        """A request has come."""
        if nameable(request):
            self._requests[request.request_id] = Tracked(request, self._block_size)

    def match(self, request: Any, device_tokens: int) -> tuple[int | None, bool]:
        """See `get_num_new_matched_tokens`."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            tracked.local = device_tokens
        if request.skip_reading_prefix_cache:
            return 0, False
        if self._comes(request, device_tokens // self._block_size):
            return None, False
        if tracked is None or tracked.id in self._failed:
            return 0, False
        found = self.hook.match(tracked, device_tokens, wait=_BUSY_WAIT if self._admitted else _IDLE_WAIT)
        if not isinstance(found, Match):
            return None, False
        tracked.waits = found.tokens > 0 and self._between_steps(found)
        return found.tokens, tracked.waits

    def _comes(self, request: Any, first: int) -> bool:
        """Whether another request is loading the next block, or one before it.

        What is loaded by the step that reads it has its name on the device at once; should that load fail, who waits
        for it computes nothing wrong. By vLLM's names, which requests have as well that are not kept.
        """
        if not self._arriving:
            return False
        own = request.request_id
        return any(self._arriving.get(name, own) != own for name in request.block_hashes[: first + 1])

    def _between_steps(self, found: Match) -> bool:
        if self._ahead:
            # Of a step that was planned before the load of an earlier one failed, vLLM takes nothing back.
            return True
        if self._settings.load != "auto":
            return self._settings.load == "async"
        return bool(self._admitted) and found.seconds is not None and found.seconds > _SYNC_SECONDS

    def allocated(self, request: Any, block_ids: Sequence[int], tokens: int) -> None:
        """See `update_state_after_alloc`."""
        self._admitted.add(request.request_id)
        tracked = self._requests.get(request.request_id)
        local = 0 if tracked is None else tracked.local // self._block_size
        # Also of who is not kept: saves of others may still read what it writes over.
        self._allocated.update(block_ids[local:])
        if tracked is None:
            return
        ids = self._table(block_ids)
        self.hook.allocated(tracked, ids, tokens)
        if tokens == 0:
            return
        stop = local + tokens // self._block_size
        tracked.promised = tuple(ids[local:stop])
        (self._receiving if tracked.waits else self._sync)[tracked.id] = tracked
        self._arriving |= dict.fromkeys(request.block_hashes[local:stop], tracked.id)

    def _table(self, block_ids: Sequence[int]) -> list[int]:
        null = self.manager.block_pool.null_block.block_id
        return [NO_BLOCK if block == null else block for block in block_ids]

    # ---- one step

    def plan(self, output: Any) -> StepWork:
        """See `build_connector_meta`."""
        written = self._allocated
        if self.hook.copying:
            written = written.union(*(groups[0] for groups in output.scheduled_cached_reqs.new_block_ids if groups))
        self._allocated = set()
        self._admitted -= (output.preempted_req_ids or set()) - output.num_scheduled_tokens.keys()
        self._index += 1
        spans = self._spans(output)
        self._observe(output)
        plan = self.hook.plan(Step(self._index, tuple(spans), frozenset(written)))
        self._moved = self._moved or bool(plan.loads or plan.saves)
        for span in spans:
            tracked = self._requests[span.request.id]
            if tracked.id not in self._sync:
                self._told(tracked)
        return self._work(plan)

    def _told(self, tracked: Tracked) -> None:
        """The hook was told of the request's full blocks, and saves those that it knows no better of."""
        done, tracked.done = tracked.done, self.hook.saved(tracked.id)
        if self.names is not None:
            self.names.learn(tracked, done, store_keys(tracked.chain[done : tracked.done], self._mask))

    def _spans(self, output: Any) -> list[StepSpan]:
        """Of requests that this step makes a block full of, or whose load it needs: all others have nothing to save."""
        void = {block for tracked in self._sync.values() for block in tracked.promised} - {NO_BLOCK}
        spans, size = [], self._block_size
        for request_id, count in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            request = tracked.request
            start = request.num_computed_tokens
            stop = start + count
            if request_id not in self._sync and min(stop, request.num_tokens) // size <= tracked.done:
                continue
            ids = self._table(self.manager.get_block_ids(request_id)[0])
            # What is computed on top of another one's load is as good as that, which is not known yet.
            if request_id in self._sync or void.isdisjoint(ids):
                spans.append(StepSpan(tracked, tuple(ids), start, stop, exact=True))
        return spans

    def _work(self, plan: TransferPlan) -> StepWork:
        if not (plan.loads or self._sync or self._receiving or self._ended):
            return StepWork(plan)
        invalid: set[int] = set()
        receiving: dict[int, str] = {}
        for job, loads in plan.loads.items():
            request_id = self.hook.request_of(job)
            tracked = self._sync.get(request_id) or self._receiving[request_id]
            missing = _missing(tracked, loads)
            if missing:
                invalid |= missing
                self._failed.add(request_id)
            if request_id in self._receiving:
                receiving[job] = request_id
        for request_id, (tokens, _) in self.hook.completed(_NO_RESULTS).loaded.items():
            # Over without a copy: it was late, or what was promised is gone.
            invalid |= self._lost(request_id, tokens)
            if request_id in self._receiving:
                self._end(request_id)
        ended, self._ended = tuple(self._ended), []
        self._reading |= self._sync
        self._sync = {}
        return StepWork(plan, receiving, frozenset(invalid), ended)

    def _end(self, request_id: str) -> None:
        """A load between steps is over without a copy: the next step's workers say so to vLLM, once."""
        if request_id not in self._over:
            self._over.add(request_id)
            self._ended.append(request_id)

    def _lost(self, request_id: str, tokens: int) -> set[int]:
        """What was promised of a load that ended with so many of the request's tokens on the device."""
        tracked = self._sync.get(request_id) or self._receiving.get(request_id)
        if tracked is None:
            return set()
        self._failed.add(request_id)
        return set(tracked.promised[max(0, tokens - tracked.local) // self._block_size :]) - {NO_BLOCK}

    def completed(self, results: Iterable[TransferResults], received: Iterable[str]) -> None:
        """See `update_connector_output`."""
        for one in results:
            self._moved = True
            done = self.hook.completed(one)
            self._failed |= done.failed & self._requests.keys()
        if self.hook.busy:
            self.hook.completed(_NO_RESULTS)
        ended, self._reading = self._reading, {}
        for reading in ended.values():
            self._arrived(reading)
            if reading.id in self._failed:
                self._unname(reading)
        for request_id in received:
            self._over.discard(request_id)
            tracked = self._receiving.pop(request_id, None)
            if tracked is not None:
                self._arrived(tracked)
        self._observed()

    def _arrived(self, tracked: Tracked) -> None:
        for key in [key for key, request_id in self._arriving.items() if request_id == tracked.id]:
            del self._arriving[key]

    def _unname(self, tracked: Tracked) -> None:
        """Take the names off what a step was to load, and off what it computed on top of that.

        vLLM names blocks before they are filled. Where a load has failed it leaves the names to who computes the blocks
        again; were that one aborted or preempted first, or slow, others would find what is not there.
        """
        ids = self.manager.get_block_ids(tracked.id)[0][tracked.local // self._block_size :]
        self.manager.evict_blocks({block for block in self._table(ids) if block != NO_BLOCK})

    def _observe(self, output: Any) -> None:
        """Note when a step of nothing but prefill began."""
        self._prefill = None
        tokens = attended = 0
        if self._sync:
            return
        for request_id, count in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            start = 0 if tracked is None else tracked.request.num_computed_tokens
            if tracked is None or start + count > tracked.request.num_prompt_tokens or count == 1:
                return
            tokens += count
            attended += ((start + count) ** 2 - start**2) // 2
        if tokens:
            self._prefill = (tokens, attended, time.perf_counter())

    def _observed(self) -> None:
        if self._prefill is not None:
            tokens, attended, began = self._prefill
            self._prefill = None
            self.hook.observe_prefill(tokens, time.perf_counter() - began, attended)

    # ---- the end

    def finished(self, request: Any, block_ids: Sequence[int]) -> None:
        """See `request_finished`."""
        request_id = request.request_id
        tracked = self._requests.pop(request_id, None)
        self._admitted.discard(request_id)
        self._failed.discard(request_id)
        reading = self._sync.pop(request_id, None) or self._reading.pop(request_id, None)
        if reading is not None:
            self._arrived(reading)
            if request.status.name in _UNSURE_ENDS:
                # Before anybody knows whether its blocks were filled, or since they were not.
                self._unname(reading)
                tracked = None
        receiving = request_id in self._receiving
        computed = min(request.num_computed_tokens, request.num_tokens)
        if tracked is not None and not receiving and computed // self._block_size > tracked.done:
            self.hook.leave(tracked, self._table(block_ids), computed)
            self._told(tracked)
        writing = self.hook.finished(request_id, "stop")
        if receiving and not writing:
            # vLLM keeps the blocks until a worker says that the load is over.
            self._end(request_id)

    def stats(self) -> KVTierStats | None:
        """What changed in the tiers."""
        moved, self._moved = self._moved, False
        return self.figures.take(moved=moved)

    def sources(self, request_id: str) -> Counter[str]:
        """How many blocks of a load under way each tier had."""
        return Counter(self.hook.found_in(request_id))

    @property
    def pending(self) -> bool:
        """Whether a step without tokens would bring something forward."""
        return bool(self._ended) or self.hook.copying

    def reset(self) -> bool:
        """Forget all that is stored of this model; False: a tier keeps some. What runs goes on, and is not kept."""
        for request_id, tracked in list(self._requests.items()):
            tracked.done = 0
            if tracked.request.num_computed_tokens:
                del self._requests[request_id]
        try:
            self.hook.reset()
        except BlocksRemain as error:
            _log.error("the cache is not reset: %s", error)
            return False
        return True

    def close(self) -> None:
        """Write what is on its way down, and close the tiers. Idempotent."""
        self._server.close()
        self.hook.close()
        self._let_go()

    def _let_go(self) -> None:
        for region in self._staging:
            region.close()
        self.store.close()


def _options(settings: Settings, shards: int) -> ConnectorOptions:
    waits = settings.load == "async" and settings.policy == "recompute"
    return ConnectorOptions(
        shards=shards,
        recompute_gate=settings.tiering.recompute_gate,
        load_seconds=settings.tiering.load_deadline,
        offers="leased" if waits else "verified",
    )


def _missing(tracked: Tracked, loads: Sequence[Load]) -> set[int]:
    return set(tracked.promised) - {load.block_id for load in loads} - {NO_BLOCK}
