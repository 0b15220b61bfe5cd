"""TorchStreams: torch's streams and events; copies by the driver."""

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.gpu.streams.base import Event, Flag, Lane, Stream
from kvtier.gpu.streams.cuda import CudaDevice
from kvtier.gpu.streams.launch import Way
from kvtier.gpu.streams.runs import Direction, Runs

__all__ = ["TorchStreams"]


class TorchStreams:
    """A CUDA device through torch. Implements `Streams`.

    Args:
        device: with its index.
        only: launch copies in this way wherever it can be used.

    Raises:
        TierUnavailable: there is no driver, or no such way to launch copies.
    """

    def __init__(self, device: torch.device, only: Way | None = None) -> None:
        self.cuda = CudaDevice(device, only=only)

    def compute(self) -> Stream:
        """See `Streams.compute`."""
        return torch.cuda.current_stream(self.cuda.device)

    def side(self) -> Stream:
        """See `Streams.side`."""
        return torch.cuda.Stream(self.cuda.device)  # type: ignore[no-untyped-call]

    def copy(self, stream: Stream, runs: Runs, direction: Direction) -> None:
        """See `Streams.copy`."""
        self.cuda.copy(stream.cuda_stream, runs, direction)

    def record(self, stream: Stream) -> Event:
        """See `Streams.record`."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Streams.wait`."""
        stream.wait_event(event)

    def synchronize(self, event: Event) -> None:
        """See `Streams.synchronize`: without spinning."""
        event.synchronize()

    def direct(self, address: int, nbytes: int) -> None:
        """See `Streams.direct`."""
        return

    def buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """See `Streams.buffer`."""
        return self.cuda.buffer(nbytes)

    def pin(self, memory: memoryview) -> bool:
        """See `Streams.pin`."""
        return self.cuda.pin(memory)

    def unpin(self, memory: memoryview) -> None:
        """See `Streams.unpin`."""
        self.cuda.unpin(memory)

    def lane(self, name: str) -> Lane:
        """See `Streams.lane`."""
        return self.cuda.lane(name, self.synchronize)

    def flag(self) -> Flag:
        """See `Streams.flag`."""
        return self.cuda.flag()
