"""Worker half: moves bytes between the device pools and host regions, as the plan says. Decides nothing."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from kvtier import formats
from kvtier.cpu import AttachedRegion
from kvtier.errors import FormatMismatch, KVTierError, LeaseError, TierUnavailable
from kvtier.gpu import BlockMove, CopyEngine, CopyTicket, Direction
from kvtier.hooks import Load, Save, TransferPlan, TransferResults
from kvtier.layout import Layout, Span

if TYPE_CHECKING:
    import torch

    from kvtier.gpu.copies import Decode

__all__ = ["TierWorker"]

_log = logging.getLogger(__name__)


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


class TierWorker:
    """Implements `kvtier.hooks.WorkerHook` over mapped regions: the host pool's read-only, the staging one writable.

    Args:
        regions: region id -> mapping, of all regions that plans will name.
        layout: of the blocks; without it they are raw and of one group and shard.
        shard: which part of each group this worker holds.
    """

    def __init__(self, regions: Mapping[int, AttachedRegion], layout: Layout | None = None, shard: int = 0) -> None:
        self._regions = dict(regions)
        self._layout = layout
        self._groups, self._shards = (1, 1) if layout is None else (len(layout.groups), layout.shards)
        if not 0 <= shard < self._shards:
            raise FormatMismatch(f"shard {shard}: the layout has shards 0..{self._shards - 1}")
        self._shard = shard
        self._engines: tuple[CopyEngine, ...] = ()
        self._jobs: dict[int, _Job] = {}
        self._saves: dict[int, tuple[Save, ...]] = {}
        self._decoder = cache(self._make_decoder)

    def register_pool(self, *pools: "torch.Tensor") -> None:
        """See `WorkerHook.register_pool`: uint8 [num_blocks, bytes of a part], one per layer group."""
        if self._engines:
            raise LeaseError("a device pool is registered already; one worker serves one device")
        if len(pools) != self._groups:
            raise FormatMismatch(f"{len(pools)} device pools: expected one for each of {self._groups} layer groups")
        self._engines = tuple(map(CopyEngine, pools))

    def begin(self, plan: TransferPlan) -> None:
        """See `WorkerHook.begin`."""
        # On record before the first is started: whatever happens, `end` reports them all.
        self._saves.update(plan.saves)
        self._jobs.update((number, _Job(self._groups)) for number in (*plan.evacuations, *plan.loads))
        for number, copies in plan.evacuations.items():
            self._start(number, copies, Direction.TO_HOST)
        # This thread waits, on CUDA too: a lane records the event of a copy only once its own thread has got to it, so
        # that there is none yet for the streams that will write (the forward's, and that of the loads) to wait for.
        for number in (plan.fences | plan.evacuations.keys()) & self._jobs.keys():
            for ticket in self._jobs[number].tickets:
                ticket.wait()
        for number, loads in plan.loads.items():
            self._start(number, loads, Direction.TO_DEVICE)

    def wait_layer(self, layer: int) -> None:
        """See `WorkerHook.wait_layer`. A request computes only once its load was reported: nothing is under way."""

    def end(self) -> TransferResults:
        """See `WorkerHook.end`."""
        saves, self._saves = self._saves, {}
        self._jobs.update((number, _Job(self._groups)) for number in saves)
        for number, copies in saves.items():
            self._start(number, copies, Direction.TO_HOST)
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
            if not self._engines:
                raise LeaseError("no device pool is registered; call register_pool before the first step")
            batches = [self._moves(copies, group) for group in range(self._groups)]
            for engine, moves in zip(self._engines, batches, strict=True):
                self._jobs[number].tickets.append(engine.submit(moves, direction))
        except KVTierError as error:
            _log.error("%d copies %s could not be started: %s", len(copies), direction.value, error)

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
        self._regions.clear()
