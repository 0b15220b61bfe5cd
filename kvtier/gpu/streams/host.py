"""HostStreams: a device whose memory is host memory."""

import ctypes
import threading

import numpy as np
from numpy.typing import NDArray

from kvtier.gpu.streams.base import Event, Flag, Stream
from kvtier.gpu.streams.runs import Direction, Runs
from kvtier.gpu.streams.threads import ThreadLane

__all__ = ["HostStreams"]


class HostStreams:
    """A device whose memory is host memory: a copy has ended when it was launched. Implements `Streams`."""

    def compute(self) -> Stream:
        """See `Streams.compute`."""
        return None

    def side(self) -> Stream:
        """See `Streams.side`."""
        return None

    def copy(self, stream: Stream, runs: Runs, direction: Direction) -> None:
        """See `Streams.copy`: made at once, without the GIL."""
        runs.move(direction)

    def record(self, stream: Stream) -> Event:
        """See `Streams.record`: has happened."""
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Streams.wait`."""

    def synchronize(self, event: Event) -> None:
        """See `Streams.synchronize`."""

    def direct(self, address: int, nbytes: int) -> memoryview:
        """See `Streams.direct`."""
        return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")

    def buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """See `Streams.buffer`."""
        return np.empty(nbytes, np.uint8)

    def pin(self, memory: memoryview) -> bool:
        """See `Streams.pin`: there is nothing to gain."""
        return True

    def unpin(self, memory: memoryview) -> None:
        """See `Streams.unpin`."""

    def lane(self, name: str) -> ThreadLane:
        """See `Streams.lane`."""
        return ThreadLane(name, self.synchronize)

    def flag(self) -> Flag:
        """See `Streams.flag`."""
        return threading.Event()
