"""How a batch of copies is launched: the choice, as a pure function, and what carries it out.

single    one cudaMemcpyAsync a run          few and large runs, and pageable memory
batch     one cuMemcpyBatchAsync             many runs
gather    one kernel that reads and writes   many small runs: a copy engine takes over a microsecond for each,
          pinned memory over the bus         a kernel takes streaming multiprocessors from computing
"""

import enum
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from kvtier.errors import TierUnavailable
from kvtier.gpu.streams.runs import Direction, Runs

__all__ = ["Launch", "Launcher", "Way", "choose"]

_BATCH_RUNS = 4
# Below, a copy engine's cost per copy shows; from the device it is the better way at every size. Both as published for
# vLLM's offloading on H100; `benchmarks/gpu.py` measures all ways at several sizes.
_GATHER_BYTES = 28 << 10
_GATHER_ALIGN = 16


class Way(enum.Enum):
    """See above."""

    SINGLE = "single"
    BATCH = "batch"
    GATHER = "gather"


Launch: TypeAlias = Callable[[Runs, Direction, int], None]
"""Launches copies on a stream, given as its CUDA handle."""


def choose(runs: Runs, direction: Direction, ways: frozenset[Way], *, pinned: bool) -> Way:
    """The way for copies that were merged.

    Args:
        runs: at least one.
        direction: of all of them.
        ways: those that there are; SINGLE always.
        pinned: whether all of the host memory is. A kernel cannot touch what is not.
    """
    many = pinned and len(runs) >= _BATCH_RUNS
    small = direction is Direction.TO_DEVICE and runs.total < _GATHER_BYTES * len(runs)
    if many and small and Way.GATHER in ways and _aligned(runs):
        return Way.GATHER
    return Way.BATCH if many and Way.BATCH in ways else Way.SINGLE


def _aligned(runs: Runs) -> bool:
    return not np.any((runs.device | runs.host | runs.nbytes) % _GATHER_ALIGN)


class Launcher:
    """Launches copies in the best way that there is.

    Attributes:
        launched: runs by the way they were launched.

    Args:
        ways: what there is; SINGLE at least.
        only: use this one wherever it can be used.

    Raises:
        TierUnavailable: there is no such way.
    """

    def __init__(self, ways: Mapping[Way, Launch], only: Way | None = None) -> None:
        wanted = Way.SINGLE if only is None else only
        if wanted not in ways:
            raise TierUnavailable(
                f"copies by {wanted.value}: this machine has {', '.join(sorted(way.value for way in ways))}; use those"
            )
        self._ways = dict(ways)
        self._known = frozenset(ways)
        self._only = only
        self.launched = dict.fromkeys(Way, 0)

    def __call__(self, runs: Runs, direction: Direction, stream: int, *, pinned: bool) -> None:
        """Launch copies on a stream."""
        merged = runs.merged()
        if not len(merged):
            return
        way = choose(merged, direction, self._known, pinned=pinned) if self._only is None else self._only
        # A kernel that touches what it cannot reach takes the device's context with it.
        if not pinned or (way is Way.GATHER and not _aligned(merged)):
            way = Way.SINGLE
        self.launched[way] += len(merged)
        self._ways[way](merged, direction, stream)
