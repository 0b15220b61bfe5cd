"""Copies by a kernel that reads and writes pinned host memory over the bus: one launch for many small runs.

Unlike `kvtier.gpu.kernels.gather`, which has one side contiguous, this takes an address for either side of each run:
blocks are scattered over the host's slab as they are over the pool. Needs Triton.
"""

from typing import no_type_check

import numpy as np
import torch

from kvtier.gpu.kernels.launch import Launch, ceil_div, kernel, tl
from kvtier.gpu.streams.runs import Direction, Runs

__all__ = ["GatherCopies", "runs_launch"]

_WORD_BYTES, _CHUNK_WORDS = 8, 2048


@kernel
@no_type_check
def _copy_runs(table, count, CHUNK: tl.constexpr):  # noqa: N803 - a constant
    """Table int64 [3, count]: targets, sources, words of 8 bytes; all addresses multiples of 16."""
    at = tl.program_id(0)
    words = tl.load(table + 2 * count + at)
    inside = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = inside < words
    target = tl.multiple_of(tl.load(table + at).to(tl.pointer_type(tl.int64)), 16)
    source = tl.multiple_of(tl.load(table + count + at).to(tl.pointer_type(tl.int64)), 16)
    tl.store(target + inside, tl.load(source + inside, mask=mask), mask=mask)


def runs_launch(table: torch.Tensor, longest: int) -> Launch:
    """The kernel's start.

    Args:
        table: int64 [3, n] on the device: target and source addresses, and words of 8 bytes.
        longest: words of the longest run.
    """
    count = table.shape[1]
    grid = (count, ceil_div(longest, _CHUNK_WORDS))
    return Launch(_copy_runs, grid, {"table": table, "count": count}, {"CHUNK": _CHUNK_WORDS})


class GatherCopies:
    """Launches copies by kernel. All of the host memory is pinned, and all addresses and lengths multiples of 16.

    Args:
        device: on which the kernel runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, runs: Runs, direction: Direction, stream: int) -> None:
        """See `kvtier.gpu.streams.launch.Launch`."""
        sides = (runs.device, runs.host) if direction is Direction.TO_DEVICE else (runs.host, runs.device)
        table = torch.from_numpy(np.stack((*sides, runs.nbytes // _WORD_BYTES)))
        # From pageable memory it is copied once all copies before it have ended, and the lane is held up so long.
        table = table.pin_memory()
        # The allocators give the table's memory to later work of this stream only.
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, self._device)):  # type: ignore[no-untyped-call]
            table = table.to(self._device, non_blocking=True)
            runs_launch(table, int(runs.nbytes.max()) // _WORD_BYTES).run()
