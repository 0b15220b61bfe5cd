"""Sparse attention against plain definitions in float64, and what must not happen to others because of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from kvtier.engine.sparse import Sparse
from kvtier.errors import FormatMismatch, RequestError
from kvtier.gpu.attention import make_paged_attention
from kvtier.gpu.sparse import SparseAttention, SparseSpan
from kvtier.gpu.storage import DevicePool
from kvtier.layout import GroupKind, LayerGroup, Layout

SIZE, LAYERS, KV_HEADS, GROUP, WIDTH = 4, 2, 2, 3, 16
HEADS = KV_HEADS * GROUP


@dataclass
class Span:
    block_ids: Sequence[int]
    start: int
    stop: int


def make_pool(kind: GroupKind = GroupKind.GQA) -> DevicePool:
    planes, heads = (2, KV_HEADS) if kind is GroupKind.GQA else (1, 1)
    group = LayerGroup(kind, tuple(range(LAYERS)), planes, heads, WIDTH, dtype="float32")
    return DevicePool(Layout(SIZE, (group,)), 64, "cpu")


class World:
    """One sequence over a pool, prefilled up to `length`, then decoded token by token."""

    def __init__(self, length: int, steps: int, rule: Sparse | None) -> None:
        torch.manual_seed(length)
        total = length + steps
        self.pool = make_pool()
        self.q = torch.randn(LAYERS, total, HEADS, WIDTH) * 2
        self.k = torch.randn(LAYERS, total, KV_HEADS, WIDTH) * 2
        self.v = torch.randn(LAYERS, total, KV_HEADS, WIDTH)
        self.table = torch.randperm(64, generator=torch.Generator().manual_seed(1))[: -(-total // SIZE)].tolist()
        self.pool.tensor[self.table[-1]] = float("nan")
        self.rule = rule
        base = make_paged_attention(self.pool, HEADS)
        self.attention = SparseAttention(base, self.pool, HEADS)
        self.run(0, length)

    def run(self, start: int, stop: int) -> list[torch.Tensor]:
        self.attention.plan([Span(self.table, start, stop)], [SparseSpan("r", self.rule)])
        return [
            self.attention(layer, *(x[layer, start:stop] for x in (self.q, self.k, self.v))) for layer in range(LAYERS)
        ]

    def expected(self, layer: int, token: int, blocks: Sequence[set[int]]) -> torch.Tensor:
        """Attention of one token to the given blocks, per query head."""
        outputs = []
        for head in range(HEADS):
            mine = head // GROUP
            seen = torch.tensor([at for at in range(token + 1) if at // SIZE in blocks[head]])
            q, k, v = self.q[layer, token, head], self.k[layer, seen, mine], self.v[layer, seen, mine]
            weights = torch.softmax((k.double() @ q.double()) * WIDTH**-0.5, 0)
            outputs.append(weights @ v.double())
        return torch.stack(outputs)


def by_bounds(world: World, layer: int, token: int, budget: int, rule: Sparse) -> list[set[int]]:
    """Quest by its definition."""
    last, chosen = token // SIZE, []
    for head in range(HEADS):
        always = {*range(min(rule.sink, last)), *range(max(last - rule.recent + 1, 0), last), last}
        rank = {}
        for block in range(last):
            keys = world.k[layer, block * SIZE : (block + 1) * SIZE, head // GROUP].double()
            q = world.q[layer, token, head].double()
            middle, half = (keys.amin(0) + keys.amax(0)) / 2, (keys.amax(0) - keys.amin(0)) / 2
            rank[block] = (q * middle).sum() + 0.25 * (q.abs() * half).sum()
        others = sorted(set(range(last)) - always, key=lambda block: -float(rank[block]))
        chosen.append(always | set(others[: max(budget - len(always), 0)]))
    return chosen


@pytest.mark.parametrize("length", [1, 3, 4, 5, 40, 41, 63])
def test_quest_takes_the_blocks_of_highest_bound(length: int) -> None:
    rule = Sparse("quest", share=0.4)
    world = World(length, 9, rule)
    for token in range(length, length + 9):
        for layer, out in enumerate(world.run(token, token + 1)):
            budget = rule.budget(token // SIZE + 1)
            blocks = by_bounds(world, layer, token, budget, rule)
            assert torch.allclose(out[0].double(), world.expected(layer, token, blocks), atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 40, 63])
def test_streaming_takes_the_first_and_the_latest(length: int) -> None:
    rule = Sparse("streaming", share=0.4, sink=2, recent=3)
    world = World(length, 6, rule)
    for token in range(length, length + 6):
        count = token // SIZE + 1
        budget = rule.budget(count)
        first = min(2, budget)
        seen = {*range(first), *range(count - (budget - first), count)}
        for layer, out in enumerate(world.run(token, token + 1)):
            assert torch.allclose(out[0].double(), world.expected(layer, token, [seen] * HEADS), atol=1e-5)


@pytest.mark.parametrize("kind", ["streaming", "h2o", "quest"])
@pytest.mark.parametrize("length", [1, 4, 30])
def test_all_blocks_are_plain_attention(kind: str, length: int) -> None:
    world = World(length, 8, Sparse(kind, share=1.0))  # type: ignore[arg-type]
    for token in range(length, length + 8):
        every = [set(range(64))] * HEADS
        for layer, out in enumerate(world.run(token, token + 1)):
            assert torch.allclose(out[0].double(), world.expected(layer, token, every), atol=1e-5)


def test_what_h2o_gives_up_never_comes_back() -> None:
    rule = Sparse("h2o", share=0.3)
    world = World(48, 60, rule)
    choice = world.attention._choices["r"]
    given_up: set[tuple[int, int, int]] = set()
    for token in range(48, 108):
        world.run(token, token + 1)
        count = token // SIZE + 1
        gone = {
            (layer, head, block)
            for layer in range(LAYERS)
            for head in range(KV_HEADS)
            for block in range(count)
            if choice._mass[layer, head, block] == float("-inf")  # type: ignore[attr-defined]
        }
        assert given_up <= gone
        given_up = gone
        kept = LAYERS * KV_HEADS * count - len(gone)
        assert kept == LAYERS * KV_HEADS * rule.budget(count)


def test_h2o_keeps_the_blocks_that_get_attention() -> None:
    rule = Sparse("h2o", share=0.25)
    world = World(64, 12, rule)
    # From here on all that is asked for lies in block 7.
    wanted = world.k[:, 30].repeat_interleave(GROUP, 1) * 4
    world.q[:, 32:] = wanted[:, None]
    other = World.__new__(World)
    other.__dict__ = world.__dict__ | {
        "attention": SparseAttention(make_paged_attention(world.pool, HEADS), world.pool, HEADS)
    }
    other.run(0, 64)
    for token in range(64, 76):
        other.run(token, token + 1)
    mass = other.attention._choices["r"]._mass  # type: ignore[attr-defined]
    assert (mass[:, :, 7] > 10).all()


def test_blocks_that_were_replaced_get_new_bounds() -> None:
    rule = Sparse("quest", share=0.4)
    world = World(40, 4, rule)
    world.run(40, 41)
    moved = [block for block in range(64) if block not in world.table][:5]
    world.pool.tensor[moved] = world.pool.tensor[world.table[2:7]]
    world.pool.tensor[world.table[2:7]] = float("nan")
    world.k[:, 8:28] = world.k[:, 8:28].flip(1)
    for layer in range(LAYERS):
        keys = world.k[layer, 8:28].unflatten(0, (5, SIZE)).transpose(1, 2)
        world.pool.tensor[moved, layer, 0] = keys
    world.table[2:7] = moved
    for layer, out in enumerate(world.run(41, 42)):
        blocks = by_bounds(world, layer, 41, rule.budget(11), rule)
        assert torch.allclose(out[0].double(), world.expected(layer, 41, blocks), atol=1e-5)


def test_others_in_the_batch_are_not_touched() -> None:
    pool = make_pool()
    torch.manual_seed(0)
    base, sparse = make_paged_attention(pool, HEADS), SparseAttention(make_paged_attention(pool, HEADS), pool, HEADS)
    tables = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]

    def spans(starts: Sequence[int], stop: int) -> list[Span]:
        return [Span(table, start, stop) for table, start in zip(tables, starts, strict=True)]

    asked = [SparseSpan("a", None), SparseSpan("b", Sparse("quest", share=0.1)), SparseSpan("c", None)]
    for batch in (spans([0, 0, 0], 14), spans([14, 14, 14], 15), spans([15, 15, 15], 16)):
        rows = sum(span.stop - span.start for span in batch)
        q, k, v = torch.randn(rows, HEADS, WIDTH), *torch.randn(2, rows, KV_HEADS, WIDTH)
        sparse.plan(batch, asked)
        got = sparse(0, q, k, v)
        base.plan(batch)
        want = base(0, q, k, v)
        each = rows // 3
        assert torch.equal(got[:each], want[:each])
        assert torch.equal(got[2 * each :], want[2 * each :])
    assert not torch.equal(got[1], want[1])


def test_what_cannot_be_sparse_is_refused() -> None:
    pool = make_pool()
    base = make_paged_attention(pool, HEADS)
    with pytest.raises(FormatMismatch, match="windows"):
        SparseAttention(base, pool, HEADS, [None, 8])
    with pytest.raises(FormatMismatch, match="mla"):
        SparseAttention(base, make_pool(GroupKind.MLA), HEADS)


@pytest.mark.parametrize("bad", [{"kind": "snap"}, {"share": 0}, {"share": 1.5}, {"sink": -1}, {"recent": 0}])
def test_senseless_rules_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=str(next(iter(bad.values())))):
        Sparse(**({"kind": "quest"} | bad))  # type: ignore[arg-type]
