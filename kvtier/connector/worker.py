"""Worker half: moves bytes between the device pools and host regions, as the plan says. Decides nothing."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from kvtier import formats
from kvtier.cpu import AttachedRegion
from kvtier.errors import FormatMismatch, KVTierError, LeaseError, TierUnavailable
from kvtier.gpu import BlockMove, CopyEngine, CopyTicket, Direction
from kvtier.gpu.streams import make_streams
from kvtier.hooks import Load, Save, TransferPlan, TransferResults
from kvtier.layout import LayerGroup, Layout, Span

if TYPE_CHECKING:
    import torch

    from kvtier.gpu.copies import Decode, LayerGate
    from kvtier.gpu.pages import Pages
    from kvtier.gpu.streams import Streams

__all__ = ["TierWorker"]

_log = logging.getLogger(__name__)

_BY_LAYER = "lphtd"  # the axis order in which a layer of a block is one run of bytes


@dataclass(slots=True)
class _Job:
    """One job's copies of this shard, a batch per layer group. Batches that are missing could not be started."""

    batches: int
    tickets: list[CopyTicket] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self.tickets)

    @property
    def complete(self) -> bool:
        return len(self.tickets) == self.batches and all(ticket.good == ticket.total for ticket in self.tickets)

    @property
    def good(self) -> int:
        """Leading blocks whose parts of this shard are all good."""
        return min(ticket.good for ticket in self.tickets) if len(self.tickets) == self.batches else 0

    @property
    def seconds(self) -> float:
        return max((ticket.seconds for ticket in self.tickets), default=0.0)


class _Slices:
    """Where a layer lies in the blocks of one group: in one of equal slices; in an unknown order, anywhere."""

    def __init__(self, group: LayerGroup | None = None) -> None:
        self.count = 1
        self._index: dict[int, int] | None = None
        if group is not None and group.order == _BY_LAYER:
            self.count = len(group.layers)
            self._index = {layer: at for at, layer in enumerate(group.layers)}

    def index(self, layer: int) -> int | None:
        """The slice that a layer reads; None: none of this group."""
        return 0 if self._index is None else self._index.get(layer)


class TierWorker:
    """Implements `kvtier.hooks.WorkerHook` over mapped regions: the host pool's read-only, the staging one writable.

    Overlapped loads of a step are copied together, layer by layer where the layout says where a layer lies in a block.
    On CUDA the regions are pinned for as long as a pool is registered.

    Args:
        regions: region id -> mapping, of all regions that plans will name.
        layout: of the blocks; without it they are raw and of one group and shard.
        shard: which part of each group this worker holds.
        streams: makes the streams of the pools' device.
    """

    def __init__(
        self,
        regions: Mapping[int, AttachedRegion],
        layout: Layout | None = None,
        shard: int = 0,
        streams: "Callable[[torch.device], Streams]" = make_streams,
    ) -> None:
        self._regions = dict(regions)
        self._layout = layout
        self._groups, self._shards = (1, 1) if layout is None else (len(layout.groups), layout.shards)
        if not 0 <= shard < self._shards:
            raise FormatMismatch(f"shard {shard}: the layout has shards 0..{self._shards - 1}")
        self._shard = shard
        self._slices = (_Slices(),) if layout is None else tuple(map(_Slices, layout.groups))
        self._make_streams = streams
        self._streams: Streams | None = None
        self._pinned: list[memoryview] = []
        self._engines: tuple[CopyEngine, ...] = ()
        self._jobs: dict[int, _Job] = {}
        self._saves: dict[int, tuple[Save, ...]] = {}
        self._overlapped: set[int] = set()  # of this step
        self._gates: list[tuple[_Slices, LayerGate]] = []  # of this step
        self._decoder = cache(self._make_decoder)

    def register_pool(self, *pools: "torch.Tensor | Pages") -> None:
        """See `WorkerHook.register_pool`: uint8 [num_blocks, bytes of a part], or their pages, one per layer group."""
        if self._engines:
            raise LeaseError("a device pool is registered already; one worker serves one device")
        if len(pools) != self._groups:
            raise FormatMismatch(f"{len(pools)} device pools: expected one for each of {self._groups} layer groups")
        streams = self._make_streams(pools[0].device)
        self._engines = tuple(CopyEngine(pool, streams) for pool in pools)
        self._streams = streams
        whole = [region.view(Span(number, 0, region.nbytes)) for number, region in self._regions.items()]
        self._pinned = [memory for memory in whole if streams.pin(memory)]

    @property
    def unpinned_regions(self) -> int:
        """Regions that the device cannot reach by itself: copies from and to them are slower."""
        return len(self._regions) - len(self._pinned) if self._engines else 0

    def begin(self, plan: TransferPlan) -> None:
        """See `WorkerHook.begin`."""
        # On record before the first is started: whatever happens, `end` reports them all.
        self._saves.update(plan.saves)
        self._jobs.update((number, _Job(self._groups)) for number in (*plan.evacuations, *plan.loads))
        overlapped = {number: loads for number, loads in plan.loads.items() if number in plan.overlapped}
        self._overlapped |= overlapped.keys()
        for number, copies in plan.evacuations.items():
            self._start(number, copies, Direction.TO_HOST)
        # This thread waits, on CUDA too: a lane records the event of a copy only once its own thread has got to it, so
        # that there is none yet for the streams that will write (the forward's, and that of the loads) to wait for.
        for number in (plan.fences | plan.evacuations.keys()) & self._jobs.keys():
            for ticket in self._jobs[number].tickets:
                ticket.wait()
        # First what the step is about to wait for.
        self._start_layers(overlapped)
        for number, loads in plan.loads.items():
            if number not in overlapped:
                self._start(number, loads, Direction.TO_DEVICE)

    def wait_layer(self, layer: int) -> None:
        """See `WorkerHook.wait_layer`. Of other loads a request reads the blocks only once they were reported."""
        for slices, gate in self._gates:
            at = slices.index(layer)
            if at is not None:
                gate.wait(at)

    def end(self) -> TransferResults:
        """See `WorkerHook.end`."""
        saves, self._saves = self._saves, {}
        self._jobs.update((number, _Job(self._groups)) for number in saves)
        for number, copies in saves.items():
            self._start(number, copies, Direction.TO_HOST)
        for number in self._overlapped:
            for ticket in self._jobs[number].tickets:
                ticket.wait()
        self._overlapped.clear()
        self._gates.clear()
        ended = {number: job for number, job in self._jobs.items() if job.done}
        for number in ended:
            del self._jobs[number]
        return TransferResults(
            finished=tuple(number for number, job in ended.items() if job.complete),
            failed={number: job.good for number, job in ended.items() if not job.complete},
            seconds={number: job.seconds for number, job in ended.items()},
            shard=self._shard,
        )

    def _start(self, number: int, copies: Sequence[Load] | Sequence[Save], direction: Direction) -> None:
        try:
            for engine, moves in zip(self._engines, self._batches(copies), strict=True):
                self._jobs[number].tickets.append(engine.submit(moves, direction))
        except KVTierError as error:
            _not_started(copies, direction, error)

    def _start_layers(self, jobs: Mapping[int, Sequence[Load]]) -> None:
        """Loads that the forward follows layer by layer: of all jobs together, a batch per layer group."""
        batches = {}
        for number, loads in jobs.items():
            try:
                batches[number] = self._batches(loads)
            except KVTierError as error:
                _not_started(loads, Direction.TO_DEVICE, error)
        for group, engine in enumerate(self._engines if batches else ()):
            slices = self._slices[group]
            try:
                tickets, gate = engine.submit_layers([batch[group] for batch in batches.values()], slices.count)
            except KVTierError as error:
                _not_started([load for loads in jobs.values() for load in loads], Direction.TO_DEVICE, error)
                continue
            self._gates.append((slices, gate))
            for number, ticket in zip(batches, tickets, strict=True):
                self._jobs[number].tickets.append(ticket)

    def _batches(self, copies: Sequence[Load] | Sequence[Save]) -> list[list[BlockMove]]:
        """This shard's copies, by layer group."""
        if not self._engines:
            raise LeaseError("no device pool is registered; call register_pool before the first step")
        return [self._moves(copies, group) for group in range(self._groups)]

    def _moves(self, copies: Sequence[Load] | Sequence[Save], group: int) -> list[BlockMove]:
        part = group * self._shards + self._shard
        return [self._move(copy, group) for copy in copies if copy.part == part]

    def _move(self, copy: Load | Save, group: int) -> BlockMove:
        fmt = copy.fmt if isinstance(copy, Load) else "raw"
        return BlockMove(copy.block_id, self._view(copy.span), self._decoder(fmt, group))

    def _view(self, span: Span) -> memoryview:
        region = self._regions.get(span.region)
        if region is None:
            raise TierUnavailable(f"{span}: this worker maps regions {sorted(self._regions)}; attach again")
        return region.view(span)

    def _make_decoder(self, fmt: str, group: int) -> "Decode | None":
        if fmt == "raw":
            return None
        layout = self._layout
        if layout is None:
            raise FormatMismatch(
                f"a block in format {fmt!r}: this worker knows no layout to decode it with; give it one"
            )
        decode = formats.get(fmt).decode
        return lambda source, target: decode(source, layout, target, group)

    def close(self) -> None:
        """Finish the copies under way and let go of the device pools. Idempotent."""
        for engine in self._engines:
            engine.close()
        if self._streams is not None:
            for memory in self._pinned:
                self._streams.unpin(memory)
        self._pinned.clear()
        self._regions.clear()


def _not_started(copies: Sequence[Load] | Sequence[Save], direction: Direction, error: KVTierError) -> None:
    _log.error("%d copies %s could not be started: %s", len(copies), direction.value, error)
