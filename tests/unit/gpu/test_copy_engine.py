"""CopyEngine: bytes, order, failures, closing."""

import threading

import numpy as np
import pytest
import torch

from kvtier.errors import FormatMismatch, LeaseError, TierTimeout
from kvtier.gpu import BlockMove, CopyEngine, Direction
from kvtier.gpu.copies.mover import BOUNCE_BLOCKS
from kvtier.gpu.streams import HostStreams, Runs, address_of

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
    """Holds a lane's thread at the start of its batches."""

    def __init__(self, engine, direction):
        mover = engine._movers[direction]
        self._move, self.entered, self._open = mover.move, threading.Event(), threading.Event()
        mover.move = self._wait

    def _wait(self, *batch):
        self.entered.set()
        assert self._open.wait(30)
        return (yield from self._move(*batch))

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
    mover = engine._movers[Direction.TO_HOST]
    working = mover.move

    def failing(*batch):
        yield
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


# ---- layer by layer


def _slice(row, layer, layers=4):
    return row[layer * BYTES // layers : (layer + 1) * BYTES // layers]


def test_a_layered_load_arrives_layer_by_layer(pool, engine):
    pool.zero_()
    mover, opened = engine._movers[Direction.TO_DEVICE], threading.Event()
    copy, launched = mover._streams.copy, []

    def one_by_one(stream, runs, direction):
        launched.append(len(runs))
        # Layers 0 and 1 pass.
        assert len(launched) < 3 or opened.wait(30)
        copy(stream, runs, direction)

    mover._streams.copy = one_by_one
    jobs = [[(0, _memory(1)), (1, _memory(2))], [(5, _memory(3))]]
    tickets, gate = engine.submit_layers(jobs, 4)
    for layer in (0, 1):
        gate.wait(layer)
        assert [_slice(pool[at], layer).eq(value).all() for at, value in ((0, 1), (1, 2), (5, 3))] == [True] * 3
    assert not any(ticket.done for ticket in tickets)
    assert not _slice(pool[0], 2).any()
    opened.set()
    gate.wait(3)
    assert _slice(pool[0], 2).eq(1).all()
    assert [ticket.wait(30) for ticket in tickets] == [2, 1]
    assert all(ticket.seconds > 0 for ticket in tickets)
    assert launched == [3] * 4


def test_of_layered_loads_each_fails_alone_and_none_holds_up_the_gate(pool, engine):
    before = pool.clone()
    jobs = [
        [(0, _memory(1)), BlockMove(1, _packed(0, 1, 1, 1), _unpack), (2, _memory(1))],
        [BlockMove(3, _packed(1, 2, 3, 4), _unpack), (4, _memory(4))],
        [(BLOCKS, _memory(1))],
    ]
    tickets, gate = engine.submit_layers(jobs, 4)
    for layer in range(4):
        gate.wait(layer)
    assert [ticket.wait(30) for ticket in tickets] == [1, 2, 0]
    assert torch.equal(pool[3], _unpacked(1, 2, 3, 4))
    assert (pool[0].eq(1).all(), pool[4].eq(4).all()) == (True, True)
    assert torch.equal(pool[[1, 2]], before[[1, 2]])


def test_a_layered_load_that_dies_half_way_opens_the_gate_and_has_failed(pool, engine):
    streams = engine._movers[Direction.TO_DEVICE]._streams
    copy, left = streams.copy, iter([True, True])

    def dies(stream, runs, direction):
        if not next(left, False):
            raise RuntimeError("device lost")
        copy(stream, runs, direction)

    streams.copy = dies
    (ticket,), gate = engine.submit_layers([[(0, _memory(1))]], 4)
    for layer in range(4):
        gate.wait(layer)
    assert (ticket.wait(30), ticket.total) == (0, 1)


def test_layers_are_equal_slices(engine):
    with pytest.raises(FormatMismatch, match="in 3 layers"):
        engine.submit_layers([[(0, _memory())]], 3)


# ---- runs


def test_runs_that_follow_each_other_on_both_sides_are_joined():
    runs = Runs.of([0, 100, 200, 400, 500, 600], [1000, 1100, 1200, 1300, 1400, 1600], 100)
    joined = runs.merged()
    assert joined.device.tolist() == [0, 400, 600]
    assert joined.host.tolist() == [1000, 1300, 1600]
    assert joined.nbytes.tolist() == [300, 200, 100]
    assert joined.total == runs.total == 600
    middle = runs.slice(1, 4)
    assert (middle.device[1], middle.host[1], middle.nbytes[1]) == (125, 1125, 25)
    assert len(Runs.of([], [], 5).merged()) == 0


def test_an_address_is_that_of_the_memory_even_if_it_is_read_only():
    data = bytearray(range(64))
    target = np.zeros(64, np.uint8)
    source = address_of(memoryview(data).toreadonly()[16:])
    HostStreams().copy(None, Runs.of([target.ctypes.data], [source], 8), Direction.TO_DEVICE)
    assert target[:9].tolist() == [*range(16, 24), 0]


def test_work_of_a_lane_that_raises_does_not_end_the_lane(caplog):
    lane, done = HostStreams().lane("test"), threading.Event()

    def failing():
        yield None
        raise RuntimeError("lost")

    def working():
        yield None
        done.set()

    lane.submit(failing())
    lane.submit(working())
    assert done.wait(30)
    lane.close()
    lane.close()
    assert "lost" in caplog.text


def test_work_learns_that_what_it_waited_for_has_failed():
    seen = []

    class Failing(HostStreams):
        def synchronize(self, event):
            raise RuntimeError(f"event {event} failed")

    def work():
        try:
            yield 5
        except RuntimeError as error:
            seen.append(str(error))

    lane = Failing().lane("test")
    lane.submit(work())
    lane.close()
    assert seen == ["event 5 failed"]


# ---- CUDA


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_encoded_blocks_are_decoded_through_pinned_memory_on_cuda():
    device_pool = torch.zeros(4 * BOUNCE_BLOCKS, BYTES, dtype=torch.uint8, device="cuda")
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
