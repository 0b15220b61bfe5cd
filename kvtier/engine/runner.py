"""Runner: a step plan becomes tensors, a forward pass, sampled tokens. The engine's only room for torch."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from kvtier.engine.choosing import Chooser, Rows
from kvtier.engine.models.base import CausalLM
from kvtier.engine.outputs import Sampled
from kvtier.engine.plan import StepPlan
from kvtier.gpu.attention import make_attention
from kvtier.gpu.graphs import make_decode_graphs
from kvtier.gpu.sparse import SparseAttention, SparseSpan
from kvtier.gpu.storage import DevicePool
from kvtier.hooks import StepSpan, TransferPlan, TransferResults, WorkerHook

__all__ = ["Runner"]

_log = logging.getLogger(__name__)


class Runner:
    """Runs steps on one device.

        begin()      evacuations made, fences waited for, blocks copied, loads started
        compute()    KV computed, tokens sampled
        end()        saves started, ended transfers reported

    Saves reach the worker hook only after what they name was computed: a step that failed saves nothing.

    Args:
        model: the weights.
        pool: the device's KV memory.
        eos_ids: tokens that end an output.
        worker: moves KV between the pool and other tiers, if anything does.
        graphs: replay decode steps as CUDA graphs, where the attention and the model can.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: DevicePool,
        eos_ids: frozenset[int],
        worker: WorkerHook | None = None,
        *,
        graphs: bool = False,
    ) -> None:
        self._model = model
        self._pool = pool
        self._chooser = Chooser(eos_ids)
        self._attention = make_attention(pool, model.config)
        self._attending: Callable[..., torch.Tensor] = self._attention
        self._sparse: SparseAttention | None = None
        if graphs and model.config.routed:
            _log.info("no decode step is replayed as a CUDA graph: the host waits for which experts the tokens chose")
            graphs = False
        self._graphs = make_decode_graphs(model.forward, self._attention, pool) if graphs else None
        self._worker = worker
        self._handed: set[int] = set()  # this step's jobs that the worker was told of, and will report
        if worker is not None:
            for memory in pool.memories:
                memory.touch()
            worker.register_pool(*(memory.as_bytes() for memory in pool.memories))

    def begin(self, plan: StepPlan) -> None:
        """Before the step.

        A copy may write where an evacuation or a fenced save still reads, and may read a block that was given up
        since, and that a load is about to write: hence this order.
        """
        transfers = plan.transfers
        self._handed.clear()
        first = TransferPlan(fences=transfers.fences, evacuations=transfers.evacuations)
        if plan.copies:
            if self._worker is not None and (first.fences or first.evacuations):
                self._hand(self._worker, first)
                first = TransferPlan()
            with torch.inference_mode():
                self._pool.copy_blocks(plan.copies)
        if self._worker is not None:
            self._hand(self._worker, replace(first, loads=transfers.loads, overlapped=transfers.overlapped))

    def _hand(self, worker: WorkerHook, plan: TransferPlan) -> None:
        self._handed.update(plan.loads, plan.saves, plan.evacuations)
        worker.begin(plan)

    def compute(self, plan: StepPlan) -> list[Sampled]:
        """The step; returns what was sampled for each of `plan.samples`, or why nothing was."""
        spans = self._pool.with_rows(plan.step.spans)
        if not spans:
            return []
        with torch.inference_mode():
            lengths = np.fromiter((span.stop - span.start for span in spans), np.int64, len(spans))
            ends = np.cumsum(lengths)
            pieces = (request.inputs(span.start, span.stop) for request, span in zip(plan.requests, spans, strict=True))
            tokens = np.fromiter(chain.from_iterable(pieces), np.int64, ends[-1])
            positions = np.fromiter(
                chain.from_iterable(range(span.start, span.stop) for span in spans), np.int64, ends[-1]
            )
            rows = Rows.of(plan)
            wanted = np.array(rows.indices(), np.int64)
            logits = None
            lone = np.array_equal(wanted, np.arange(ends[-1]))  # a token of each sequence, and one sampled after it
            sparse = any(request.params.sparse is not None for request in plan.requests)
            if self._graphs is not None and lone and not plan.transfers.overlapped and not sparse:
                logits = self._graphs.run(spans, tokens)
            if logits is None:
                self._plan_attention(plan, spans, sparse=sparse)
                logits = self._model.forward(
                    self._tensor(tokens), self._tensor(positions), self._attend, self._tensor(wanted)
                )
            return self._chooser.choose(rows, logits)

    def end(self, transfers: TransferPlan, spoiled: Collection[int] = ()) -> TransferResults:
        """After the step. What holds one of the blocks `spoiled` is not saved: its save has failed."""
        if self._worker is None:
            return TransferResults()
        saves = transfers.saves
        if spoiled:
            saves = {job: copies for job, copies in saves.items() if not any(one.block_id in spoiled for one in copies)}
        if saves:
            self._hand(self._worker, TransferPlan(saves=saves))
        return self.cancel(transfers) if spoiled else self._worker.end()

    def cancel(self, transfers: TransferPlan) -> TransferResults:
        """Instead of `end`, after a step that failed: what the worker was not told of has failed, too."""
        ended = TransferResults() if self._worker is None else self._worker.end()
        jobs = (*transfers.loads, *transfers.saves, *transfers.evacuations)
        unheard = {job: 0 for job in jobs if job not in self._handed}
        return TransferResults(ended.finished, ended.failed | unheard, ended.seconds)

    def _attend(self, layer: int, q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        if self._worker is not None:
            self._worker.wait_layer(layer)
        return self._attending(layer, q, *kv)

    def _plan_attention(self, plan: StepPlan, spans: Sequence[StepSpan], *, sparse: bool) -> None:
        if not sparse:
            self._attention.plan(spans)
            self._attending = self._attention
            return
        asked = [SparseSpan(request.id, request.params.sparse, request.prompt_len) for request in plan.requests]
        attention = self.allow_sparse()
        attention.plan(spans, asked)
        self._attending = attention

    def allow_sparse(self) -> SparseAttention:
        """Sparse attention, made when it is first asked for.

        Raises:
            FormatMismatch: the model cannot have it.
        """
        if self._sparse is None:
            config = self._model.config
            self._sparse = SparseAttention(self._attention, self._pool, config.heads, config.windows)
        return self._sparse

    def fork(self, parent_id: str, child_id: str) -> None:
        """A sequence goes on from another one's KV: it begins with what is known of that one's attention."""
        if self._sparse is not None:
            self._sparse.fork(parent_id, child_id)

    def forget(self, request_id: str) -> None:
        """A sequence has ended. Unknown ids are tolerated."""
        if self._sparse is not None:
            self._sparse.forget(request_id)

    def _tensor(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._model.device)
