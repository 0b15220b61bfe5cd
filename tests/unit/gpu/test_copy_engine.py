"""CopyEngine: bytes, order, failures, closing."""

import contextlib
import threading
import warnings

import numpy as np
import pytest
import torch

from kvtier.errors import FormatMismatch, LeaseError, TierTimeout
from kvtier.gpu import BlockMove, CopyEngine, Direction
from kvtier.gpu.copies import _BOUNCE_BLOCKS, _Bounce, _StreamMover, _tensor_over

BLOCKS, BYTES = 8, 4096


@pytest.fixture
def pool():
    values = np.random.default_rng(0).integers(0, 256, (BLOCKS, BYTES), np.uint8)
    return torch.from_numpy(values)


@pytest.fixture
def engine(pool):
    engine = CopyEngine(pool)
    yield engine
    engine.close()


def _memory(fill=0, nbytes=BYTES):
    return np.full(nbytes, fill, np.uint8).data


class Gate:
    """Holds a lane's thread inside a batch: memory whose first touch waits."""

    def __init__(self, engine, direction):
        mover = engine._lanes[direction].mover
        self._move, self.entered, self._open = mover.move, threading.Event(), threading.Event()
        mover.move = self._wait

    def _wait(self, moves, after):
        self.entered.set()
        assert self._open.wait(30)
        return self._move(moves, after)

    def open(self):
        self._open.set()


def test_blocks_go_out_and_come_back(pool, engine):
    before = pool.clone()
    memory = [_memory() for _ in range(BLOCKS)]
    ticket = engine.submit(list(enumerate(memory)), Direction.TO_HOST)
    assert (ticket.wait(30), ticket.done, ticket.total) == (BLOCKS, True, BLOCKS)
    pool.zero_()
    # Shuffled, and from memory that may only be read.
    moves = [(block, memory[block].toreadonly()) for block in (5, 1, 7, 0)]
    assert engine.submit(moves, Direction.TO_DEVICE).wait(30) == 4
    for block in range(BLOCKS):
        assert torch.equal(pool[block], before[block] if block in (5, 1, 7, 0) else torch.zeros_like(pool[block]))


def test_batches_of_a_direction_keep_their_order(pool, engine):
    gate = Gate(engine, Direction.TO_DEVICE)
    tickets = [engine.submit([(0, _memory(fill))], Direction.TO_DEVICE) for fill in range(50)]
    assert gate.entered.wait(30)
    assert not any(ticket.done for ticket in tickets)
    with pytest.raises(TierTimeout, match="1 copies"):
        tickets[0].wait(0)
    gate.open()
    tickets[-1].wait(30)
    assert all(ticket.done for ticket in tickets)
    assert pool[0].eq(49).all()


def test_directions_do_not_wait_for_each_other(pool, engine):
    gate = Gate(engine, Direction.TO_HOST)
    save = engine.submit([(0, _memory())], Direction.TO_HOST)
    assert engine.submit([(1, _memory(9))], Direction.TO_DEVICE).wait(30) == 1
    assert not save.done
    gate.open()
    assert save.wait(30) == 1


@pytest.mark.parametrize(
    ("direction", "bad"),
    [
        (Direction.TO_HOST, (2, _memory(nbytes=BYTES - 1))),
        (Direction.TO_DEVICE, (2, _memory(nbytes=BYTES + 1))),
        (Direction.TO_HOST, (BLOCKS, _memory())),
        (Direction.TO_DEVICE, (-1, _memory())),
        (Direction.TO_HOST, (2, _memory().toreadonly())),
        (Direction.TO_DEVICE, (2, np.zeros((BYTES, 2), np.uint8)[:, 0].data)),
    ],
)
def test_a_bad_copy_ends_its_batch_and_nothing_else(pool, engine, direction, bad):
    before, memory = pool.clone(), [_memory(7) for _ in range(3)]
    ticket = engine.submit([(0, memory[0]), (1, memory[1]), bad, (3, memory[2])], direction)
    assert (ticket.wait(30), ticket.total) == (2, 4)
    assert torch.equal(pool[3], before[3])
    assert bytes(memory[2]) == bytes([7]) * BYTES
    expected = before[1] if direction is Direction.TO_HOST else torch.full_like(pool[1], 7)
    assert torch.equal(pool[1], expected)
    assert torch.equal(torch.frombuffer(bytearray(memory[1]), dtype=torch.uint8), expected)
    assert engine.submit([(3, memory[2])], direction).wait(30) == 1


def test_a_copy_that_dies_under_way_is_reported_and_the_lane_lives(engine, caplog):
    mover = engine._lanes[Direction.TO_HOST].mover
    working = mover.move

    def failing(moves, after):
        raise RuntimeError("device lost")

    mover.move = failing
    assert engine.submit([(0, _memory())], Direction.TO_HOST).wait(30) == 0
    assert "device lost" in caplog.text
    mover.move = working
    assert engine.submit([(0, _memory())], Direction.TO_HOST).wait(30) == 1


def test_memory_is_let_go_of_when_the_ticket_is_done(engine):
    memory = bytearray(BYTES)
    engine.submit([(0, memoryview(memory))], Direction.TO_HOST).wait(30)
    memory.clear()  # raises BufferError while a view of it is alive


def test_close_finishes_what_is_queued_and_ends_the_threads(pool):
    engine = CopyEngine(pool)
    gate = Gate(engine, Direction.TO_DEVICE)
    tickets = [engine.submit([(block, _memory(block))], Direction.TO_DEVICE) for block in range(BLOCKS)]
    threads = [lane.thread for lane in engine._lanes.values()]
    gate.open()
    engine.close()
    engine.close()
    assert all(ticket.good == 1 for ticket in tickets)
    assert not any(thread.is_alive() for thread in threads)
    assert pool.tolist() == [[block] * BYTES for block in range(BLOCKS)]
    with pytest.raises(LeaseError, match="closed"):
        engine.submit([(0, _memory())], Direction.TO_HOST)


def test_an_empty_batch_is_done_at_once(engine):
    assert engine.submit([], Direction.TO_HOST).wait(30) == 0


def test_only_rows_of_bytes_are_a_pool():
    for wrong in (torch.zeros(2, 8), torch.zeros(16, dtype=torch.uint8), torch.zeros(8, 4, dtype=torch.uint8).t()):
        with pytest.raises(FormatMismatch, match="as_bytes"):
            CopyEngine(wrong)


def test_host_memory_as_a_tensor_is_the_same_memory_even_if_read_only():
    data = bytearray(range(256))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(_tensor_over(memoryview(bytes(data))), torch.arange(256, dtype=torch.uint8))
    _tensor_over(memoryview(data))[3] = 200
    assert data[3] == 200


# ---- encoded blocks


def _unpack(source, target):
    """A format of four bytes, each a quarter of the block; a zero is none."""
    values = np.frombuffer(source, np.uint8)
    if not values.all():
        raise FormatMismatch("zero")
    np.frombuffer(target, np.uint8)[:] = np.repeat(values, len(target) // 4)


def _packed(*values):
    return memoryview(bytes(values))


def _unpacked(*values):
    return torch.tensor(values, dtype=torch.uint8).repeat_interleave(BYTES // 4)


def test_encoded_blocks_are_decoded_on_their_way_in(pool, engine):
    before = pool.clone()
    moves = [BlockMove(2, _packed(1, 2, 3, 4), _unpack), (5, _memory(9)), BlockMove(0, _packed(5, 6, 7, 8), _unpack)]
    ticket = engine.submit(moves, Direction.TO_DEVICE)
    assert ticket.wait(30) == 3
    assert ticket.seconds > 0
    assert torch.equal(pool[2], _unpacked(1, 2, 3, 4))
    assert torch.equal(pool[0], _unpacked(5, 6, 7, 8))
    assert pool[5].eq(9).all()
    assert torch.equal(pool[1], before[1])


def test_one_that_cannot_be_decoded_ends_the_batch_there(pool, engine):
    before = pool.clone()
    moves = [BlockMove(at, _packed(1, 1, 1, at != 2), _unpack) for at in range(4)]
    assert engine.submit(moves, Direction.TO_DEVICE).wait(30) == 2
    assert torch.equal(pool[2:], before[2:])
    assert engine.submit([(0, _memory(3))], Direction.TO_DEVICE).wait(30) == 1


def test_nothing_is_encoded_on_its_way_out(engine):
    assert engine.submit([BlockMove(0, _memory(), _unpack)], Direction.TO_HOST).wait(30) == 0


def test_a_bounce_block_is_used_again_only_after_its_copy():
    """Copies of a simulated stream happen when they are waited for."""
    rows, queue = torch.zeros(3 * _BOUNCE_BLOCKS, BYTES, dtype=torch.uint8), []

    def arrive():
        while queue:
            row, host = queue.pop(0)
            rows[row] = host

    bounce = _Bounce(BYTES, arrive, pinned=False)
    for row in range(len(rows)):
        assert bounce.decoded(_unpack, _packed(row, 0, 1, 1)) is None
        queue.append((row, bounce.decoded(_unpack, _packed(row + 1, 1, 2, 3))))
    arrive()
    for row in range(len(rows)):
        assert torch.equal(rows[row], _unpacked(row + 1, 1, 2, 3))


class Stream:
    """As much of a CUDA stream as a lane needs: remembers events, runs everything at once."""

    def __init__(self, device=None, blocking=True):
        self.waits = []

    def wait_event(self, event):
        self.waits.append(event)

    def record(self, stream): ...

    def synchronize(self): ...


def test_the_stream_lane_decodes_copies_and_stops_where_it_must(pool, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    mover = _StreamMover(pool, Direction.TO_DEVICE)
    mover._bounce = _Bounce(BYTES, mover._arrive, pinned=False)
    moves = [BlockMove(at % BLOCKS, _packed(at + 1, 1, 1, 1), _unpack) for at in range(2 * _BOUNCE_BLOCKS + 1)]
    event = object()
    assert mover.move(moves, event) == len(moves)
    assert mover._stream.waits == [event]
    assert torch.equal(pool[0], _unpacked(2 * _BOUNCE_BLOCKS + 1, 1, 1, 1))
    assert torch.equal(pool[3], _unpacked(_BOUNCE_BLOCKS + 4, 1, 1, 1))
    moves = [BlockMove(0, _memory(7)), BlockMove(1, _packed(0, 0, 0, 0), _unpack), BlockMove(2, _memory(8))]
    before = pool.clone()
    assert mover.move(moves, None) == 1
    assert pool[0].eq(7).all()
    assert torch.equal(pool[1:], before[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_encoded_blocks_are_decoded_through_pinned_memory_on_cuda():
    device_pool = torch.zeros(4 * _BOUNCE_BLOCKS, BYTES, dtype=torch.uint8, device="cuda")
    engine = CopyEngine(device_pool)
    moves = [BlockMove(at, _packed(at + 1, 1, 2, 3), _unpack) for at in range(len(device_pool))]
    assert engine.submit(moves, Direction.TO_DEVICE).wait(30) == len(moves)
    for at in range(len(device_pool)):
        assert torch.equal(device_pool[at].cpu(), _unpacked(at + 1, 1, 2, 3))
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_on_cuda_follow_what_was_launched_before(pool):
    device_pool = torch.zeros(BLOCKS, BYTES, dtype=torch.uint8, device="cuda")
    engine = CopyEngine(device_pool)
    for block in range(BLOCKS):
        device_pool[block].copy_(pool[block])
    memory = [_memory() for _ in range(BLOCKS)]
    assert engine.submit(list(enumerate(memory)), Direction.TO_HOST).wait(30) == BLOCKS
    assert [bytes(view) for view in memory] == [row.tobytes() for row in pool.numpy()]
    device_pool.zero_()
    moves = [(block, view.toreadonly()) for block, view in enumerate(memory)]
    assert engine.submit(moves, Direction.TO_DEVICE).wait(30) == BLOCKS
    assert torch.equal(device_pool.cpu(), pool)
    engine.close()
