"""Worker half: moves bytes between the device pool and host regions, as the plan says. Decides nothing."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.cpu import AttachedRegion
from kvtier.errors import LeaseError
from kvtier.gpu import CopyEngine, CopyTicket, Direction
from kvtier.hooks import Load, Save, TransferPlan, TransferResults

if TYPE_CHECKING:
    import torch

__all__ = ["TierWorker"]


@dataclass(frozen=True, slots=True)
class _Job:
    ticket: CopyTicket
    started: float


class TierWorker:
    """Implements `kvtier.hooks.WorkerHook` over mapped regions: the host pool's read-only, the staging one writable.

    Args:
        regions: region id -> mapping, of all regions that plans will name.
    """

    def __init__(self, regions: Mapping[int, AttachedRegion]) -> None:
        self._regions = dict(regions)
        self._engine: CopyEngine | None = None
        self._jobs: dict[int, _Job] = {}
        self._saves: dict[int, tuple[Save, ...]] = {}

    def register_pool(self, pool: "torch.Tensor") -> None:
        """See `WorkerHook.register_pool`: uint8 [num_blocks, block_bytes]."""
        if self._engine is not None:
            raise LeaseError("a device pool is registered already; one worker serves one pool")
        self._engine = CopyEngine(pool)

    def begin(self, plan: TransferPlan) -> None:
        """See `WorkerHook.begin`."""
        for number in plan.fences & self._jobs.keys():
            self._jobs[number].ticket.wait()
        for number, loads in plan.loads.items():
            self._start(number, loads, Direction.TO_DEVICE)
        self._saves.update(plan.saves)

    def wait_layer(self, layer: int) -> None:
        """See `WorkerHook.wait_layer`. A request computes only once its load was reported: nothing is under way."""

    def end(self) -> TransferResults:
        """See `WorkerHook.end`."""
        saves, self._saves = self._saves, {}
        for number, copies in saves.items():
            self._start(number, copies, Direction.TO_HOST)
        ended = {number: job for number, job in self._jobs.items() if job.ticket.done}
        now = time.perf_counter()
        good, failed = [], {}
        for number, job in ended.items():
            del self._jobs[number]
            if job.ticket.good == job.ticket.total:
                good.append(number)
            else:
                failed[number] = job.ticket.good
        return TransferResults(tuple(good), failed, {number: now - job.started for number, job in ended.items()})

    def _start(self, number: int, copies: Sequence[Load] | Sequence[Save], direction: Direction) -> None:
        if self._engine is None:
            raise LeaseError("no device pool is registered; call register_pool before the first step")
        pairs = [(copy.block_id, self._regions[copy.span.region].view(copy.span)) for copy in copies]
        self._jobs[number] = _Job(self._engine.submit(pairs, direction), time.perf_counter())

    def close(self) -> None:
        """Finish the copies under way and let go of the device pool. Idempotent."""
        if self._engine is not None:
            self._engine.close()
        self._regions.clear()
