"""One scheduler half over real tiers, whose worker's copies are done by hand; and tiers that dawdle."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from patience import until

from kvtier.connector import TierScheduler
from kvtier.cpu import HostTier
from kvtier.hints import RequestHints
from kvtier.hooks import Completed, Match, Pending, Step, StepSpan, TransferPlan, TransferResults
from kvtier.keys import Chain, Namespace, store_keys
from kvtier.store import TieredStore
from kvtier.tiers import Handle, Owner, Ticket

SIZE, BLOCK_BYTES = 4, 4096
NAMESPACE = Namespace("model", b"layout")


@dataclass
class Request:
    """A `RequestView`."""

    id: str
    tokens: list[int]
    lossy: bool | None = None
    hints: RequestHints | None = None
    chain: Sequence[bytes] = field(init=False)

    def __post_init__(self) -> None:
        chain = Chain(SIZE)
        chain.extend(self.tokens)
        self.chain = chain.keys

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class SlowTier(HostTier):
    """A tier in memory that reads at most `rate` bytes a second."""

    def __init__(self, capacity: int, rate: float = float("inf")) -> None:
        super().__init__(capacity, name="slow")
        self.rate = rate
        self.reads = 0

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        self.reads += 1
        time.sleep(sum(handle.nbytes for handle, _ in items) / self.rate)
        return super().read(items, deadline)


class HangingTier(HostTier):
    """A tier in memory whose verb `hangs` does not return until `released` is set."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, name="hanging")
        self.hangs = ""
        self.released = threading.Event()

    def _pass(self, verb: str) -> None:
        if self.hangs == verb:
            assert self.released.wait(30)

    def acquire(
        self, keys: Sequence[bytes], owner: Owner, deadline: float | None = None, *, exact: bool = False
    ) -> Ticket:
        self._pass("acquire")
        return super().acquire(keys, owner, deadline, exact=exact)

    def read(self, items: Sequence[tuple[Handle, memoryview]], deadline: float | None = None) -> Ticket:
        self._pass("read")
        return super().read(items, deadline)


def step(half: TierScheduler, *spans: StepSpan, written: Sequence[int] = ()) -> TransferPlan:
    return half.plan(Step(0, spans, frozenset(written)))


def finish(half: TierScheduler, plan: TransferPlan, seconds: float = 0.0) -> Completed:
    jobs = (*plan.loads, *plan.saves, *plan.evacuations)
    return half.completed(TransferResults(finished=jobs, seconds=dict.fromkeys(jobs, seconds)))


def answer(half: TierScheduler, request: Request, device_tokens: int = 0) -> Match:
    found: list[Match | Pending] = []
    until(lambda: not isinstance(found.append(half.match(request, device_tokens)) or found[-1], Pending))
    assert isinstance(found[-1], Match)
    return found[-1]


def save(half: TierScheduler, store: TieredStore, request: Request, blocks: Sequence[int]) -> None:
    """All full blocks of a request, down to the lowest tier; the request ends."""
    finish(half, step(half, StepSpan(request, tuple(blocks), 0, request.num_tokens, exact=True), written=blocks))
    store.flush()
    half.completed(TransferResults())
    half.finished(request.id, "stop")


def load(half: TierScheduler, request: Request, tokens: int) -> dict[str, tuple[int, bool]]:
    """Take an offer and see it through; what was loaded."""
    blocks = -(-request.num_tokens // SIZE)
    half.allocated(request, range(100, 100 + blocks), tokens)
    done: list[Completed] = []
    until(lambda: done.append(finish(half, step(half))) or request.id in done[-1].loaded)
    return done[-1].loaded


def store_run(store: TieredStore, request: Request) -> tuple[str, ...]:
    return store.match(store_keys(request.chain, NAMESPACE.mask())).tiers


def settle(half: TierScheduler) -> None:
    until(lambda: (finish(half, step(half)), not half.busy)[-1])


def holds_nothing(store: TieredStore) -> bool:
    stats = store.stats()
    return not any(stats[tier.name][what] for tier in store.tiers for what in ("leases", "reservations"))
