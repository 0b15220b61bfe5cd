"""A device pool and host memory on simulated streams, and what may be forgotten on the way between them."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch

from kvtier.gpu.copies.mover import Mover
from kvtier.gpu.copies.tickets import LayerGate
from kvtier.testing.streams import SimulatedStreams

BYTES = 256
SEEDS = range(60)


class Device:
    """Blocks of a pool on simulated streams: reads and writes are work of the compute stream."""

    def __init__(self, streams: SimulatedStreams, blocks: int = 8, nbytes: int = BYTES) -> None:
        self.streams = streams
        self.pool = torch.zeros(blocks, nbytes, dtype=torch.uint8)
        self._rows = self.pool.numpy()

    def write(self, block: int, value: int) -> None:
        """Fill a block, in two pieces."""
        row, half = self._rows[block], self._rows.shape[1] // 2
        self.streams.launch(*(lambda part=part: part.fill(value) for part in (row[:half], row[half:])))

    def read(self, block: int, part: slice = slice(None)) -> np.ndarray:
        """Memory that will hold what the block holds when the stream gets here."""
        seen = np.zeros_like(self._rows[block, part])
        self.streams.launch(lambda: np.copyto(seen, self._rows[block, part]))
        return seen


def memory(fill: int = 0, nbytes: int = BYTES) -> memoryview:
    return np.full(nbytes, fill, np.uint8).data


def holds(data: memoryview | np.ndarray, value: int) -> bool:
    return bool((np.frombuffer(data, np.uint8) == value).all())


def repeat(source: memoryview, target: memoryview) -> None:
    """A format of one byte, the value of all of the block."""
    np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)[0]


# ---- what may be forgotten


def _without_waits(original: Callable[..., Iterable[object]]) -> Callable[..., object]:
    def hasty(self: Mover, *arguments: object) -> object:
        work = original(self, *arguments)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value
        yield

    return hasty


def _open_early(self: LayerGate, layer: int, arrival: object) -> None:
    self._open[layer].set()


FORGOTTEN = {
    "a stream waits for an event": (SimulatedStreams, "wait", lambda self, stream, event: None),
    "a batch waits for its arrival": (Mover, "move", _without_waits(Mover.move)),
    "a layered load waits for its arrival": (Mover, "move_layers", _without_waits(Mover.move_layers)),
    "a bounce block waits for its copy": (Mover, "_decode", _without_waits(Mover._decode)),
    "a failed batch waits for what was launched": (Mover, "settle", lambda self: iter(())),
    "a layer is waited for": (LayerGate, "wait", lambda self, layer: None),
    "a gate opens with an event": (LayerGate, "open", _open_early),
}
"""Each as attribute of a class and what to put in its place."""


@contextmanager
def forgetting(*names: str):
    with ExitStack() as stack:
        for name in names:
            owner, attribute, replacement = FORGOTTEN[name]
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield


def wrong_seeds(scenario: Callable[[SimulatedStreams], bool]) -> list[int]:
    """Seeds for which a scenario does not end well."""
    return [seed for seed in SEEDS if not scenario(SimulatedStreams(seed, piece_bytes=BYTES // 2))]
