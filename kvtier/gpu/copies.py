"""CopyEngine: device blocks to and from host memory, batched, in the background.

    submit() --> lane TO_DEVICE --> thread --> ticket       a lane keeps the order of its batches,
    submit() --> lane TO_HOST ----> thread --> ticket       the two lanes do not wait for each other

On CUDA a lane's copies run on a stream of its own, on CPU memory in its thread without the GIL.
"""

import enum
import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.errors import FormatMismatch, LeaseError, TierTimeout

__all__ = ["BlockMove", "CopyEngine", "CopyTicket", "Direction"]

_log = logging.getLogger(__name__)

BlockMove: TypeAlias = tuple[int, memoryview]
"""A device block id, and the host memory that it is copied to or from: contiguous, block_bytes long."""


class Direction(enum.Enum):
    """Which way bytes go."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"


class CopyTicket:
    """A submitted batch of copies.

    Attributes:
        total: copies of the batch.
        good: leading copies that were made; final once `done`.
    """

    __slots__ = ("_ended", "good", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.good = 0
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the batch has ended, well or not. Never blocks."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> int:
        """Block until the batch has ended; returns `good`.

        Raises:
            TierTimeout: `timeout` seconds passed. The copies go on.
        """
        if not self._ended.wait(timeout):
            raise TierTimeout(f"{self.total} copies have not ended within {timeout} s; wait again")
        return self.good

    def finish(self, good: int) -> None:
        """Called once, by the lane."""
        self.good = good
        self._ended.set()


class _Batch(NamedTuple):
    moves: Sequence[BlockMove]
    after: torch.cuda.Event | None
    ticket: CopyTicket


class _Mover(Protocol):
    """How one lane moves bytes on one kind of device."""

    def fence(self) -> torch.cuda.Event | None:
        """What the submitter has launched so far, if that may still be running."""
        ...

    def move(self, moves: Sequence[BlockMove], after: torch.cuda.Event | None) -> None:
        """Wait for `after`, copy, and return when the bytes have arrived."""
        ...


class CopyEngine:
    """Copies between the rows of a device pool and host memory. Thread-safe.

    Args:
        pool: uint8 [num_blocks, block_bytes], contiguous, on any device.

    Raises:
        FormatMismatch: a tensor of another shape or dtype.
    """

    def __init__(self, pool: Tensor) -> None:
        if pool.dtype != torch.uint8 or pool.ndim != 2 or not pool.is_contiguous():
            raise FormatMismatch(
                f"pool {list(pool.shape)} of {pool.dtype}: expected contiguous uint8 [num_blocks, block_bytes]; "
                f"give DevicePool.as_bytes()"
            )
        self._num_blocks, self._block_bytes = pool.shape
        self._lanes = {direction: _Lane(direction, _mover(pool, direction)) for direction in Direction}
        self._lock = threading.Lock()
        self._closed = False

    def submit(
        self, copies: Sequence[BlockMove], direction: Direction, after_event: torch.cuda.Event | None = None
    ) -> CopyTicket:
        """Queue a batch behind all earlier ones of its direction.

        A copy whose block id or memory does not fit ends the batch there: `CopyTicket.good` says where.

        Args:
            copies: the memory must stay as it is until the ticket is done.
            direction: for all of them.
            after_event: CUDA event that the copies wait for; by default they wait for all that was launched on the
                current stream up to this call.

        Raises:
            LeaseError: the engine is closed.
        """
        ticket = CopyTicket(len(copies))
        fitting = copies[: self._leading_good(copies, direction)]
        lane = self._lanes[direction]
        with self._lock:
            if self._closed:
                raise LeaseError(f"{len(copies)} copies {direction.value}: the copy engine is closed; make a new one")
            lane.queue.put(_Batch(fitting, after_event or lane.mover.fence(), ticket))
        return ticket

    def close(self) -> None:
        """Finish what is queued and end the threads. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for lane in self._lanes.values():
                    lane.queue.put(None)
        for lane in self._lanes.values():
            lane.thread.join()

    def _leading_good(self, copies: Sequence[BlockMove], direction: Direction) -> int:
        for at, (block_id, memory) in enumerate(copies):
            read_only = direction is Direction.TO_HOST and memory.readonly
            fits = memory.nbytes == self._block_bytes and memory.c_contiguous and not read_only
            if not (fits and 0 <= block_id < self._num_blocks):
                _log.error(
                    "copy %d of %d %s: block %d of 0..%d, %d bytes of memory, contiguous %s, read-only %s: expected %d "
                    "contiguous bytes; it and those behind it are not made",
                    *(at, len(copies), direction.value, block_id, self._num_blocks - 1),
                    *(memory.nbytes, memory.c_contiguous, memory.readonly, self._block_bytes),
                )
                return at
        return len(copies)


class _Lane:
    """One direction: a queue and the thread that empties it."""

    def __init__(self, direction: Direction, mover: _Mover) -> None:
        self.mover = mover
        self.queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=_drain, args=(self.queue, mover), name=f"kvtier-copy-{direction.value}", daemon=True
        )
        self.thread.start()


def _drain(queue: "SimpleQueue[_Batch | None]", mover: _Mover) -> None:
    while (batch := queue.get()) is not None:
        ticket, good = batch.ticket, 0
        try:
            mover.move(batch.moves, batch.after)
            good = len(batch.moves)
        except Exception:  # noqa: BLE001 - the thread's top level: the lane goes on with the next batch
            _log.exception("%d copies failed", len(batch.moves))
        # The caller may unmap its memory as soon as the ticket is done.
        del batch
        ticket.finish(good)


def _mover(pool: Tensor, direction: Direction) -> _Mover:
    return _HostMover(pool, direction) if pool.device.type == "cpu" else _StreamMover(pool, direction)


class _HostMover:
    """Device memory is host memory: nothing is ever under way when a batch is submitted."""

    def __init__(self, pool: Tensor, direction: Direction) -> None:
        self._rows: NDArray[np.uint8] = pool.numpy()
        self._to_device = direction is Direction.TO_DEVICE

    def fence(self) -> None:
        return None

    def move(self, moves: Sequence[BlockMove], after: torch.cuda.Event | None) -> None:
        for block_id, memory in moves:
            host = np.frombuffer(memory, np.uint8)
            if self._to_device:
                np.copyto(self._rows[block_id], host)
            else:
                np.copyto(host, self._rows[block_id])


class _StreamMover:
    """Copies on a side stream. Pinned memory moves by DMA; pageable memory holds up this lane's thread only."""

    def __init__(self, pool: Tensor, direction: Direction) -> None:
        self._pool = pool
        self._to_device = direction is Direction.TO_DEVICE
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    def fence(self) -> torch.cuda.Event:
        launched: torch.cuda.Event = torch.cuda.current_stream(self._pool.device).record_event()
        return launched

    def move(self, moves: Sequence[BlockMove], after: torch.cuda.Event | None) -> None:
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for block_id, memory in moves:
                row, host = self._pool[block_id], _tensor_over(memory)
                if self._to_device:
                    row.copy_(host, non_blocking=True)
                else:
                    host.copy_(row, non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        arrived.synchronize()


class _Writable:
    """Array interface over memory that may be read-only, which torch has no tensors for: only to be read from then."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        source = np.frombuffer(memory, np.uint8)
        self.__array_interface__ = {
            "version": 3,
            "shape": source.shape,
            "typestr": "|u1",
            "data": (source.ctypes.data, False),
        }


def _tensor_over(memory: memoryview) -> Tensor:
    """uint8 [nbytes] over host memory, without a copy; keeps it alive."""
    return torch.from_numpy(np.asarray(_Writable(memory)))
