"""DecodeGraphs: a decode step captured once per size as a CUDA graph, replayed with new inputs.

A step of a small model takes the host longer to launch than the device to run: a replay is one launch. A graph's
shapes and addresses are fixed, hence buckets:

    batch      8 rows hold 5 sequences, three rows are padding: they read one token and write nowhere
    context    tables for 4096 tokens hold sequences of up to that, and decide how far each is split over programs

All graphs leave their logits in one place: of a large vocabulary, those of a hundred rows take as much as many blocks.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.errors import CapacityError
from kvtier.gpu.batches import AttentionSpan
from kvtier.gpu.storage import DevicePool

__all__ = [
    "BATCHES",
    "Capture",
    "Captured",
    "DecodeBuffers",
    "DecodeGraphs",
    "Forward",
    "StaticAttention",
    "capture_on_cuda",
    "make_decode_graphs",
]

_log = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Rows of the graphs."""

_CONTEXT_STEP = 4


class DecodeBuffers:
    """A decode step's inputs, at addresses that never change.

    Attributes:
        tokens: int64 [B].
        positions: int64 [B].
        slots: int64 [B], where the new token's KV goes: block id times block size plus place in the block; negative in
            rows of padding, whose KV goes nowhere.
        lengths: int32 [B], tokens of each sequence, the new one included; 1 in rows of padding.
        tables: int32 [B, N], block ids in token order.
        rows: int64 [B], 0, 1, ...: each is its own sequence and has a token sampled after it.

    Args:
        batch: B.
        blocks: N.
        device: of the tensors.
    """

    def __init__(self, batch: int, blocks: int, device: torch.device) -> None:
        nbytes = batch * (3 * 8 + (1 + blocks) * 4)
        # One copy brings all of them.
        self._device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._host = torch.zeros(nbytes, dtype=torch.uint8)
        (self.tokens, self.positions, self.slots), self.lengths, self.tables = _parts(self._device, batch)
        self.rows = torch.arange(batch, device=device)

    def fill(self, spans: Sequence[AttentionSpan], tokens: Sequence[int] | NDArray[np.int64], block_size: int) -> None:
        """Write a step's sequences into the first rows, padding into the others."""
        numbers, lengths, tables = (part.numpy() for part in _parts(self._host, len(self.rows)))
        count = len(spans)
        numbers[:2], numbers[2], lengths[:], tables[:] = 0, -1, 1, 0
        for row, span in enumerate(spans):
            held = span.start // block_size + 1
            tables[row, :held] = span.block_ids[:held]
        starts = np.fromiter((span.start for span in spans), np.int64, count)
        numbers[0, :count], numbers[1, :count], lengths[:count] = tokens, starts, starts + 1
        last = tables[np.arange(count), starts // block_size].astype(np.int64)
        numbers[2, :count] = last * block_size + starts % block_size
        self._device.copy_(self._host)


def _parts(memory: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and slots int64 [3, B]; lengths int32 [B]; tables int32 [B, N]."""
    wide, narrow = memory[: 3 * 8 * batch].view(torch.int64), memory[3 * 8 * batch :].view(torch.int32)
    return wide.view(3, batch), narrow[:batch], narrow[batch:].view(batch, -1)


@runtime_checkable
class StaticAttention(Protocol):
    """Attention that finds a decode step's plan in tensors whose content changes between replays."""

    def plan_decode(self, buffers: DecodeBuffers, longest: int) -> None:
        """Read the plan from these buffers until the next plan; no sequence is longer than `longest` tokens."""
        ...

    def __call__(self, layer: int, q: Tensor, *kv: Tensor) -> Tensor:
        """See `kvtier.engine.models.base.Attention`."""
        ...


class Captured(NamedTuple):
    """replay: runs the step again, with what its inputs hold then. output: what it writes, at a fixed address."""

    replay: Callable[[], None]
    output: Tensor


Capture = Callable[[Callable[[], Tensor]], Captured]
"""Captures a step. May run it any number of times; KV that it writes is the same each time."""


Forward = Callable[[Tensor, Tensor, Callable[..., Tensor], Tensor], Tensor]
"""forward(token_ids, positions, attention, logit_rows) -> logits, as `kvtier.engine.models.base.CausalLM` has it."""


class _Graph(NamedTuple):
    buffers: DecodeBuffers
    captured: Captured


class DecodeGraphs:
    """Decode steps by replay. For use from one thread.

    Attributes:
        replays, failures: steps that were replayed; captures that failed, after which that size is never tried again.

    Args:
        step: the forward over buffers: (buffers, longest) -> logits [B, vocab]; reads and writes fixed addresses only,
            and waits for nothing.
        block_size: tokens per block.
        max_tokens: of the longest sequence.
        device: of the buffers.
        capture: how a step is captured.
        batches: rows of the graphs, ascending; a step of more sequences is not replayed.

    Raises:
        CapacityError: no batch sizes, or not ascending ones.
    """

    def __init__(
        self,
        step: Callable[[DecodeBuffers, int], Tensor],
        block_size: int,
        max_tokens: int,
        device: torch.device,
        capture: Capture,
        batches: Sequence[int] = BATCHES,
    ) -> None:
        if not batches or batches[0] < 1 or list(batches) != sorted(set(batches)):
            raise CapacityError(f"graphs for batches of {list(batches)}: expected ascending sizes, each at least 1")
        self.replays = 0
        self.failures = 0
        self._step = step
        self._block_size = block_size
        self._device = device
        self._capture = capture
        self._batches = list(batches)
        self._contexts = _contexts(block_size, max_tokens)
        self._graphs: dict[tuple[int, int], _Graph | None] = {}
        self._logits: Tensor | None = None

    def run(self, spans: Sequence[AttentionSpan], tokens: Sequence[int] | NDArray[np.int64]) -> Tensor | None:
        """Replay a step of one new token per sequence.

        Args:
            spans: the sequences; `stop` is `start + 1` in all of them.
            tokens: the new ones.

        Returns:
            Logits [len(spans), vocab], to be read before the next call; None where there is no graph for this step,
            and it has to be computed otherwise.
        """
        size = self._size(spans)
        if size is None:
            return None
        graph = self._graphs[size] if size in self._graphs else self._captured(size, spans, tokens)
        if graph is None:
            return None
        graph.buffers.fill(spans, tokens, self._block_size)
        graph.captured.replay()
        self.replays += 1
        return graph.captured.output[: len(spans)]

    def _size(self, spans: Sequence[AttentionSpan]) -> tuple[int, int] | None:
        """Rows, and tokens of the longest sequence, of the smallest graph that holds the step."""
        if not spans or any(span.stop - span.start != 1 for span in spans):
            return None
        batch = bisect_left(self._batches, len(spans))
        context = bisect_left(self._contexts, max(span.stop for span in spans))
        if batch == len(self._batches) or context == len(self._contexts):
            return None
        return self._batches[batch], self._contexts[context]

    def _captured(
        self, size: tuple[int, int], spans: Sequence[AttentionSpan], tokens: Sequence[int] | NDArray[np.int64]
    ) -> _Graph | None:
        batch, longest = size
        buffers = DecodeBuffers(batch, longest // self._block_size, self._device)
        # With the step's own inputs: whatever a warm-up computes and writes, the replay does again.
        buffers.fill(spans, tokens, self._block_size)
        self._graphs[size] = None
        try:
            self._graphs[size] = _Graph(buffers, self._capture(lambda: self._kept(self._step(buffers, longest))))
        except RuntimeError:
            self.failures += 1
            _log.warning(
                "a decode step of %d rows and %d tokens cannot be captured; it is launched kernel by kernel",
                *size,
                exc_info=True,
            )
        return self._graphs[size]

    def _kept(self, logits: Tensor) -> Tensor:
        if self._logits is None:
            self._logits = logits.new_empty((self._batches[-1], logits.shape[1]))
        return self._logits[: len(logits)].copy_(logits)


def _contexts(block_size: int, max_tokens: int) -> list[int]:
    """Multiples of the block size, each a few times the one before; the last holds `max_tokens`."""
    whole = -(-max_tokens // block_size) * block_size
    sizes = [min(whole, 32 * block_size)]
    while sizes[-1] < whole:
        sizes.append(min(whole, sizes[-1] * _CONTEXT_STEP))
    return sizes


def capture_on_cuda(device: torch.device) -> Capture:
    """Captures on a device; all graphs share their memory, since no two are replayed at once."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], Tensor]) -> Captured:
        with torch.cuda.device(device):
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
            side.wait_stream(current)
            with torch.cuda.stream(side):
                # What happens at a first launch (compiling, workspaces) cannot be captured.
                for _ in range(2):
                    step()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Lanes of the copy engine go on launching in their threads meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                output = step()
        return Captured(graph.replay, output)

    return capture


def make_decode_graphs(
    forward: Forward, attention: object, pool: DevicePool, capture: Capture | None = None
) -> DecodeGraphs | None:
    """Graphs of a model's decode steps; None where its attention plans on the host, and nothing can be replayed.

    Args:
        forward: of the model, without waits and without hooks.
        attention: over the pool.
        pool: on the device that computes.
        capture: how a step is captured; None: on CUDA.
    """
    if not isinstance(attention, StaticAttention):
        return None
    planned = attention

    def step(buffers: DecodeBuffers, longest: int) -> Tensor:
        planned.plan_decode(buffers, longest)
        return forward(buffers.tokens, buffers.positions, planned, buffers.rows)

    size, tokens = pool.layout.block_size, pool.blocks.num_blocks * pool.layout.block_size
    return DecodeGraphs(step, size, tokens, pool.device, capture or capture_on_cuda(pool.device))
