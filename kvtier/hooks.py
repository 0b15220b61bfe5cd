"""The hook protocol: all that an engine and a KV connector know of each other.

The scheduler half decides and never touches bytes; the worker half moves bytes and decides nothing.
They speak by the messages below only, so they may live in two processes. One engine step:

    scheduler                                   worker
    swap_out(request, block_ids, tokens)        of requests that lose their blocks
    match(request, device_tokens)               of those that are to get some
    allocated(request, block_ids, tokens)
    prefetch(request)                           of those that must wait
    plan(step) --- TransferPlan ------------->  begin(plan)
                                                wait_layer(i), forward, for every layer
    completed(results) <--- TransferResults ---  end()
    finished(req_id, reason)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from kvtier.hints import RequestHints
from kvtier.layout import Span

__all__ = [
    "NO_BLOCK",
    "Completed",
    "FinishReason",
    "Load",
    "Match",
    "Pending",
    "RequestView",
    "Save",
    "SchedulerHook",
    "Step",
    "StepSpan",
    "TransferPlan",
    "TransferResults",
    "WorkerHook",
]

NO_BLOCK = -1
"""In a block table: a block that nobody reads any more, since it is behind the sliding window. Leading ones only."""

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "preempt"]


class RequestView(Protocol):
    """What the hook may know of a request: its id and its chain keys, which only grow."""

    @property
    def id(self) -> str:
        """Unique among all requests that this engine ever sees."""
        ...

    @property
    def chain(self) -> Sequence[bytes]:
        """Chain keys of the request's full blocks, prompt and output."""
        ...

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        ...

    @property
    def lossy(self) -> bool | None:
        """Whether KV that is not exact may be offered; None: as the store is set."""
        ...

    @property
    def hints(self) -> RequestHints | None:
        """What is known of its blocks' future."""
        ...


class Match(NamedTuple):
    """`tokens` beyond `device_tokens` can be loaded; every block of them is leased for this request.

    They are whole blocks, but for a request that was swapped out: the last one may be as full as it was then.

    seconds: that copying them into the device is expected to take, where nothing but that is left to do; then the step
        that follows may compute the request's next tokens while they are on their way. None: it may not.
    """

    tokens: int
    exact: bool = True
    seconds: float | None = None


class Pending(NamedTuple):
    """The answer is on its way: skip this request for now and ask again."""


class StepSpan(NamedTuple):
    """One request's share of a step.

    block_ids  [b0 b1 b2 b3 ...]                       the whole block table
    tokens     [0 ........ start) [start ...... stop)
                computed before    computed by this step

    In the place of blocks behind the model's window: `NO_BLOCK`.

    windowed_ids: where only some layers have a window, and are a layer group with a pool of its own, the same table in
        that one, with `NO_BLOCK` behind the window; `block_ids` has none then.
    """

    request: RequestView
    block_ids: tuple[int, ...]
    start: int
    stop: int
    exact: bool
    windowed_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine is about to run.

    written: device blocks whose content this step may change. windowed_written: those of the windowed layers' own pool.
    """

    index: int
    spans: tuple[StepSpan, ...]
    written: frozenset[int]
    windowed_written: frozenset[int] = frozenset()


class Load(NamedTuple):
    """Decode a host span into one part of a device block.

    fmt: id of the format that the span's bytes are in. part: group * shards + shard.
    """

    span: Span
    block_id: int
    fmt: str = "raw"
    part: int = 0


class Save(NamedTuple):
    """Copy one part of a device block into staging memory, raw. part: group * shards + shard."""

    block_id: int
    span: Span
    part: int = 0


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Serialisable. Job ids are the scheduler half's; the worker half only echoes them.

    loads, saves: job id -> copies, block by block, with all parts of each block; a worker makes those of its shard.
        Loads start before the step's forward, saves after it.
    fences: save jobs that must have left the device before this step's forward may write.
    evacuations: job id -> copies, as of saves, of blocks that this step or a later one writes over: what they held
        before. They start first, and have left the device before anything else (a copied block, a load, the forward)
        may write.
    overlapped: load jobs whose blocks this very step reads: each layer's bytes are waited for by `wait_layer`, and the
        job is reported by this step's `end`. If it failed, what the step computed from them is void.
    """

    loads: dict[int, tuple[Load, ...]] = field(default_factory=dict)
    saves: dict[int, tuple[Save, ...]] = field(default_factory=dict)
    fences: frozenset[int] = frozenset()
    evacuations: dict[int, tuple[Save, ...]] = field(default_factory=dict)
    overlapped: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TransferResults:
    """Serialisable. One worker's jobs that ended since its last results, and of the failed ones how much was done.

    failed: job id -> number of leading blocks whose parts are all good.
    seconds: job id -> time the copies took, without waiting for their turn.
    shard: the worker's. A job has ended once the workers of all shards have reported it.
    """

    finished: tuple[int, ...] = ()
    failed: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    shard: int = 0


@dataclass(frozen=True, slots=True)
class Completed:
    """What the engine must know after `completed`.

    loaded: request id -> (tokens now good on the device counted from the request's start, exact). A load that
        failed part-way reports what is good; the engine recomputes from there.
    failed: ids among `loaded` that got less than they were promised.
    released: request id of finished requests whose device blocks the connector no longer holds.
    swapped: ids of swapped out requests of which all that could be kept has arrived.
    """

    loaded: dict[str, tuple[int, bool]] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()
    released: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()


class SchedulerHook(Protocol):
    """Scheduler side. Called from one thread; never blocks on I/O, never touches bytes, never raises for a miss.

    Invariants:
        1. Whatever `match` offers is leased for that request until it was loaded, given up or finished.
        2. Unknown request ids are tolerated everywhere.
        3. A failing store shows as fewer tokens, never as an exception or as wrong bytes.
        4. What only a swapped out request may use is found by nobody else, and goes with the request.
    """

    def match(self, request: RequestView, device_tokens: int) -> Match | Pending:
        """How many tokens beyond the device's own prefix hit can be loaded. Repeatable."""
        ...

    def allocated(
        self, request: RequestView, block_ids: Sequence[int], external_tokens: int, windowed_ids: Sequence[int] = ()
    ) -> None:
        """The request got device blocks and takes `external_tokens` of the last match (0: gives it up).

        What `NO_BLOCK` stands for is not to be loaded. `windowed_ids`: see `StepSpan`; left out where there are none.
        """
        ...

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
        """A running request is to lose its blocks and to go on later: keep what they hold of its first tokens.

        Full blocks that anyone may use are kept as always, all else privately. The blocks are the engine's again at
        once: what was not saved before leaves by the evacuations of the next `plan`, which must come with this step.

        Args:
            request: its blocks change no more.
            block_ids: the block table; of a block that this step was to copy into, the one that it was to copy from.
            num_tokens: tokens whose KV the blocks hold.
            exact: see `StepSpan`.
            forced: also where computing it again is expected to be cheaper.
            windowed_ids: see `StepSpan`; left out where there are none.

        Returns:
            True: `Completed.swapped` will name the request; from then on `match` offers what was kept, until the
            request is `allocated` blocks or `finished`. False: nothing was kept, it starts over.
        """
        ...

    def prefetch(self, request: RequestView) -> None:
        """The request waits for blocks: bring its KV closer meanwhile, as far as that delays nobody. Repeatable."""
        ...

    def plan(self, step: Step) -> TransferPlan:
        """Called once per step, also when it is empty: the transfers to start with it.

        A load of a request that is among the spans is one of `TransferPlan.overlapped`, or has failed by the next
        `completed`. What such a span computes is not saved with this step: it may be void.
        """
        ...

    def completed(self, results: TransferResults) -> Completed:
        """Account for what a worker reports. A saved key is visible once all its parts are written."""
        ...

    def observe_prefill(self, tokens: int, seconds: float, attended: int = 0) -> None:
        """A step of nothing but prefill took so long; for the load-or-recompute decision.

        attended: the tokens that each of `tokens` attends to, summed.
        """
        ...

    def finished(self, request_id: str, reason: FinishReason) -> bool:
        """The request ended, in whatever state. True: its device blocks stay until `Completed.released`."""
        ...

    @property
    def busy(self) -> bool:
        """True while loads, saves or look-ups are under way: keep stepping, even with nothing to compute."""
        ...


class WorkerHook(Protocol):
    """Worker side, one per device."""

    def register_pool(self, *pools: Any) -> None:
        """The device pool's storage, per layer group a uint8 tensor [num_blocks, bytes of a part]. Called once."""
        ...

    def begin(self, plan: TransferPlan) -> None:
        """Make the plan's evacuations, wait for its fences, then start its loads. Saves are remembered for `end`.

        An engine may hand over a plan in pieces: evacuations and fences, then loads, before the forward, saves once it
        succeeded.
        Every job that was handed over is reported by some later `end`, also when this raises: a copy that could not
        be started has failed.
        """
        ...

    def wait_layer(self, layer: int) -> None:
        """What the calling thread launches from now on finds the bytes that this step's attention of `layer` reads.

        layer: of the model, counted from 0. To be called in every layer, in order, before the attention.
        """
        ...

    def end(self) -> TransferResults:
        """After the forward: start the plan's saves, report the jobs that ended since the last call.

        Among them all overlapped loads of the step, which it waits for.
        """
        ...
