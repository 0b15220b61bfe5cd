"""CupyStreams: CuPy's streams, events and copies, beside the streams that torch computes on."""

from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.gpu.streams.base import Event, Flag, Lane, Stream
from kvtier.gpu.streams.cuda import CudaDevice
from kvtier.gpu.streams.launch import Way
from kvtier.gpu.streams.runs import Direction, Runs

__all__ = ["CupyStreams"]


class CupyStreams:
    """A CUDA device through CuPy (13.6 and later). Implements `Streams`; a stream is its CUDA handle.

    Args:
        device: with its index.
        only: launch copies in this way wherever it can be used.

    Raises:
        TierUnavailable: there is no driver, or no such way to launch copies.
    """

    def __init__(self, device: torch.device, only: Way | None = None) -> None:
        self._cuda: Any = import_module("cupy").cuda
        self._runtime: Any = self._cuda.runtime
        self._sides: list[Any] = []  # CuPy destroys a stream that nobody holds
        self.cuda = CudaDevice(device, self._copy_each, only)

    def _on_device(self) -> Any:
        return self._cuda.Device(self.cuda.device.index)

    def compute(self) -> Stream:
        """See `Streams.compute`: torch's, because the model runs on that."""
        return torch.cuda.current_stream(self.cuda.device).cuda_stream

    def side(self) -> Stream:
        """See `Streams.side`."""
        with self._on_device():
            self._sides.append(self._cuda.Stream(non_blocking=True))
        return self._sides[-1].ptr

    def copy(self, stream: Stream, runs: Runs, direction: Direction) -> None:
        """See `Streams.copy`."""
        self.cuda.copy(stream, runs, direction)

    def _copy_each(self, runs: Runs, direction: Direction, stream: int) -> None:
        runtime, to_device = self._runtime, direction is Direction.TO_DEVICE
        kind = runtime.memcpyHostToDevice if to_device else runtime.memcpyDeviceToHost
        columns = (runs.device, runs.host) if to_device else (runs.host, runs.device)
        for target, source, nbytes in zip(*(column.tolist() for column in (*columns, runs.nbytes)), strict=True):
            runtime.memcpyAsync(target, source, nbytes, kind, stream)

    def record(self, stream: Stream) -> Event:
        """See `Streams.record`."""
        with self._on_device():
            event = self._cuda.Event(block=True, disable_timing=True)
            self._runtime.eventRecord(event.ptr, stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Streams.wait`."""
        # The handle of torch's default stream, 0, is that of the current device's.
        with self._on_device():
            self._runtime.streamWaitEvent(stream, event.ptr)

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
