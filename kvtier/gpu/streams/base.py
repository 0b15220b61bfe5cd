"""Streams: the order in which a device and the host do things, as one seam.

    stream     queue of device work, in order          wait(stream, event)    its later work comes after the event
    event      a place in a stream                     synchronize(event)     the host waits for it
    lane       queue of host work, in the background   flag()                 what one part of the host tells another

The copy engine, the worker half and the layer gate know a device by nothing else, so that their order is the same on
CUDA (`TorchStreams`, `CupyStreams`), on host memory (`HostStreams`) and on simulated streams, where tests drive it.
"""

from collections.abc import Generator
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.gpu.streams.runs import Direction, Runs

__all__ = ["Event", "Flag", "HostWork", "Lane", "Stream", "Streams"]

Stream: TypeAlias = Any
"""As its `Streams` made it; opaque to everybody else."""

Event: TypeAlias = Any
"""Likewise."""

HostWork: TypeAlias = Generator[Event, None, None]
"""Work of a lane. It is resumed once the event that it yields has happened."""


class Flag(Protocol):
    """`threading.Event`, as far as it is needed."""

    def set(self) -> None:
        """From now on."""
        ...

    def is_set(self) -> bool:
        """Whether it is. Never blocks."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is set, or for so many seconds; whether it is."""
        ...


class Lane(Protocol):
    """Host work in the background, one after the other."""

    def submit(self, work: HostWork) -> None:
        """Do it behind all that was submitted before. It handles its own failures."""
        ...

    def close(self) -> None:
        """Finish what was submitted. Idempotent."""
        ...


class Streams(Protocol):
    """One device. Thread-safe."""

    def compute(self) -> Stream:
        """The stream that the calling thread launches its own work on."""
        ...

    def side(self) -> Stream:
        """A new stream."""
        ...

    def copy(self, stream: Stream, runs: Runs, direction: Direction) -> None:
        """Launch copies, in any order among themselves; their memory stays as it is until they have ended."""
        ...

    def record(self, stream: Stream) -> Event:
        """All that was launched on the stream so far."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is launched on the stream from now on comes after the event. Does not block."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block until the event has happened."""
        ...

    def direct(self, address: int, nbytes: int) -> memoryview | None:
        """Device memory as the host writes it; None where it cannot."""
        ...

    def buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that copies to and from the device are fastest with: uint8 [nbytes]."""
        ...

    def pin(self, memory: memoryview) -> bool:
        """Make host memory as fast as `buffer`'s; whether it is now. It must outlive `unpin`."""
        ...

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`; all copies from and to the memory have ended."""
        ...

    def lane(self, name: str) -> Lane:
        """A new lane."""
        ...

    def flag(self) -> Flag:
        """A new flag, not set."""
        ...
