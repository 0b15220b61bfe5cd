"""LatentAttention against naive attention in float64, absorbed and expanded."""

import random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from kvtier.errors import CapacityError, FormatMismatch
from kvtier.gpu import BlockCopy, DevicePool, LatentAttention, PagedAttention
from kvtier.gpu.attention import make_attention
from kvtier.layout import GroupKind, LayerGroup, Layout

LAYERS = 2
SCALE = 0.21


class Span(NamedTuple):
    block_ids: tuple[int, ...]
    start: int
    stop: int


def _pool(*, latent=24, rope=8, block_size=16, dtype="float32", blocks=64):
    group = LayerGroup(GroupKind.MLA, tuple(range(LAYERS)), 1, 1, latent, rope_dim=rope, dtype=dtype)
    pool = DevicePool(Layout(block_size, (group,)), blocks, "cpu")
    # What a slot held before must not matter.
    pool.tensor.fill_(float("nan"))
    return pool


def _naive(q, row, start, latent):
    """Float64 attention of q [T, heads, latent + rope], tokens start.. of a sequence with rows [S, latent + rope]."""
    q, row = q.double(), row.double()
    scores = torch.einsum("thd,sd->hts", q, row) * SCALE
    visible = torch.arange(len(row))[None] <= start + torch.arange(len(q))[:, None]
    return torch.einsum("hts,sd->thd", scores.masked_fill(~visible, float("-inf")).softmax(-1), row[:, :latent])


class Case:
    """Sequences in shuffled blocks, whose prefixes are in the pool; runs a step and knows what it must give."""

    def __init__(self, spans, *, heads, seed=0, **shape):
        self.pool = _pool(**shape)
        size, width = self.pool.layout.block_size, self.pool.tensor.shape[-1]
        shuffled = random.Random(seed)
        ids = shuffled.sample(range(self.pool.blocks.num_blocks), self.pool.blocks.num_blocks)
        generator = torch.Generator().manual_seed(seed)

        def draw(*sizes):
            return torch.randn(LAYERS, *sizes, width, generator=generator).to(self.pool.tensor.dtype)

        self.spans, self.sequences = [], []
        for start, stop in spans:
            # Tables may be longer than the tokens need.
            blocks = tuple(ids.pop() for _ in range(-(-stop // size) + shuffled.randint(0, 1)))
            q, row = draw(stop - start, heads), draw(stop)
            self.spans.append(Span(blocks, start, stop))
            self.sequences.append((q, row))
            for at in range(start):
                self.pool.tensor[blocks[at // size], :, at % size] = row[:, at]

    def run(self, attention):
        """Per layer, (result, float64 reference), flat over the batch."""
        attention.plan(self.spans)
        latent, pairs = self.pool.group.head_dim, []
        for layer in range(LAYERS):
            both = list(zip(self.spans, self.sequences, strict=True))
            q = torch.cat([q[layer] for _, (q, _) in both])
            row = torch.cat([row[layer, span.start :] for span, (_, row) in both])
            expected = [_naive(q[layer], row[layer], span.start, latent) for span, (q, row) in both]
            pairs.append((attention(layer, q, row), torch.cat(expected)))
        return pairs

    def check_written(self):
        """Every token is in its slot, in every layer, and nothing else was touched."""
        size = self.pool.layout.block_size
        rest = self.pool.tensor.clone()
        for span, (_, row) in zip(self.spans, self.sequences, strict=True):
            for at in range(span.stop):
                block, inside = span.block_ids[at // size], at % size
                assert torch.equal(self.pool.tensor[block, :, inside], row[:, at])
                rest[block, :, inside] = float("nan")
        assert rest.isnan().all()


RAGGED = [
    pytest.param([(0, 1)], id="first token"),
    pytest.param([(15, 16), (16, 17), (17, 18)], id="decode around a block's edge"),
    pytest.param([(31, 32)] * 4, id="decode, equal lengths"),
    pytest.param([(0, 1), (200, 201), (5, 6), (90, 91), (91, 92), (16, 17)], id="decode, ragged"),
    pytest.param([(0, 16), (0, 15), (0, 17)], id="prefill around a block's edge"),
    pytest.param([(16, 48), (15, 33), (3, 5), (100, 330)], id="prefill with prefix, several chunks"),
    pytest.param([(40, 41), (0, 33), (7, 8), (32, 97), (0, 1), (16, 18)], id="mixed"),
]


@pytest.mark.parametrize("spans", RAGGED)
def test_equals_float64_attention(spans):
    case = Case(spans, heads=6)
    for result, expected in case.run(LatentAttention(case.pool, 6, SCALE)):
        assert result.is_contiguous()
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=3e-6)
    case.check_written()


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (64, 16), (40, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_shape(heads, latent, rope, dtype):
    case = Case([(37, 38), (0, 21), (20, 60), (4, 5)], heads=heads, latent=latent, rope=rope, dtype=dtype)
    tolerance = {"float32": 3e-5, "bfloat16": 3e-2}[dtype]
    for result, expected in case.run(LatentAttention(case.pool, heads, SCALE)):
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    case.check_written()


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_every_block_size(block_size):
    case = Case([(5, 6), (0, 7), (31, 64), (32, 33)], heads=6, block_size=block_size, blocks=160)
    for result, expected in case.run(LatentAttention(case.pool, 6, SCALE)):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=3e-6)
    case.check_written()


def test_absorbed_attention_is_attention_over_expanded_keys_and_values():
    heads, nope, rope, value, latent, tokens = 4, 12, 8, 10, 24, 50
    generator = torch.Generator().manual_seed(1)
    q, row = (
        torch.randn(*size, generator=generator) for size in ((tokens, heads, nope + rope), (tokens, latent + rope))
    )
    keys = torch.randn(heads, nope, latent, generator=generator)
    values = torch.randn(heads, latent, value, generator=generator)
    pool = _pool(latent=latent, rope=rope)
    attention = LatentAttention(pool, heads, SCALE)
    attention.plan([Span((3, 1, 4, 2), 0, tokens)])
    absorbed = torch.cat((torch.einsum("thp,hpl->thl", q[..., :nope], keys), q[..., nope:]), -1)
    ours = torch.einsum("thl,hlv->thv", attention(0, absorbed, row), values)

    c, rope_key = row[:, :latent].double(), row[:, latent:].double()
    k = torch.cat((torch.einsum("sl,hnl->hsn", c, keys.double()), rope_key.expand(heads, -1, -1)), -1)
    v = torch.einsum("sl,hlv->hsv", c, values.double())
    scores = torch.einsum("thd,hsd->hts", q.double(), k) * SCALE
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    expected = torch.einsum("hts,hsv->thv", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_step_in_chunks_equals_one_prefill():
    whole = Case([(0, 150)], heads=6, seed=5)
    ((expected, _), _) = whole.run(LatentAttention(whole.pool, 6, SCALE))
    attention, (q, row) = LatentAttention(whole.pool, 6, SCALE), whole.sequences[0]
    whole.pool.tensor.fill_(float("nan"))
    pieces = []
    for start, stop in ((0, 1), (1, 17), (17, 96), (96, 149), (149, 150)):
        attention.plan([whole.spans[0]._replace(start=start, stop=stop)])
        pieces.append(attention(0, q[0, start:stop], row[0, start:stop]))
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-5, atol=3e-6)


def test_a_forked_block_keeps_its_rows():
    case = Case([(5, 6)], heads=2, blocks=8)
    block, other = case.spans[0].block_ids[0], 7
    case.pool.copy_blocks([BlockCopy(block, other)])
    assert torch.equal(case.pool.as_bytes()[other], case.pool.as_bytes()[block])
    case.spans = [case.spans[0]._replace(block_ids=(other,))]
    for result, expected in case.run(LatentAttention(case.pool, 2, SCALE)):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=3e-6)


def test_a_block_takes_latent_and_rope_of_each_token_and_layer():
    layout = _pool(latent=24, rope=8, dtype="bfloat16").layout
    assert layout.block_bytes() == LAYERS * 16 * (24 + 8) * 2
    assert DevicePool.fit(layout, 5 * layout.block_bytes() + 7, "cpu").blocks.num_blocks == 5
    assert DevicePool(layout, 3, "cpu").as_bytes().shape == (3, layout.block_bytes())


def test_an_empty_step():
    attention = LatentAttention(_pool(), 6, SCALE)
    attention.plan([])
    assert attention(0, torch.empty(0, 6, 32), torch.empty(0, 32)).shape == (0, 6, 24)


def test_spans_and_tensors_that_do_not_fit_are_refused_before_anything_is_written():
    pool = _pool()
    attention = LatentAttention(pool, 6, SCALE)
    attention.plan([Span((1,), 0, 2)])
    with pytest.raises(CapacityError, match="room for 16"):
        attention.plan([Span((2,), 0, 17)])
    q, row = torch.randn(2, 6, 32), torch.randn(2, 32)
    wrong = [
        (0, torch.randn(3, 6, 32), row),
        (0, q, torch.randn(2, 24)),
        (0, torch.randn(2, 5, 32), row),
        (0, q.bfloat16(), row),
        (0, q, row.double()),
        (LAYERS, q, row),
        (-1, q, row),
    ]
    for arguments in wrong:
        with pytest.raises(FormatMismatch):
            attention(*arguments)
    assert pool.tensor.isnan().all()
    assert attention(0, q, row).shape == (2, 6, 24)


def test_pools_without_latents_are_refused():
    gqa = Layout(16, (LayerGroup(GroupKind.GQA, (0,), 2, 1, 8),))
    with pytest.raises(FormatMismatch, match="gqa float32"):
        LatentAttention(DevicePool(gqa, 1, "cpu"), 1, SCALE)
    with pytest.raises(FormatMismatch, match="mla int8"):
        LatentAttention(_pool_of("int8"), 1, SCALE)
    with pytest.raises(FormatMismatch, match="0 query heads"):
        LatentAttention(_pool(), 0, SCALE)


def _pool_of(dtype):
    return DevicePool(Layout(16, (LayerGroup(GroupKind.MLA, (0,), 1, 1, 8, rope_dim=4, dtype=dtype),)), 1, "cpu")


def test_the_layout_of_the_pool_decides_what_attends():
    config = SimpleNamespace(heads=2, windows=(), softmax_scale=SCALE)
    assert isinstance(make_attention(_pool(), config), LatentAttention)
    gqa = Layout(16, (LayerGroup(GroupKind.GQA, (0,), 2, 1, 8),))
    assert isinstance(make_attention(DevicePool(gqa, 1, "cpu"), config), PagedAttention)
