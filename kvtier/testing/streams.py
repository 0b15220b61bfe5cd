"""SimulatedStreams: device streams over host memory, whose work runs when a chooser says, in any legal order.

    stream 0 (compute)  [write b3] [event] [read b3] ...      the chooser picks, again and again, one of: the next
    stream 1            [wait]     [copy b3] [copy b4] ...    piece of work of a stream that waits for nothing, or the
    lane to_host        decode | launch | ticket ...          next part of a lane whose event has happened

So code that forgets to wait takes bytes before they are written, or after they were overwritten, for some choices; a
seed, or Hypothesis, makes them. Copies move real bytes, each in pieces that other work may come between.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import KVTierError
from kvtier.gpu.streams.base import Event, HostWork, Stream
from kvtier.gpu.streams.runs import Direction, Runs, address_of

__all__ = ["Choose", "SimulatedStreams", "Stuck"]

Choose = Callable[[int], int]
"""One of 0..n-1, given n."""

_Work = Callable[[], None]


class Stuck(KVTierError):
    """The host waits for something that no work will ever bring about."""


@dataclass(slots=True)
class _Event:
    happened: bool = False

    def happen(self) -> None:
        self.happened = True


@dataclass(slots=True)
class _Item:
    """Works that run in any order, once an event has happened."""

    works: list[_Work]
    after: _Event | None = None


@dataclass(slots=True, eq=False)
class _Stream:
    """What was launched and has not run, in order."""

    queue: deque[_Item] = field(default_factory=deque)

    @property
    def ready(self) -> bool:
        """Whether something can run now."""
        while self.queue:
            head = self.queue[0]
            if head.after is not None and not head.after.happened:
                return False
            if head.works:
                return True
            self.queue.popleft()
        return False

    def run(self, choose: Choose) -> None:
        works = self.queue[0].works
        works.pop(choose(len(works)))()


@dataclass(slots=True, eq=False)
class _Lane:
    """Implements `Lane`: works that are resumed in turn."""

    streams: "SimulatedStreams"
    works: deque[HostWork] = field(default_factory=deque)
    awaited: _Event | None = None
    running: bool = False

    def submit(self, work: HostWork) -> None:
        self.works.append(work)
        self.streams.drift()

    def close(self) -> None:
        self.streams.run_until(lambda: not self.works)

    @property
    def ready(self) -> bool:
        # What it launches may let other things happen, but not itself.
        return bool(self.works) and not self.running and (self.awaited is None or self.awaited.happened)

    def resume(self) -> None:
        self.running = True
        try:
            self.awaited = next(self.works[0])
        except StopIteration:
            self.works.popleft()
            self.awaited = None
        finally:
            self.running = False


@dataclass(slots=True, eq=False)
class _Flag:
    """Implements `Flag`."""

    streams: "SimulatedStreams"
    up: bool = False

    def set(self) -> None:
        self.up = True

    def is_set(self) -> bool:
        return self.up

    def wait(self, timeout: float | None = None) -> bool:
        self.streams.run_until(lambda: self.up)
        return self.up


class SimulatedStreams:
    """Implements `kvtier.gpu.streams.Streams`. For use from one thread.

    Memory that copies were launched on has to stay mapped until they ran; `fails` and the order are the test's.

    Attributes:
        main: the stream of `compute`.
        pinned: addresses of the memory that is pinned.
        fails: asked with the number of each launch of copies, from 0; where it says so, `copy` raises.

    Args:
        choose: which of several things happens next; a number is a seed.
        eager: computing is not simulated: the caller computes on the host, and what it computed so far has happened.
        drift: at most so many things happen on their own whenever something is launched.
        piece_bytes: copies are cut into pieces of at most so many bytes.
    """

    def __init__(
        self, choose: Choose | int = 0, *, eager: bool = False, drift: int = 3, piece_bytes: int = 1 << 30
    ) -> None:
        self._choose = random.Random(choose).randrange if isinstance(choose, int) else choose  # noqa: S311 - a test's
        self._eager = eager
        # The host is far ahead of the device in some runs, close to it in others.
        self._drift = self._choose(drift + 1)
        self._piece_bytes = piece_bytes
        self._streams: list[_Stream] = []
        self._lanes: list[_Lane] = []
        self._launches = 0
        self.main = self.side()
        self.pinned: set[int] = set()
        self.fails: Callable[[int], bool] = frozenset[int]().__contains__

    # ---- what a test does

    def launch(self, *work: _Work, stream: Stream = None) -> None:
        """Queue work on a stream (None: that of `compute`), in any order among itself."""
        (stream or self.main).queue.append(_Item(list(work)))
        self.drift()

    def drift(self) -> None:
        """Let a few things happen, or none."""
        for _ in range(self._choose(self._drift + 1)):
            self.step()

    def step(self) -> bool:
        """Let one thing happen that may; whether there was one."""
        streams = [stream for stream in self._streams if stream.ready]
        lanes = [lane for lane in self._lanes if lane.ready]
        if not streams and not lanes:
            return False
        at = self._choose(len(streams) + len(lanes))
        if at >= len(streams):
            lanes[at - len(streams)].resume()
            return True
        streams[at].run(self._choose)
        return True

    def run(self) -> None:
        """Let everything happen.

        Raises:
            Stuck: a stream or a lane waits for what never comes.
        """
        while self.step():
            pass
        waiting = sum(bool(stream.queue) for stream in self._streams) + sum(bool(lane.works) for lane in self._lanes)
        if waiting:
            raise Stuck(f"{waiting} streams and lanes wait for events that no work will bring about")

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Let things happen until the condition holds, as the host waits.

        Raises:
            Stuck: it never will.
        """
        while not condition():
            if not self.step():
                raise Stuck("the host waits for what no stream and no lane will bring about: a lost event, or a cycle")

    # ---- Streams

    def compute(self) -> Stream:
        """See `Streams.compute`."""
        return self.main

    def side(self) -> Stream:
        """See `Streams.side`."""
        self._streams.append(_Stream())
        return self._streams[-1]

    def copy(self, stream: Stream, runs: Runs, direction: Direction) -> None:
        """See `Streams.copy`. The addresses are read now, the bytes when the simulation gets to it."""
        number, self._launches = self._launches, self._launches + 1
        if self.fails(number):
            raise RuntimeError(f"launch {number} of copies {direction.value}: failed as the test wished")
        self.launch(*(_copy_of(piece, direction) for piece in self._pieces(runs)), stream=stream)

    def _pieces(self, runs: Runs) -> list[Runs]:
        rows = zip(runs.device.tolist(), runs.host.tolist(), runs.nbytes.tolist(), strict=True)
        return [
            Runs.of([device + at], [host + at], min(self._piece_bytes, nbytes - at))
            for device, host, nbytes in rows
            for at in range(0, nbytes, self._piece_bytes)
        ]

    def record(self, stream: Stream) -> Event:
        """See `Streams.record`."""
        event = _Event(happened=self._eager and stream is self.main)
        if not event.happened:
            self.launch(event.happen, stream=stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """See `Streams.wait`."""
        if self._eager and stream is self.main:
            self.synchronize(event)
            return
        stream.queue.append(_Item([], event))
        self.drift()

    def synchronize(self, event: Event) -> None:
        """See `Streams.synchronize`."""
        self.run_until(lambda: bool(event.happened))

    def direct(self, address: int, nbytes: int) -> None:
        """See `Streams.direct`: it cannot, as on CUDA."""
        return

    def buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """See `Streams.buffer`."""
        return np.zeros(nbytes, np.uint8)

    def pin(self, memory: memoryview) -> bool:
        """See `Streams.pin`."""
        self.pinned.add(address_of(memory))
        return True

    def unpin(self, memory: memoryview) -> None:
        """See `Streams.unpin`."""
        if any(item.works for stream in self._streams if stream is not self.main for item in stream.queue):
            raise Stuck("memory is unpinned while copies are under way: wait for them first")
        self.pinned.remove(address_of(memory))

    def lane(self, name: str) -> _Lane:
        """See `Streams.lane`."""
        self._lanes.append(_Lane(self))
        return self._lanes[-1]

    def flag(self) -> _Flag:
        """See `Streams.flag`."""
        return _Flag(self)


def _copy_of(piece: Runs, direction: Direction) -> _Work:
    return lambda: piece.move(direction)
