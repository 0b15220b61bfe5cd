"""PagedAttention with sliding windows, per layer, against naive attention in float64."""

from typing import NamedTuple

import pytest
import torch

from kvtier.errors import FormatMismatch
from kvtier.gpu import DevicePool, PagedAttention
from kvtier.layout import GroupKind, LayerGroup, Layout

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 16, 8


class Span(NamedTuple):
    block_ids: tuple[int, ...]
    start: int
    stop: int


def make_pool(layers):
    group = LayerGroup(GroupKind.GQA, tuple(range(layers)), 2, KV_HEADS, HEAD_DIM)
    pool = DevicePool(Layout(BLOCK, (group,)), 96, "cpu")
    pool.tensor.fill_(float("nan"))
    return pool


def naive(q, k, v, start, window):
    group = HEADS // KV_HEADS
    q, k, v = (tensor.double() for tensor in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = torch.einsum("thd,shd->hts", q, k) / HEAD_DIM**0.5
    own, at = start + torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    visible = (at <= own) & (at > own - (window or 10**6))
    return torch.einsum("hts,shd->thd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)


STEPS = [
    # Three sequences: stops after each step. Prefills in chunks, decodes together at unequal lengths.
    (1, 100, 17),
    (2, 130, 18),
    (3, 131, 19),
    (70, 132, 20),
    (71, 133, 150),
    (72, 134, 151),
]


@pytest.mark.parametrize("windows", [(1,), (5,), (8, 64), (None, 3, 40), (None, 1000)])
def test_each_layer_attends_to_its_own_window(windows):
    pool = make_pool(len(windows))
    attention = PagedAttention(pool, HEADS, windows)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 160, heads, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    tables = torch.randperm(96, generator=generator)[:60].view(3, 20).tolist()
    starts = (0, 0, 0)
    for stops in STEPS:
        ranges = list(enumerate(zip(starts, stops, strict=True)))
        attention.plan([Span(tuple(tables[at]), start, stop) for at, (start, stop) in ranges])
        new = [torch.cat([whole[at, start:stop] for at, (start, stop) in ranges]) for whole in (q, k, v)]
        for layer, window in enumerate(windows):
            expected = [naive(q[at, a:b], k[at, :b], v[at, :b], a, window) for at, (a, b) in ranges]
            result = attention(layer, *new).double()
            torch.testing.assert_close(result, torch.cat(expected), rtol=1e-5, atol=3e-6)
        starts = stops


def test_windows_of_another_number_of_layers_are_refused():
    with pytest.raises(FormatMismatch, match="2 windows: expected one for each of the pool's 3 layers"):
        PagedAttention(make_pool(3), HEADS, (4, None))
