"""Books: which requests there are, where each of them stands, what was counted. The scheduler's phases share them."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from kvtier.engine.latency import LoadModel, StepModel
from kvtier.engine.orders import Order
from kvtier.engine.request import Request
from kvtier.engine.rules import SchedulingRules
from kvtier.gpu.pool import BlockPool, PoolListener
from kvtier.gpu.table import BlockTable
from kvtier.hooks import FinishReason, SchedulerHook

__all__ = ["Books", "Counters", "Loading", "WaitingQueue"]

by_rank = attrgetter("rank")

# A longer queue is not ranked anew in every step: those that came last keep the rank that they came with.
_RANKED = 256


@dataclass(slots=True)
class Counters:
    """What happened so far, in tokens unless it says otherwise. Slots: room for a token, held for one step.

    Args:
        steps: steps with something to compute.
        preemptions: times that a running request lost its blocks.
        swaps: those times that they were kept in other tiers.
        device_hits: found in device memory.
        loaded: loaded through the hook.
        computed: computed.
        slots_held: slots in the tables of loading and running requests.
        slots_reached: those in blocks that hold a token.
        slots_used: those that hold a token.
    """

    steps: int = 0
    preemptions: int = 0
    swaps: int = 0
    device_hits: int = 0
    loaded: int = 0
    computed: int = 0
    slots_held: int = 0
    slots_reached: int = 0
    slots_used: int = 0


class Loading(NamedTuple):
    """A request whose tokens up to `stop` are on their way, and since when."""

    request: Request
    stop: int
    since: float


class WaitingQueue:
    """Requests without device blocks, in their order: new ones, and those that lost theirs.

    Args:
        order: who comes first.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.rank = self._order.rank(request)
        insort(self._requests, request, key=by_rank)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        self._requests.remove(request)

    def head(self, count: int) -> Sequence[Request]:
        """The first ones, by what is known now, without beams that want no blocks yet: there may be any number."""
        if self._order.drifts:
            for request in self._requests[:_RANKED]:
                request.rank = self._order.rank(request)
            self._requests.sort(key=by_rank)
        return list(islice((request for request in self._requests if not request.settled), count))


@dataclass(slots=True)
class Books:
    """What the phases of a step read and write.

    Args:
        pool: the device's blocks.
        rules: who comes first, who gives way.
        max_running: requests that hold device blocks at a time.
        hook: where KV beyond device memory comes from and goes to, if anywhere.
        clock: seconds.
        order: of all requests.
        steps, loads: what steps and loads cost so far.
        waiting, running, loading: requests by what they do; running ones in their order.
        held: tables of ended requests that the hook still needs.
        step: index of the step that is planned.
    """

    pool: BlockPool
    rules: SchedulingRules
    max_running: int
    hook: SchedulerHook | None
    clock: Callable[[], float]
    order: Order
    steps: StepModel
    loads: LoadModel
    waiting: WaitingQueue
    running: list[Request] = field(default_factory=list)
    loading: dict[str, Loading] = field(default_factory=dict)
    held: dict[str, deque[BlockTable]] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    step: int = 0

    @property
    def num_active(self) -> int:
        """Requests that hold device blocks."""
        return len(self.running) + len(self.loading)

    @property
    def num_moving(self) -> int:
        """Active requests that go on by themselves; the others pause until somebody else has come as far."""
        return sum(request.ahead > 0 for request in self.running) + len(self.loading)

    def run(self, request: Request) -> None:
        """The request computes from now on."""
        insort(self.running, request, key=by_rank)

    def publish(self, request: Request) -> None:
        """Name the request's full blocks, so that others find them."""
        ids, chain = request.blocks.ids, request.chain
        full = min(request.num_computed // self.pool.block_size, len(chain))
        span = range(max(request.published, request.blocks.gone), full)
        fresh = [at for at in span if self.pool.publish(ids[at], chain[at], request.exact)]
        request.published = full
        if fresh and self.pool.listener is not None:
            _tell(self.pool.listener, fresh, request, self.pool.block_size)

    def give_back(self, request_id: str, table: BlockTable | None, reason: FinishReason) -> None:
        """A request is through with its blocks: they are freed, or left to the hook until it needs them no more."""
        held = self.hook is not None and self.hook.finished(request_id, reason)
        if table is None:
            return
        if held:
            self.held.setdefault(request_id, deque()).append(table)
        else:
            table.release()

    def let_go(self, request_id: str) -> None:
        """The hook needs the blocks of an ended request no more."""
        tables = self.held.get(request_id)
        if tables:
            tables.popleft().release()
            if not tables:
                del self.held[request_id]


def _tell(listener: PoolListener, fresh: Sequence[int], request: Request, size: int) -> None:
    """Say which blocks of a request, by their places, have names now: run by run."""
    chain, tokens = request.chain, request.tokens
    starts = [at for at, place in enumerate(fresh) if not at or fresh[at - 1] != place - 1]
    for first, last in zip(starts, [*starts[1:], len(fresh)], strict=True):
        start, stop = fresh[first], fresh[last - 1] + 1
        parent = chain[start - 1] if start else None
        listener.named(chain[start:stop], parent, tokens[start * size : stop * size], request.params.cache_salt)
