"""Worker side: vLLM's calls of one step become those of kvtier's worker half.

handle_preemptions    what must have left the device before this step writes
start_load_kv         loads; those that the step reads are waited for
wait_for_save         saves
get_finished          what has ended
"""

import math
from typing import Any

import torch

from kvtier.connector import TierWorker
from kvtier.connector.sharing import attach
from kvtier.errors import ConfigError
from kvtier.gpu.pages import Pages
from kvtier.hooks import Load, TransferPlan, TransferResults
from kvtier.layout import Layout
from kvtier_vllm.messages import StepReport, StepWork

__all__ = ["WorkerSide", "pages_of"]


class WorkerSide:
    """One worker's.

    Args:
        name: under which the scheduler's side gives its regions.
        pages: where the device pool's blocks lie.
        layout: of blocks.
        shard: which part of every block this worker holds.
    """

    def __init__(self, name: str, pages: Pages, layout: Layout, shard: int) -> None:
        self._name = name
        self._pages = pages
        self._layout = layout
        self._shard = shard
        # On a CPU a copy in the background takes from the next step what it would take from this one, and its
        # result would come a step later.
        self._waits_for_saves = pages.device.type == "cpu"
        self._worker: TierWorker | None = None
        self._loads: dict[int, tuple[Load, ...]] = {}
        self._receiving: dict[int, str] = {}
        self._open = 0
        self._results: list[TransferResults] = []
        self._invalid: set[int] = set()
        self._received: set[str] = set()

    def _attached(self) -> TierWorker:
        # Not at start: the scheduler's side, which has the memory, is made after the workers.
        if self._worker is None:
            self._worker = TierWorker(attach(self._name), self._layout, self._shard)
            self._worker.register_pool(self._pages)
        return self._worker

    def before(self, work: StepWork) -> None:
        """Evacuate, and wait for fences."""
        plan = work.plan
        if plan.evacuations or plan.fences:
            self._open += len(plan.evacuations)
            self._attached().begin(TransferPlan(evacuations=plan.evacuations, fences=plan.fences))

    def load(self, work: StepWork) -> None:
        """Start the loads; what the forward reads has arrived, or arrives before it, when this returns."""
        self._invalid |= work.invalid
        self._received |= set(work.ended)
        plan = work.plan
        if not plan.loads:
            return
        self._loads |= plan.loads
        self._receiving |= work.receiving
        self._open += len(plan.loads)
        worker = self._attached()
        worker.begin(TransferPlan(loads=plan.loads, overlapped=plan.overlapped))
        worker.wait_layer(0)

    def save(self, work: StepWork) -> None:
        """Start the saves."""
        plan = work.plan
        if plan.saves:
            worker = self._attached()
            self._open += len(plan.saves)
            worker.begin(TransferPlan(saves=plan.saves))
            self._take(worker.end())
            if self._waits_for_saves:
                worker.begin(TransferPlan(fences=frozenset(plan.saves)))

    def poll(self) -> set[str]:
        """See what has ended; the requests that wait for it no more."""
        if self._open:
            self._take(self._attached().end())
        received, self._received = self._received, set()
        return received

    def _take(self, results: TransferResults) -> None:
        jobs = (*results.finished, *results.failed)
        if not jobs:
            return
        self._open -= len(jobs)
        self._results.append(results)
        for job in jobs:
            loads = self._loads.pop(job, ())
            if job in results.failed:
                part = {load.block_id: None for load in loads}
                self._invalid |= set(list(part)[results.failed[job] :])
            request = self._receiving.pop(job, None)
            if request is not None:
                self._received.add(request)

    def take_invalid(self) -> set[int]:
        """Device blocks that did not get what was promised, since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> StepReport | None:
        """What ended since the last call, for the scheduler's side."""
        results, self._results = self._results, []
        return StepReport(tuple(results)) if results else None

    def close(self) -> None:
        """Finish the copies. Idempotent."""
        if self._worker is not None:
            self._worker.close()


def pages_of(tensors: list[torch.Tensor], num_blocks: int) -> Pages:
    """The bytes of each block in the tensors of all layers, in their order.

    Args:
        tensors: [num_blocks * k, ...], one per layer: where a kernel's blocks are smaller, k of them make one.
        num_blocks: as the scheduler counts them.

    Raises:
        ConfigError: a block of some layer is not in one piece.
    """
    return Pages.of([_rows(tensor, num_blocks) for tensor in tensors])


def _rows(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    whole, odd = divmod(tensor.shape[0], num_blocks)
    inside = tensor[:whole]
    # Dense in whatever order of its axes.
    reach = 1 + sum((size - 1) * step for size, step in zip(inside.shape, inside.stride(), strict=True) if size > 1)
    if odd or not whole or reach != math.prod(inside.shape):
        raise ConfigError(
            f"KV cache tensor {list(tensor.shape)}, strides {tensor.stride()}, for {num_blocks} blocks: expected each "
            "block in one piece; use another attention backend or KV cache layout"
        )
    size = tensor.element_size()
    shape, strides = (num_blocks, reach * size), (tensor.stride(0) * whole * size, 1)
    empty: Any = torch.empty(0, dtype=torch.int8, device=tensor.device)
    view: torch.Tensor = empty.set_(tensor.untyped_storage(), tensor.storage_offset() * size, shape, strides)
    return view
