"""The order of copies and computing, on simulated streams: right for every seed, and wrong once an edge is missing."""

import contextlib
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_world import BYTES, FORGOTTEN, Device, forgetting, holds, memory, repeat, wrong_seeds

from kvtier.gpu import BlockMove, CopyEngine, Direction
from kvtier.gpu.copies import mover
from kvtier.gpu.copies.mover import BOUNCE_BLOCKS
from kvtier.testing.streams import SimulatedStreams, Stuck

LAYERS = 4


@contextlib.contextmanager
def engine_on(streams, **sizes):
    device = Device(streams, **sizes)
    engine = CopyEngine(device.pool, streams)
    yield device, engine
    engine.close()
    streams.run()


def saved_after_it_was_written(streams):
    with engine_on(streams) as (device, engine):
        device.write(3, 7)
        target = memory()
        engine.submit([(3, target)], Direction.TO_HOST).wait()
        return holds(target, 7)


def overwritten_after_it_was_saved(streams):
    with engine_on(streams) as (device, engine):
        device.write(3, 7)
        target = memory()
        ticket = engine.submit([(3, target)], Direction.TO_HOST)
        device.write(2, 1)
        ticket.wait()
        device.write(3, 9)
        streams.run()
        return holds(target, 7)


def loaded_after_it_was_read(streams):
    with engine_on(streams) as (device, engine):
        device.write(3, 7)
        seen = device.read(3)
        engine.submit([(3, memory(9))], Direction.TO_DEVICE).wait()
        loaded = device.read(3)
        streams.run()
        return holds(seen, 7) and holds(loaded, 9)


def memory_is_reused_after_a_load(streams):
    with engine_on(streams) as (device, engine):
        source = memory(9)
        engine.submit([(3, source)], Direction.TO_DEVICE).wait()
        source[:] = memory(1)
        seen = device.read(3)
        streams.run()
        return holds(seen, 9)


def more_encoded_blocks_than_bounce_blocks(streams):
    blocks = 2 * BOUNCE_BLOCKS + 3
    with engine_on(streams, blocks=blocks) as (device, engine):
        moves = [BlockMove(at, memory(at + 1, 1), repeat) for at in range(blocks)]
        assert engine.submit(moves, Direction.TO_DEVICE).wait() == blocks
        return all(holds(device.pool[at].numpy(), at + 1) for at in range(blocks))


def computing_follows_layer_by_layer(streams):
    with engine_on(streams) as (device, engine):
        old = [device.read(at) for at in (1, 2, 5)]
        jobs = [[(1, memory(11)), BlockMove(2, memory(12, 1), repeat)], [(5, memory(15))]]
        tickets, gate = engine.submit_layers(jobs, LAYERS)
        seen = []
        for layer in range(LAYERS):
            gate.wait(layer)
            part = slice(layer * BYTES // LAYERS, (layer + 1) * BYTES // LAYERS)
            seen += [(device.read(at, part), at + 10) for at in (1, 2, 5)]
        assert [ticket.wait() for ticket in tickets] == [2, 1]
        streams.run()
        return all(holds(data, value) for data, value in seen) and all(holds(data, 0) for data in old)


def memory_is_reused_after_a_layered_load(streams):
    with engine_on(streams) as (device, engine):
        source = memory(9)
        (ticket,), gate = engine.submit_layers([[(3, source)]], LAYERS)
        for layer in range(LAYERS):
            gate.wait(layer)
        seen = device.read(3)
        ticket.wait()
        source[:] = memory(1)
        streams.run()
        return holds(seen, 9)


def many_pieces_of_a_batch(streams):
    blocks = 3 * 4 + 1
    with patch.object(mover, "_PIECE_BLOCKS", 4), engine_on(streams, blocks=blocks) as (device, engine):
        for at in range(blocks):
            device.write(at, at + 1)
        targets = [memory() for _ in range(blocks)]
        assert engine.submit(list(enumerate(targets)), Direction.TO_HOST).wait() == blocks
        return all(holds(target, at + 1) for at, target in enumerate(targets))


def a_failed_save_leaves_its_memory_alone(streams):
    streams.fails = {1}.__contains__
    with engine_on(streams) as (device, engine):
        for at in range(8):
            device.write(at, at + 1)
        first = [memory() for _ in range(4)]
        moves = [(at, target) for at, target in enumerate(first)]
        # Copies of which some were launched when one fails: a driver may refuse in the middle of a batch.
        copy = streams.copy

        def halves(stream, runs, direction):
            copy(stream, runs.slice(0, 2), direction)
            copy(stream, runs.slice(1, 2), direction)

        streams.copy = halves
        assert engine.submit(moves, Direction.TO_HOST).wait() == 0
        for target in first:
            target[:] = memory(99)
        streams.run()
        return all(holds(target, 99) for target in first)


EDGES = {
    saved_after_it_was_written: ["a stream waits for an event", "a batch waits for its arrival"],
    overwritten_after_it_was_saved: ["a stream waits for an event", "a batch waits for its arrival"],
    loaded_after_it_was_read: ["a stream waits for an event", "a batch waits for its arrival"],
    memory_is_reused_after_a_load: ["a batch waits for its arrival"],
    more_encoded_blocks_than_bounce_blocks: ["a bounce block waits for its copy", "a batch waits for its arrival"],
    computing_follows_layer_by_layer: [
        "a layer is waited for",
        "a gate opens with an event",
        "a stream waits for an event",
    ],
    memory_is_reused_after_a_layered_load: ["a layered load waits for its arrival"],
    many_pieces_of_a_batch: ["a batch waits for its arrival", "a stream waits for an event"],
    a_failed_save_leaves_its_memory_alone: ["a failed batch waits for what was launched"],
}


@pytest.mark.parametrize("scenario", EDGES, ids=lambda scenario: scenario.__name__)
def test_every_order_is_right(scenario):
    assert wrong_seeds(scenario) == []


@pytest.mark.parametrize(
    ("scenario", "edge"),
    [(scenario, edge) for scenario, edges in EDGES.items() for edge in edges],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_missing_edge_shows(scenario, edge):
    with forgetting(edge):
        assert wrong_seeds(scenario) != []


def test_every_edge_was_left_out_once():
    assert set().union(*EDGES.values()) == set(FORGOTTEN)


class Program:
    """Writes, saves, loads and reads of a few blocks, with the host's waits that a scheduler's plans make."""

    def __init__(self, device, engine):
        self.device, self.engine = device, engine
        self.held = [0] * len(device.pool)
        self.saves, self.loads, self.reads = [], [], []

    def run(self, verb, block, value):
        for ticket, loaded in self.loads:
            # What is being loaded is not touched before its load was reported.
            if loaded == block:
                ticket.wait()
        getattr(self, verb)(block, value)

    def _fence(self, block, value):
        for ticket, saved, _, _ in self.saves:
            if saved == block:
                ticket.wait()
        self.held[block] = value

    def write(self, block, value):
        self._fence(block, value)
        self.device.write(block, value)

    def load(self, block, value):
        self._fence(block, value)
        self.loads.append((self.engine.submit([(block, memory(value))], Direction.TO_DEVICE), block))

    def save(self, block, value):
        target = memory()
        ticket = self.engine.submit([(block, target)], Direction.TO_HOST)
        self.saves.append((ticket, block, target, self.held[block]))

    def read(self, block, value):
        self.reads.append((self.device.read(block), self.held[block]))

    def check(self):
        for ticket, _, target, value in self.saves:
            assert ticket.wait() == 1
            assert holds(target, value)
        self.device.streams.run()
        assert all(holds(seen, value) for seen, value in self.reads)
        assert all(holds(row.numpy(), value) for row, value in zip(self.device.pool, self.held, strict=True))


@settings(max_examples=60)
@given(st.data())
def test_any_program_of_writes_saves_and_loads_is_right_in_any_order(data):
    """Every choice of the simulation is Hypothesis's, and so is the program: a save holds what its block last held."""
    streams = SimulatedStreams(lambda n: data.draw(st.integers(0, n - 1)) if n > 1 else 0, piece_bytes=BYTES // 2)
    verbs = data.draw(st.lists(st.tuples(st.sampled_from(["write", "save", "load", "read"]), st.integers(0, 3))))
    with engine_on(streams, blocks=4) as (device, engine):
        program = Program(device, engine)
        for value, (verb, block) in enumerate(verbs, 1):
            program.run(verb, block, value)
        program.check()


# ---- the simulator itself


def test_a_seed_repeats_itself():
    def trace(seed):
        streams, order = SimulatedStreams(seed), []
        for at in range(3):
            side = streams.side()
            for step in range(3):
                streams.launch(lambda at=at, step=step: order.append((at, step)), stream=side)
        streams.run()
        return order

    assert trace(1) == trace(1)
    assert len({tuple(trace(seed)) for seed in range(20)}) > 8
    assert all([step for at, step in trace(seed) if at == 1] == [0, 1, 2] for seed in range(20))


def test_events_order_streams():
    for seed in range(30):
        streams, order = SimulatedStreams(seed), []
        side = streams.side()
        streams.launch(lambda order=order: order.append("before"))
        event = streams.record(streams.compute())
        streams.wait(side, event)
        streams.launch(lambda order=order: order.append("after"), stream=side)
        streams.run()
        assert order == ["before", "after"]


def test_waiting_for_what_never_comes_is_an_error():
    streams, other = SimulatedStreams(), SimulatedStreams(drift=0)
    with pytest.raises(Stuck, match="no stream and no lane"):
        streams.flag().wait()
    streams.wait(streams.side(), other.record(other.compute()))
    with pytest.raises(Stuck, match="1 streams and lanes"):
        streams.run()


def test_an_eager_host_computes_at_once_and_waits_itself():
    streams = SimulatedStreams(3, eager=True, drift=0)
    side, target = streams.side(), np.zeros(4, np.uint8)
    streams.launch(lambda: target.fill(5), stream=side)
    streams.synchronize(streams.record(streams.compute()))
    assert not target.any()
    streams.wait(streams.compute(), streams.record(side))
    assert target.all()


def test_memory_is_not_unpinned_under_a_copy():
    streams = SimulatedStreams(drift=0)
    block = memory()
    assert streams.pin(block)
    streams.launch(lambda: None, stream=streams.side())
    with pytest.raises(Stuck, match="unpinned"):
        streams.unpin(block)
    streams.run()
    streams.unpin(block)
    assert streams.pinned == set()
