"""Decode steps by replay: buckets, padding and results, with a capture that runs the step again."""

from typing import NamedTuple

import pytest
import torch
from tiny_model import tiny_model

from kvtier.errors import CapacityError
from kvtier.gpu.graphs import Captured, DecodeBuffers, DecodeGraphs, make_decode_graphs
from kvtier.gpu.paged import PagedAttention
from kvtier.gpu.storage import DevicePool

SIZE, BLOCKS = 4, 64
CPU = torch.device("cpu")


class Span(NamedTuple):
    block_ids: tuple[int, ...]
    start: int
    stop: int


class Device:
    """What `capture` is on CUDA: the step runs when it is captured and when it is replayed, from the same buffers."""

    def __init__(self):
        self.captures = 0
        self.fails = False

    def capture(self, step):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1
        output = step()
        return Captured(lambda: output.copy_(step()), output)


class BufferedAttention:
    """Reads its plan from buffers at every call, row by row. Implements `StaticAttention`."""

    def __init__(self, pool, heads):
        self.pool, self.heads = pool, heads
        self.written = set()

    def plan_decode(self, buffers, longest):
        self.buffers, self.longest = buffers, longest
        assert buffers.tables.shape[1] * SIZE == longest

    def __call__(self, layer, q, k, v):
        out = torch.zeros_like(q)
        for row, (slot, length) in enumerate(
            zip(self.buffers.slots.tolist(), self.buffers.lengths.tolist(), strict=True)
        ):
            if slot < 0:
                assert length == 1
                continue
            assert length <= self.longest
            planes = self.pool.tensor[:, layer]
            for plane, new in ((0, k), (1, v)):
                planes[slot // SIZE, plane, :, slot % SIZE] = new[row]
            self.written.add(slot)
            table = self.buffers.tables[row, : -(-length // SIZE)].long()
            keys, values = (planes[table, plane].transpose(0, 1).flatten(1, 2)[:, :length] for plane in (0, 1))
            group = self.heads // keys.shape[0]
            keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
            scores = (keys @ q[row].unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
            out[row] = (scores.softmax(-1).unsqueeze(1) @ values).squeeze(1)
        return out


@pytest.fixture
def model():
    return tiny_model().model


def make_pool(model):
    return DevicePool(model.layout(SIZE), BLOCKS, "cpu")


def prefill(model, pool, spans, prompts):
    attention = PagedAttention(pool, model.config.heads)
    attention.plan(spans)
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.tensor([at for span in spans for at in range(span.start, span.stop)])
    ends = torch.tensor([span.stop - span.start for span in spans]).cumsum(0) - 1
    return model.forward(tokens, positions, attention, ends)


def sequences(lengths):
    """Prompts of these lengths, in blocks that are scattered over the pool, with room for a few tokens more."""
    free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    spans, prompts = [], []
    for number, length in enumerate(lengths):
        blocks = tuple(free.pop() for _ in range(-(-(length + 9) // SIZE)))
        spans.append(Span(blocks, 0, length))
        prompts.append([(7 * number + 3 * at) % 250 + 1 for at in range(length)])
    return spans, prompts


@pytest.mark.parametrize("lengths", [(5,), (1, 4, 8), (3, 16, 5, 40, 7), (12,) * 8])
def test_replayed_steps_give_what_launched_ones_give(model, lengths):
    device, pools = Device(), [make_pool(model), make_pool(model)]
    graphs = make_decode_graphs(model.forward, BufferedAttention(pools[0], 4), pools[0], device.capture)
    spans, prompts = sequences(lengths)
    for pool in pools:
        logits = prefill(model, pool, spans, prompts)
    for _ in range(9):
        tokens = logits.argmax(-1).tolist()
        spans = [Span(span.block_ids, span.stop, span.stop + 1) for span in spans]
        expected = prefill(model, pools[1], spans, [[token] for token in tokens])
        logits = graphs.run(spans, tokens)
        assert logits.shape == expected.shape
        assert torch.allclose(logits, expected, atol=1e-5)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.allclose(pools[0].tensor, pools[1].tensor, atol=1e-6)
    assert (device.captures, graphs.replays, graphs.failures) == (1, 9, 0)


def test_padding_writes_nowhere(model):
    pool, device = make_pool(model), Device()
    attention = BufferedAttention(pool, 4)
    graphs = make_decode_graphs(model.forward, attention, pool, device.capture)
    spans, prompts = sequences((5, 6, 7))
    prefill(model, pool, spans, prompts)
    before = pool.tensor.clone()
    graphs.run([Span(span.block_ids, span.stop, span.stop + 1) for span in spans], [1, 2, 3])
    slots = {span.block_ids[span.stop // SIZE] * SIZE + span.stop % SIZE for span in spans}
    assert attention.written == slots
    changed = (pool.tensor != before).any(-1).any(1).any(1).any(1).nonzero().tolist()
    assert {block * SIZE + place for block, place in changed} == slots


def graphs_of(batches, max_tokens=100, device=None):
    sizes = []

    def step(buffers, longest):
        sizes.append((len(buffers.rows), longest))
        return buffers.tokens.float().unsqueeze(1) * 2

    device = device or Device()
    return DecodeGraphs(step, SIZE, max_tokens, CPU, device.capture, batches), sizes


def lone(count, length=10):
    return [Span(tuple(range(30)), length - 1, length)] * count


def test_a_step_goes_to_the_smallest_graph_that_holds_it():
    graphs, sizes = graphs_of((1, 4, 8), max_tokens=4096)
    for count, length in ((1, 10), (2, 10), (4, 128), (5, 129), (8, 512), (8, 513), (1, 10)):
        span = Span(tuple(range(length)), length - 1, length)
        assert graphs.run([span] * count, list(range(count))).flatten().tolist() == [2 * at for at in range(count)]
    # A size is captured once; the step runs again at each replay.
    assert list(dict.fromkeys(sizes)) == [(1, 128), (4, 128), (8, 512), (8, 2048)]


def test_graphs_of_all_sizes_take_memory_for_logits_once():
    graphs, _ = graphs_of((1, 4, 8), max_tokens=4096)
    outputs = [graphs.run(lone(count, length), [0] * count) for count, length in ((1, 10), (4, 10), (8, 120))]
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 1
    assert outputs[0].untyped_storage().nbytes() == 8 * outputs[0].itemsize


@pytest.mark.parametrize(
    "spans",
    [
        [],
        lone(9),
        [Span((0, 1), 2, 4)],
        [*lone(1), Span((0, 1, 2), 0, 9)],
        [Span(tuple(range(26)), 100, 101)],
    ],
    ids=["nothing", "too many", "two new tokens", "a prefill among them", "too long"],
)
def test_what_is_no_decode_step_of_a_known_size_is_computed_otherwise(spans):
    graphs, sizes = graphs_of((1, 8))
    assert graphs.run(spans, [0] * len(spans)) is None
    assert sizes == []


def test_a_size_whose_capture_fails_is_launched_from_then_on(caplog):
    device = Device()
    graphs, _ = graphs_of((1, 8), device=device)
    device.fails = True
    assert graphs.run(lone(3), [1, 2, 3]) is None
    device.fails = False
    assert graphs.run(lone(4), [1, 2, 3, 4]) is None
    assert graphs.run(lone(1), [5]) is not None
    assert (graphs.failures, device.captures) == (1, 1)
    assert "8 rows and 100 tokens" in caplog.text


def test_attention_that_plans_on_the_host_has_no_graphs(model):
    pool = make_pool(model)
    assert make_decode_graphs(model.forward, PagedAttention(pool, 4), pool, Device().capture) is None


@pytest.mark.parametrize("batches", [(), (0, 1), (4, 2), (2, 2)])
def test_batches_ascend(batches):
    with pytest.raises(CapacityError, match="ascending"):
        graphs_of(batches)


def test_buffers_keep_their_addresses():
    buffers = DecodeBuffers(4, 5, CPU)
    addresses = [tensor.data_ptr() for tensor in (buffers.tokens, buffers.tables, buffers.lengths, buffers.slots)]
    buffers.fill([Span((9, 7, 8), 9, 10), Span((3,), 0, 1)], [5, 6], SIZE)
    assert buffers.tokens.tolist() == [5, 6, 0, 0]
    assert buffers.positions.tolist() == [9, 0, 0, 0]
    assert buffers.slots.tolist() == [8 * SIZE + 1, 3 * SIZE, -1, -1]
    assert buffers.lengths.tolist() == [10, 1, 1, 1]
    assert buffers.tables.tolist() == [[9, 7, 8, 0, 0], [3, 0, 0, 0, 0], [0] * 5, [0] * 5]
    buffers.fill([Span((2,), 1, 2)], [9], SIZE)
    assert buffers.slots.tolist() == [2 * SIZE + 1, -1, -1, -1]
    assert buffers.tables[0].tolist() == [2, 0, 0, 0, 0]
    assert addresses == [
        tensor.data_ptr() for tensor in (buffers.tokens, buffers.tables, buffers.lengths, buffers.slots)
    ]


def test_the_kernels_attend_from_buffers(model):
    """Triton's own attention under the interpreter, against the launched step."""
    pytest.importorskip("triton")
    from kvtier.gpu.triton_attention import TritonAttention

    pools = [make_pool(model), make_pool(model)]
    graphs = make_decode_graphs(model.forward, TritonAttention(pools[0], 4), pools[0], Device().capture)
    spans, prompts = sequences((3, 9))
    for pool in pools:
        logits = prefill(model, pool, spans, prompts)
    for _ in range(2):
        tokens = logits.argmax(-1).tolist()
        spans = [Span(span.block_ids, span.stop, span.stop + 1) for span in spans]
        expected = prefill(model, pools[1], spans, [[token] for token in tokens])
        logits = graphs.run(spans, tokens)
        assert torch.allclose(logits, expected, atol=1e-4)
    assert torch.allclose(pools[0].tensor, pools[1].tensor, atol=1e-5)
