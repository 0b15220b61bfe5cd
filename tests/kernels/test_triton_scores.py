"""What sparse attention chooses by: kernels and torch choose the same blocks."""

from types import SimpleNamespace

import pytest
import torch
from kernel_world import Span, draw

from kvtier.engine.sparse import Sparse
from kvtier.gpu import block_scores
from kvtier.gpu.attention import make_paged_attention
from kvtier.gpu.block_scores import TorchScores, make_block_scores
from kvtier.gpu.sparse import SparseAttention, SparseSpan
from kvtier.gpu.storage import DevicePool
from kvtier.gpu.triton_scores import TritonScores
from kvtier.layout import GroupKind, LayerGroup, Layout

SIZE, LAYERS, KV_HEADS, GROUP, WIDTH, BLOCKS = 4, 2, 2, 3, 32, 24
TOKENS = 86
TABLE = tuple(torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()[: -(-TOKENS // SIZE)])
# The prompt comes in pieces, the last of them shorter than what is watched.
PROMPT = [(0, 40), (40, 45), (45, 74)]


def make_pool(dtype="float32"):
    group = LayerGroup(GroupKind.GQA, tuple(range(LAYERS)), 2, KV_HEADS, WIDTH, dtype=dtype)
    pool = DevicePool(Layout(SIZE, (group,)), BLOCKS, "cpu")
    pool.tensor.fill_(float("nan"))
    return pool


class World:
    """One sequence over a pool: what was chosen for each of its tokens, and its outputs."""

    def __init__(self, kind, make):
        self.q = draw(LAYERS, TOKENS, KV_HEADS * GROUP, WIDTH, seed=1) * 2
        self.k, self.v = draw(2, LAYERS, TOKENS, KV_HEADS, WIDTH, seed=2).unbind(0)
        self.pool = make_pool()
        base = make_paged_attention(self.pool, KV_HEADS * GROUP)
        self.attention = SparseAttention(base, self.pool, KV_HEADS * GROUP, scores=make(self.pool))
        self.rule = Sparse(kind, share=0.4)
        for start, stop in PROMPT:
            self.run(start, stop)
        self.choices = []
        choice = self.attention._choices["r"]
        choose = choice.choose

        def noting(*given):
            self.choices.append(choose(*given))
            return self.choices[-1]

        choice.choose = noting
        self.outputs = [self.run(token, token + 1) for token in range(PROMPT[-1][1], TOKENS)]

    def run(self, start, stop):
        self.attention.plan([Span(TABLE, start, stop)], [SparseSpan("r", self.rule, PROMPT[-1][1])])
        step = (self.q[:, start:stop], self.k[:, start:stop], self.v[:, start:stop])
        return torch.stack([self.attention(layer, *(x[layer] for x in step)) for layer in range(LAYERS)])


@pytest.mark.parametrize("kind", ["h2o", "quest"])
def test_the_same_blocks_are_chosen(kind):
    ours, theirs = World(kind, TritonScores), World(kind, TorchScores)
    assert len(ours.choices) == LAYERS * (TOKENS - PROMPT[-1][1])
    for mine, other in zip(ours.choices, theirs.choices, strict=True):
        assert torch.equal(mine.sort(1).values, other.sort(1).values)
    assert len({tuple(row) for places in ours.choices for row in places.sort(1).values.tolist()}) > 10
    torch.testing.assert_close(torch.stack(ours.outputs), torch.stack(theirs.outputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stop", "queries"), [(1, 1), (4, 4), (17, 5), (41, 24)])
def test_mass_and_bounds_equal_those_of_torch(stop, queries):
    pool, blocks = make_pool(), torch.tensor(TABLE[: -(-stop // SIZE)])
    pool.tensor[list(TABLE)] = draw(len(TABLE), *pool.tensor.shape[1:], seed=5)
    pool.tensor[TABLE[-(-stop // SIZE) - 1], :, :, :, (stop - 1) % SIZE + 1 :] = float("nan")
    q = draw(queries, KV_HEADS, GROUP, WIDTH, seed=4).permute(1, 2, 0, 3)
    ours, theirs = TritonScores(pool), TorchScores(pool)
    for layer in range(LAYERS):
        mass = ours.mass(layer, q, blocks, stop)
        torch.testing.assert_close(mass, theirs.mass(layer, q, blocks, stop), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mass.sum(1), torch.full((KV_HEADS,), float(queries * GROUP)), rtol=1e-4, atol=0)
        full = blocks[: stop // SIZE]
        assert torch.equal(ours.bounds(layer, full), theirs.bounds(layer, full))


def test_kernels_score_where_they_attend(monkeypatch):
    assert isinstance(make_block_scores(make_pool()), TorchScores)
    memory = torch.empty(4, 2, 2, 2, 16, 32)
    pool = SimpleNamespace(device=torch.device("cuda"), tensor=memory, layout=SimpleNamespace(block_size=SIZE))
    assert isinstance(make_block_scores(pool), TritonScores)
    monkeypatch.setattr(block_scores.kernels, "available", lambda: False)
    assert isinstance(make_block_scores(pool), TorchScores)
