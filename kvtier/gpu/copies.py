"""CopyEngine: device blocks to and from host memory, batched, in the background, decoded on their way in.

    submit() --> lane TO_DEVICE --> thread --> ticket       a lane keeps the order of its batches,
    submit() --> lane TO_HOST ----> thread --> ticket       the two lanes do not wait for each other

On CUDA a lane's copies run on a stream of its own, on CPU memory in its thread without the GIL.
"""

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.errors import FormatMismatch, KVTierError, LeaseError, TierTimeout

__all__ = ["BlockMove", "CopyEngine", "CopyTicket", "Decode", "Direction"]

_log = logging.getLogger(__name__)

Decode: TypeAlias = Callable[[memoryview, memoryview], None]
"""Writes a raw block into its second argument from an encoded one in its first; a `KVTierError` if it cannot."""


class BlockMove(NamedTuple):
    """One copy.

    block_id: of the device. memory: where it is copied to or from: contiguous, and block_bytes long unless encoded.
    decode: how the memory becomes a raw block, on the way to the device only; None: it is one.
    """

    block_id: int
    memory: memoryview
    decode: Decode | None = None


# Encoded blocks that are decoded before their copies have to end.
_BOUNCE_BLOCKS = 8


class Direction(enum.Enum):
    """Which way bytes go."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"


class CopyTicket:
    """A submitted batch of copies.

    Attributes:
        total: copies of the batch.
        good: leading copies that were made; final once `done`.
        seconds: what they took, without waiting for their turn.
    """

    __slots__ = ("_ended", "good", "seconds", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.good = 0
        self.seconds = 0.0
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

    def finish(self, good: int, seconds: float) -> None:
        """Called once, by the lane."""
        self.good = good
        self.seconds = seconds
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

    def move(self, moves: Sequence[BlockMove], after: torch.cuda.Event | None) -> int:
        """Wait for `after`, copy, and return how many leading ones have arrived: one that cannot be decoded ends it."""
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
        self,
        copies: Sequence[BlockMove | tuple[int, memoryview]],
        direction: Direction,
        after_event: torch.cuda.Event | None = None,
    ) -> CopyTicket:
        """Queue a batch behind all earlier ones of its direction.

        A copy whose block id or memory does not fit, or that cannot be decoded, ends the batch there:
        `CopyTicket.good` says where.

        Args:
            copies: the memory must stay as it is until the ticket is done.
            direction: for all of them.
            after_event: CUDA event that the copies wait for; by default they wait for all that was launched on the
                current stream up to this call.

        Raises:
            LeaseError: the engine is closed.
        """
        ticket = CopyTicket(len(copies))
        moves = [BlockMove(*copy) for copy in copies]
        fitting = moves[: self._leading_good(moves, direction)]
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
        for at, (block_id, memory, decode) in enumerate(copies):
            read_only = direction is Direction.TO_HOST and memory.readonly
            sized = memory.nbytes == self._block_bytes if decode is None else direction is Direction.TO_DEVICE
            fits = sized and memory.c_contiguous and not read_only
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
        ticket, good, began = batch.ticket, 0, time.perf_counter()
        try:
            good = mover.move(batch.moves, batch.after)
        except Exception:  # noqa: BLE001 - the thread's top level: the lane goes on with the next batch
            _log.exception("%d copies failed", len(batch.moves))
        # The caller may unmap its memory as soon as the ticket is done.
        del batch
        ticket.finish(good, time.perf_counter() - began)


def _mover(pool: Tensor, direction: Direction) -> _Mover:
    return _HostMover(pool, direction) if pool.device.type == "cpu" else _StreamMover(pool, direction)


class _HostMover:
    """Device memory is host memory: nothing is ever under way when a batch is submitted."""

    def __init__(self, pool: Tensor, direction: Direction) -> None:
        self._rows: NDArray[np.uint8] = pool.numpy()
        self._to_device = direction is Direction.TO_DEVICE

    def fence(self) -> None:
        return None

    def move(self, moves: Sequence[BlockMove], after: torch.cuda.Event | None) -> int:
        for at, (block_id, memory, decode) in enumerate(moves):
            if decode is not None:
                if not _decoded(decode, memory, self._rows[block_id].data):
                    return at
                continue
            host = np.frombuffer(memory, np.uint8)
            if self._to_device:
                np.copyto(self._rows[block_id], host)
            else:
                np.copyto(host, self._rows[block_id])
        return len(moves)


def _decoded(decode: Decode, source: memoryview, target: memoryview) -> bool:
    try:
        decode(source, target)
    except KVTierError as error:
        _log.error("a block of %d encoded bytes, and those behind it, are not copied: %s", source.nbytes, error)
        return False
    return True


class _StreamMover:
    """Copies on a side stream. Pinned memory moves by DMA; pageable memory holds up this lane's thread only.

    Encoded blocks are decoded by this thread into a small pinned bounce buffer, a few at a time.
    """

    def __init__(self, pool: Tensor, direction: Direction) -> None:
        self._pool = pool
        self._to_device = direction is Direction.TO_DEVICE
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._bounce = _Bounce(pool.shape[1], self._arrive, pinned=True)

    def fence(self) -> torch.cuda.Event:
        launched: torch.cuda.Event = torch.cuda.current_stream(self._pool.device).record_event()
        return launched

    def move(self, moves: Sequence[BlockMove], after: torch.cuda.Event | None) -> int:
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            good = 0
            for block_id, memory, decode in moves:
                row = self._pool[block_id]
                host = _tensor_over(memory) if decode is None else self._bounce.decoded(decode, memory)
                if host is None:
                    break
                if self._to_device:
                    row.copy_(host, non_blocking=True)
                else:
                    host.copy_(row, non_blocking=True)
                good += 1
            self._arrive()
        return good

    def _arrive(self) -> None:
        """Wait until all copies so far have ended, without spinning."""
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrived.record(self._stream)
        arrived.synchronize()


class _Bounce:
    """A few blocks of host memory in turn: each is used again once the copies out of all of them have ended.

    Args:
        block_bytes: of a raw block.
        arrive: returns when they have.
        pinned: whether a device copies from it.
    """

    def __init__(self, block_bytes: int, arrive: Callable[[], None], *, pinned: bool) -> None:
        self._block_bytes = block_bytes
        self._arrive = arrive
        self._pinned = pinned
        self._blocks: Tensor | None = None
        self._used = 0

    def decoded(self, decode: Decode, source: memoryview) -> Tensor | None:
        """The raw block, uint8 [block_bytes]; None if it cannot be decoded."""
        if self._blocks is None:
            shape = _BOUNCE_BLOCKS, self._block_bytes
            self._blocks = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned)
        if self._used == _BOUNCE_BLOCKS:
            self._arrive()
            self._used = 0
        block = self._blocks[self._used]
        if not _decoded(decode, source, block.numpy().data):
            return None
        self._used += 1
        return block


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
