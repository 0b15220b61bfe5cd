"""Mover: what the copies of one direction do on a device, step by step.

    wait for what was launched before -> decode, through a bounce buffer -> raw blocks, many a launch -> arrival

A batch is looked at piece by piece, so that the device copies one while the host prepares the next.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import KVTierError
from kvtier.gpu.copies.tickets import LayerGate
from kvtier.gpu.pages import Pages
from kvtier.gpu.streams.base import Event, Streams
from kvtier.gpu.streams.runs import Direction, Runs, addresses_of

__all__ = ["BOUNCE_BLOCKS", "BlockMove", "Decode", "Mover"]

_log = logging.getLogger(__name__)

BOUNCE_BLOCKS = 8
"""Encoded blocks that are decoded before their copies have to end."""

# Blocks of one launch: what the host needs for so many, the device waits for at the start of a batch.
_PIECE_BLOCKS = 64

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


class Mover:
    """Moves bytes between a pool and host memory on a stream of its own. For use from one lane.

    Pinned memory moves by DMA or by a kernel; pageable memory may hold up the lane.

    Args:
        pool: where its blocks lie.
        direction: of all its copies.
        streams: of the pool's device.
    """

    def __init__(self, pool: Pages, direction: Direction, streams: Streams) -> None:
        self._pool = pool
        self._num_blocks, self._block_bytes = pool.num_blocks, pool.block_bytes
        self._direction = direction
        self._streams = streams
        self._stream = streams.side()
        self._bounce: NDArray[np.uint8] | None = None
        self._bounced = 0

    def move(self, moves: Sequence[BlockMove], after: Event) -> Generator[Event, None, int]:
        """Copy blocks; returns how many leading ones have arrived.

        Args:
            moves: the copies. One that does not fit, or cannot be decoded, ends them there.
            after: what they come after.
        """
        self._streams.wait(self._stream, after)
        good = 0
        while good < len(moves):
            piece = moves[good : good + _PIECE_BLOCKS]
            count = yield from self._decode(piece)
            self._streams.copy(self._stream, self._raw_runs(piece[:count]), self._direction)
            good += count
            if count < len(piece):
                break
        yield self._streams.record(self._stream)
        self._bounced = 0
        return good

    def move_layers(
        self, jobs: Sequence[Sequence[BlockMove]], after: Event, gate: LayerGate
    ) -> Generator[Event, None, list[int]]:
        """Copy jobs that have nothing to do with each other, layer by layer; returns what `move` does, of each.

        Raw blocks of all jobs go together, a slice after the other, and open the gate as they are launched; encoded
        ones go before them, as a whole.

        Args:
            jobs: the copies.
            after: what they come after.
            gate: of as many layers as a block has slices.
        """
        streams, stream = self._streams, self._stream
        streams.wait(stream, after)
        good: list[int] = []
        fitting: list[BlockMove] = []
        for moves in jobs:
            good.append((yield from self._decode(moves)))
            fitting += moves[: good[-1]]
        runs = self._raw_runs(fitting)
        for layer in range(gate.layers):
            streams.copy(stream, runs.slice(layer, gate.layers), self._direction)
            gate.open(layer, streams.record(stream))
        yield streams.record(stream)
        self._bounced = 0
        return good

    def settle(self) -> Generator[Event, None, None]:
        """After a failure: what was launched before it may still touch memory that is about to change hands."""
        try:
            yield self._streams.record(self._stream)
        except Exception:  # noqa: BLE001 - the device is beyond waiting for
            _log.exception("copies %s cannot be waited for", self._direction.value)
        self._bounced = 0

    def _decode(self, moves: Sequence[BlockMove]) -> Generator[Event, None, int]:
        """Launch the copies of the encoded blocks; how many leading moves can be made."""
        for at, (block_id, memory, decode) in enumerate(moves):
            if not self._fits(block_id, memory, encoded=decode is not None):
                return at
            if decode is None:
                continue
            target = self._direct(block_id)
            if target is not None:
                if not _decoded(decode, memory, target):
                    return at
                continue
            if self._bounced == BOUNCE_BLOCKS:
                yield self._streams.record(self._stream)
                self._bounced = 0
            block = self._bounce_blocks()[self._bounced]
            if not _decoded(decode, memory, block.data):
                return at
            self._streams.copy(self._stream, self._runs([block_id], [block.data]), self._direction)
            self._bounced += 1
        return len(moves)

    def _direct(self, block_id: int) -> memoryview | None:
        if len(self._pool) > 1:
            return None
        return self._streams.direct(int(self._pool.base[0] + block_id * self._pool.stride[0]), self._block_bytes)

    def _bounce_blocks(self) -> NDArray[np.uint8]:
        if self._bounce is None:
            self._bounce = self._streams.buffer(BOUNCE_BLOCKS * self._block_bytes).reshape(BOUNCE_BLOCKS, -1)
        return self._bounce

    def _raw_runs(self, moves: Sequence[BlockMove]) -> Runs:
        raw = [move for move in moves if move.decode is None]
        return self._runs([move.block_id for move in raw], [move.memory for move in raw])

    def _runs(self, block_ids: Sequence[int], memories: Sequence[memoryview]) -> Runs:
        return self._pool.runs(block_ids, addresses_of(memories))

    def _fits(self, block_id: int, memory: memoryview, *, encoded: bool) -> bool:
        to_device = self._direction is Direction.TO_DEVICE
        sized = to_device if encoded else memory.nbytes == self._block_bytes
        usable = memory.c_contiguous and (to_device or not memory.readonly)
        if sized and usable and 0 <= block_id < self._num_blocks:
            return True
        _log.error(
            "copy %s: block %d of 0..%d, %d bytes of memory, contiguous %s, read-only %s, encoded %s: expected %d "
            "contiguous bytes; it and those behind it are not made",
            *(self._direction.value, block_id, self._num_blocks - 1, memory.nbytes),
            *(memory.c_contiguous, memory.readonly, encoded, self._block_bytes),
        )
        return False


def _decoded(decode: Decode, source: memoryview, target: memoryview) -> bool:
    try:
        decode(source, target)
    except KVTierError as error:
        _log.error("a block of %d encoded bytes, and those behind it, are not copied: %s", source.nbytes, error)
        return False
    return True
