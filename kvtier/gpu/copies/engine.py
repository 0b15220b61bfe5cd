"""CopyEngine: device blocks to and from host memory, batched, in the background, decoded on their way in.

submit() --> lane TO_DEVICE --> mover --> ticket       a lane keeps the order of its batches,
submit() --> lane TO_HOST ----> mover --> ticket       the two lanes do not wait for each other
"""

import logging
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from kvtier.errors import FormatMismatch, LeaseError
from kvtier.gpu.copies.mover import BlockMove, Mover
from kvtier.gpu.copies.tickets import CopyTicket, LayerGate
from kvtier.gpu.pages import Pages
from kvtier.gpu.streams import make_streams
from kvtier.gpu.streams.base import Event, HostWork, Streams
from kvtier.gpu.streams.runs import Direction

__all__ = ["CopyEngine"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class CopyEngine:
    """Copies between the rows of a device pool and host memory. Thread-safe.

    Args:
        pool: uint8 [num_blocks, block_bytes] on any device, contiguous, or where else its blocks lie.
        streams: of that device; None: the best there are.

    Raises:
        FormatMismatch: a tensor of another shape or dtype.
    """

    def __init__(self, pool: Tensor | Pages, streams: Streams | None = None) -> None:
        if isinstance(pool, Tensor):
            pool = Pages.of([pool])
        self._block_bytes, self._pages = pool.block_bytes, len(pool)
        self._streams = make_streams(pool.device) if streams is None else streams
        self._movers = {direction: Mover(pool, direction, self._streams) for direction in Direction}
        self._lanes = {direction: self._streams.lane(f"kvtier-copy-{direction.value}") for direction in Direction}
        self._lock = threading.Lock()
        self._closed = False

    def submit(
        self,
        copies: Sequence[BlockMove | tuple[int, memoryview]],
        direction: Direction,
        after_event: Event = None,
    ) -> CopyTicket:
        """Queue a batch behind all earlier ones of its direction.

        A copy whose block id or memory does not fit, or that cannot be decoded, ends the batch there:
        `CopyTicket.good` says where.

        Args:
            copies: the memory must stay as it is until the ticket is done.
            direction: for all of them.
            after_event: event of the device's streams that the copies wait for; by default they wait for all that was
                launched on the current stream up to this call.

        Raises:
            LeaseError: the engine is closed.
        """
        moves = [BlockMove(*copy) for copy in copies]
        ticket = CopyTicket(len(moves), self._streams.flag())
        with self._open(len(moves), direction):
            after = self._launched() if after_event is None else after_event
            mover = self._movers[direction]
            self._lanes[direction].submit(_carried_out(mover, mover.move(moves, after), ticket))
        return ticket

    def submit_layers(
        self, jobs: Sequence[Sequence[BlockMove | tuple[int, memoryview]]], layers: int
    ) -> tuple[list[CopyTicket], LayerGate]:
        """Queue loads to the device that computing follows layer by layer.

        Args:
            jobs: batches as for `submit`, each with a ticket of its own: one that fails does not end the others.
            layers: equal slices of a block; slice i of all blocks arrives before slice i + 1 of any.

        Returns:
            A ticket for each job, and the gate to be waited at before a layer reads the blocks.

        Raises:
            FormatMismatch: blocks have no such slices.
            LeaseError: the engine is closed.
        """
        if layers < 1 or self._block_bytes % layers or (layers > 1 and self._pages > 1):
            raise FormatMismatch(
                f"blocks of {self._block_bytes} bytes, {self._pages} pages, in {layers} layers: expected equal slices "
                "of one page"
            )
        gate = LayerGate(self._streams, layers)
        moves = [[BlockMove(*copy) for copy in copies] for copies in jobs]
        tickets = [CopyTicket(len(job), self._streams.flag()) for job in moves]
        direction = Direction.TO_DEVICE
        with self._open(sum(map(len, moves)), direction):
            mover = self._movers[direction]
            work = mover.move_layers(moves, self._launched(), gate)
            self._lanes[direction].submit(_layers_carried_out(mover, work, tickets, gate))
        return tickets, gate

    @contextmanager
    def _open(self, copies: int, direction: Direction) -> Iterator[None]:
        """Hold the lock of an engine that is not closed."""
        with self._lock:
            if self._closed:
                raise LeaseError(f"{copies} copies {direction.value}: the copy engine is closed; make a new one")
            yield

    def _launched(self) -> Event:
        return self._streams.record(self._streams.compute())

    def close(self) -> None:
        """Finish what is queued and end the lanes. Idempotent."""
        with self._lock:
            self._closed = True
        for lane in self._lanes.values():
            lane.close()


def _carried_out(mover: Mover, moving: Generator[Event, None, int], ticket: CopyTicket) -> HostWork:
    """A batch as work of a lane."""
    began = time.perf_counter()
    good = yield from _guarded(mover, moving, 0)
    # The caller may unmap its memory as soon as the ticket is done.
    del moving
    ticket.finish(good, time.perf_counter() - began)


def _layers_carried_out(
    mover: Mover, moving: Generator[Event, None, list[int]], tickets: list[CopyTicket], gate: LayerGate
) -> HostWork:
    """Jobs of a layered load as work of a lane."""
    began = time.perf_counter()
    good = yield from _guarded(mover, moving, [0] * len(tickets))
    del moving
    seconds, copies = time.perf_counter() - began, max(1, sum(good))
    gate.open_rest()
    for ticket, count in zip(tickets, good, strict=True):
        # What copies of one size took together, each took its share of.
        ticket.finish(count, seconds * count / copies)


def _guarded(mover: Mover, moving: Generator[Event, None, _T], otherwise: _T) -> Generator[Event, None, _T]:
    try:
        return (yield from moving)
    except Exception:  # noqa: BLE001 - the lane's top level: it goes on with the next batch
        _log.exception("copies failed")
    yield from mover.settle()
    return otherwise
