"""Paged attention against naive attention in float64: torch's, and the compiled one at every CPU level."""

import random
from itertools import chain
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional

from kvtier.errors import CapacityError, FormatMismatch
from kvtier.gpu import DevicePool
from kvtier.gpu.attention import CpuAttention, PagedAttention
from kvtier.gpu.batches import Geometry, Tuning, make_plan
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.native import attention as native

LAYERS = 2


@pytest.fixture(params=native.implementations())
def attention_of(request):
    """(pool, heads, windows=()) -> attention, in each implementation that this machine has."""
    with native.using(request.param):
        yield PagedAttention if request.param == "reference" else CpuAttention


class Span(NamedTuple):
    block_ids: tuple[int, ...]
    start: int
    stop: int


def _pool(*, kv_heads=3, head_dim=64, block_size=16, dtype="float32", blocks=64):
    group = LayerGroup(GroupKind.GQA, tuple(range(LAYERS)), 2, kv_heads, head_dim, dtype=dtype)
    pool = DevicePool(Layout(block_size, (group,)), blocks, "cpu")
    # What a slot held before must not matter.
    pool.tensor.fill_(float("nan"))
    return pool


def _naive(q, k, v, start):
    """Float64 attention of q [T, heads, d], tokens start.. of a sequence with k, v [S, kv_heads, d]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (tensor.double() for tensor in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    visible = torch.arange(len(k))[None] <= start + torch.arange(len(q))[:, None]
    return torch.einsum("hts,shd->thd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)


class Case:
    """Sequences in shuffled blocks, whose prefixes are in the pool; runs a step and knows what it must give."""

    def __init__(self, spans, *, heads, seed=0, **shape):
        self.pool = _pool(**shape)
        self.heads = heads
        group, size = self.pool.group, self.pool.layout.block_size
        random_ids = random.Random(seed)
        ids = random_ids.sample(range(self.pool.blocks.num_blocks), self.pool.blocks.num_blocks)
        generator = torch.Generator().manual_seed(seed)

        def draw(tokens, count):
            values = torch.randn(LAYERS, tokens, count, group.head_dim, generator=generator)
            return values.to(self.pool.tensor.dtype)

        self.spans, self.sequences = [], []
        for start, stop in spans:
            # Tables may be longer than the tokens need.
            blocks = tuple(ids.pop() for _ in range(-(-stop // size) + random_ids.randint(0, 1)))
            self.spans.append(Span(blocks, start, stop))
            k, v = draw(stop, group.kv_heads), draw(stop, group.kv_heads)
            self.sequences.append((draw(stop - start, heads), k, v))
            for at in range(start):
                self.pool.tensor[blocks[at // size], :, 0, :, at % size] = k[:, at]
                self.pool.tensor[blocks[at // size], :, 1, :, at % size] = v[:, at]

    def run(self, attention):
        """Per layer, (result, float64 reference), flat over the batch."""
        attention.plan(self.spans)
        pairs = []
        for layer in range(LAYERS):
            new = [(q[layer], k[layer, s.start :], v[layer, s.start :]) for s, (q, k, v) in self._both()]
            # Views into one buffer, strided over tokens, as a fused projection gives them.
            buffer = torch.cat([torch.cat(parts, 1) for parts in new])
            q, k, v = buffer.split([self.heads, self.pool.group.kv_heads, self.pool.group.kv_heads], 1)
            expected = [_naive(q[layer], k[layer], v[layer], s.start) for s, (q, k, v) in self._both()]
            pairs.append((attention(layer, q, k, v), torch.cat(expected)))
        return pairs

    def _both(self):
        return zip(self.spans, self.sequences, strict=True)

    def check_written(self):
        """Every new token is in its slot, in every layer, and nothing else was touched."""
        size = self.pool.layout.block_size
        rest = self.pool.tensor.clone()
        for span, (_, k, v) in self._both():
            for at in range(span.stop):
                slot = self.pool.tensor[span.block_ids[at // size], :, :, :, at % size]
                assert torch.equal(slot, torch.stack([k[:, at], v[:, at]], 1))
                rest[span.block_ids[at // size], :, :, :, at % size] = float("nan")
        assert rest.isnan().all()


RAGGED = [
    pytest.param([(0, 1)], id="first token"),
    pytest.param([(15, 16), (16, 17), (17, 18)], id="decode around a block's edge"),
    pytest.param([(31, 32)] * 4, id="decode, equal lengths"),
    pytest.param([(0, 1), (200, 201), (5, 6), (90, 91), (91, 92), (16, 17)], id="decode, ragged"),
    pytest.param([(0, 16), (0, 15), (0, 17)], id="prefill around a block's edge"),
    pytest.param([(0, 64), (0, 65), (0, 128)], id="prefill around a chunk's edge"),
    pytest.param([(16, 48), (15, 33), (3, 5), (100, 230)], id="prefill with prefix"),
    pytest.param([(40, 41), (0, 33), (7, 8), (32, 97), (0, 1), (16, 18)], id="mixed"),
]


@pytest.mark.parametrize("spans", RAGGED)
def test_equals_float64_attention(attention_of, spans):
    case = Case(spans, heads=9)
    for result, expected in case.run(attention_of(case.pool, 9)):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=3e-6)
    case.check_written()


SHAPES = [(64, 6, 2), (64, 8, 1), (80, 2, 2), (96, 8, 2), (128, 14, 2), (192, 5, 1), (256, 32, 2)]


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_shape(attention_of, head_dim, heads, kv_heads, dtype):
    case = Case([(37, 38), (0, 21), (20, 95), (4, 5)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    tolerance = {"float32": 3e-6, "bfloat16": 2e-2}[dtype]
    for result, expected in case.run(attention_of(case.pool, heads)):
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    case.check_written()


@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
def test_every_block_size(attention_of, block_size):
    case = Case([(5, 6), (0, 7), (31, 64), (32, 33)], heads=6, block_size=block_size, blocks=160)
    for result, expected in case.run(attention_of(case.pool, 6)):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=3e-6)
    case.check_written()


@pytest.mark.parametrize("span", [(0, 8), (13, 20), (125, 133), (126, 130)])
def test_a_few_new_tokens(attention_of, span):
    """Draft tokens: each sees those before it, around the edges of blocks and pieces."""
    case = Case([span, (255, 257), (40, 41)], heads=6)
    for result, expected in case.run(attention_of(case.pool, 6)):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=3e-6)
    case.check_written()


def test_more_threads_change_no_bit(attention_of):
    case = Case([(300, 301), (0, 1), (5, 9), (0, 150), (128, 129)], heads=9, blocks=96)
    ((alone, _), _) = case.run(attention_of(case.pool, 9))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ((shared, _), _) = case.run(attention_of(case.pool, 9))
    finally:
        torch.set_num_threads(before)
    decodes = torch.tensor([0, 1, 2, 3, 4, 5, -1])
    assert torch.equal(shared[decodes], alone[decodes])


def test_new_tokens_that_are_strided_over_heads_are_taken_too(attention_of):
    case = Case([(20, 21), (0, 3), (0, 30)], heads=6)
    attention = attention_of(case.pool, 6)
    attention.plan(case.spans)
    parts = [(q[0], k[0, s.start :], v[0, s.start :]) for s, (q, k, v) in case._both()]
    q, k, v = (torch.cat(column) for column in zip(*parts, strict=True))
    expected = attention(0, q, k, v)
    swapped = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    assert torch.equal(attention(0, *swapped), expected)


@pytest.mark.parametrize("window", [1, 7, 16, 130, 1000])
def test_windows(attention_of, window):
    """Layer 0 sees everything, layer 1 the last tokens."""
    case = Case([(0, 1), (31, 32), (300, 301), (129, 133), (5, 60)], heads=6, blocks=96)
    attention = attention_of(case.pool, 6, (None, window))
    (full, seen), (result, _) = case.run(attention)
    torch.testing.assert_close(full.double(), seen, rtol=1e-5, atol=3e-6)
    first = 0
    for span, (q, k, v) in case._both():
        for at in range(span.start, span.stop):
            low = max(0, at + 1 - window)
            alone = _naive(q[1, at - span.start, None], k[1, low : at + 1], v[1, low : at + 1], at - low)
            torch.testing.assert_close(result[first, None].double(), alone, rtol=1e-5, atol=3e-6)
            first += 1


def test_is_as_accurate_as_plain_attention(attention_of):
    case = Case([(700, 701), (0, 300), (500, 800)], heads=9, blocks=160, seed=3)
    ((result, expected), _) = case.run(attention_of(case.pool, 9))
    first = 0
    for span, (q, k, v) in zip(case.spans, case.sequences, strict=True):
        last = first + span.stop - span.start
        mask = torch.arange(span.stop)[None] <= torch.arange(span.start, span.stop)[:, None]
        parts = (tensor[0].transpose(0, 1)[None] for tensor in (q, k, v))
        plain = functional.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        ours = (result[first:last].double() - expected[first:last]).abs().max()
        assert ours <= 2 * (plain.double() - expected[first:last]).abs().max()
        first = last


def test_a_sequence_gets_the_same_result_alone_and_in_any_company(attention_of):
    spans = [(30, 31), (0, 40), (64, 65), (9, 10)]
    together = Case(spans, heads=9)
    ((batched, _), _) = together.run(attention_of(together.pool, 9))
    first = 0
    for span, sequence in zip(together.spans, together.sequences, strict=True):
        together.spans, together.sequences = [span], [sequence]
        ((alone, _), _) = together.run(attention_of(together.pool, 9))
        torch.testing.assert_close(batched[first : first + len(alone)], alone, rtol=1e-6, atol=1e-6)
        first += len(alone)


def test_a_step_in_chunks_equals_one_prefill(attention_of):
    whole = Case([(0, 150)], heads=9, seed=5)
    ((expected, _), _) = whole.run(attention_of(whole.pool, 9))
    attention, (q, k, v) = attention_of(whole.pool, 9), whole.sequences[0]
    whole.pool.tensor.fill_(float("nan"))
    pieces = []
    for start, stop in ((0, 1), (1, 17), (17, 96), (96, 149), (149, 150)):
        attention.plan([whole.spans[0]._replace(start=start, stop=stop)])
        pieces.append(attention(0, q[0, start:stop], k[0, start:stop], v[0, start:stop]))
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-5, atol=3e-6)


def test_an_empty_step(attention_of):
    attention = attention_of(_pool(), 9)
    attention.plan([])
    empty = torch.empty(0, 3, 64)
    assert attention(0, torch.empty(0, 9, 64), empty, empty).shape == (0, 9, 64)


def test_decodes_are_batched_by_length_within_the_limits():
    geometry, tuning = Geometry(64, 2, 3, 16, torch.device("cpu")), Tuning(64, 1024, 64)
    stops = [1000, 16, 130, 128, 120, 16, 3, 500, 500, 500]
    spans = [Span(tuple(range(-(-stop // 16))), stop - 1, stop) for stop in stops]
    plan = make_plan(spans, geometry, tuning, torch.float32)
    batches = [batch.tokens.tolist() for batch in plan.decodes]
    assert sorted(chain.from_iterable(batches)) == list(range(len(stops)))
    assert [[stops[at] for at in batch] for batch in batches] == [
        [1000],
        [500, 500],
        [500],
        [130, 128, 120],
        [16, 16, 3],
    ]
    assert [batch.length for batch in plan.decodes] == [1000, 500, 500, 130, 16]
    assert plan.decodes[0].mask is None
    assert plan.decodes[3].padding.numel() == 2 * 3 * (2 + 10)


@pytest.mark.parametrize(
    "span",
    [
        Span((0,), 3, 3),
        Span((0,), 4, 3),
        Span((0,), -1, 3),
        Span((0,), 0, 17),
        Span((), 0, 1),
        Span((64,), 0, 1),
        Span((-1, 0), 0, 20),
    ],
)
def test_a_span_that_does_not_fit_is_refused_and_the_plan_stays(attention_of, span):
    attention = attention_of(_pool(), 9)
    attention.plan([Span((1,), 0, 2)])
    with pytest.raises(CapacityError):
        attention.plan([Span((2,), 0, 2), span])
    q, kv = torch.randn(2, 9, 64), torch.randn(2, 3, 64)
    assert attention(0, q, kv, kv).shape == (2, 9, 64)


def test_tensors_of_another_step_are_refused_before_they_are_written(attention_of):
    pool = _pool()
    attention = attention_of(pool, 9)
    attention.plan([Span((1,), 0, 2)])
    q, kv = torch.randn(2, 9, 64), torch.randn(2, 3, 64)
    wrong = [
        (0, torch.randn(3, 9, 64), kv, kv),
        (0, q, torch.randn(3, 3, 64), kv),
        (0, q, kv, torch.randn(2, 3, 32)),
        (0, q.bfloat16(), kv, kv),
        (LAYERS, q, kv, kv),
        (-1, q, kv, kv),
    ]
    for arguments in wrong:
        with pytest.raises(FormatMismatch):
            attention(*arguments)
    assert pool.tensor.isnan().all()


def test_pools_without_attention_are_refused():
    with pytest.raises(FormatMismatch, match="8 query heads"):
        PagedAttention(_pool(), 8)
    with pytest.raises(FormatMismatch, match="int8"):
        PagedAttention(DevicePool(Layout(16, (LayerGroup(GroupKind.GQA, (0,), 2, 1, 8, dtype="int8"),)), 1, "cpu"), 1)
    mla = Layout(16, (LayerGroup(GroupKind.MLA, (0,), 1, 1, 8, rope_dim=4),))
    with pytest.raises(FormatMismatch, match="mla"):
        PagedAttention(DevicePool(mla, 1, "cpu"), 1)
