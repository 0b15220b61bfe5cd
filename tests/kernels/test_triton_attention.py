"""Attention by kernels against PagedAttention and LatentAttention, alone and in the engine."""

from types import SimpleNamespace

import pytest
import torch
from kernel_world import draw, spans_of
from tiny_model import tiny_model

from kvtier.engine import Engine, EngineOptions, SamplingParams, runner
from kvtier.errors import CapacityError, FormatMismatch
from kvtier.gpu import DevicePool, LatentAttention, PagedAttention, triton_attention
from kvtier.gpu import attention as choosing
from kvtier.gpu.attention import make_attention
from kvtier.gpu.graphs import DecodeBuffers, StaticAttention
from kvtier.gpu.triton_attention import TritonAttention, TritonLatentAttention, make_triton_attention
from kvtier.layout import GroupKind, LayerGroup, Layout

MIXED = [(40, 41), (0, 33), (7, 8), (20, 25), (0, 1)]


def pools(kind, **shape):
    """Two equal pools of two layers with random blocks."""
    planes = 2 if kind is GroupKind.GQA else 1
    group = LayerGroup(kind, (0, 1), planes, **shape)
    both = [DevicePool(Layout(16, (group,)), 32, "cpu") for _ in range(2)]
    content = draw(*both[0].tensor.shape, seed=3)
    for pool in both:
        pool.tensor.copy_(content)
    return both


@pytest.mark.parametrize("windows", [(), (None, 8)])
def test_a_mixed_step_equals_paged_attention(windows):
    ours, theirs = pools(GroupKind.GQA, kv_heads=2, head_dim=32)
    spans = spans_of(MIXED, 16, 32)
    triton, paged = TritonAttention(ours, 6, windows), PagedAttention(theirs, 6, windows)
    tokens = sum(stop - start for start, stop in MIXED)
    q, k, v = draw(tokens, 10, 32, seed=4).split([6, 2, 2], 1)
    for attention in (triton, paged):
        attention.plan(spans)
    for layer in (0, 1):
        torch.testing.assert_close(triton(layer, q, k, v), paged(layer, q, k, v), rtol=1e-5, atol=3e-6)
    assert torch.equal(ours.tensor, theirs.tensor)


def test_a_mixed_step_equals_latent_attention():
    ours, theirs = pools(GroupKind.MLA, kv_heads=1, head_dim=32, rope_dim=16)
    spans = spans_of(MIXED, 16, 32)
    triton, latent = TritonLatentAttention(ours, 4, 0.2), LatentAttention(theirs, 4, 0.2)
    tokens = sum(stop - start for start, stop in MIXED)
    q, row = draw(tokens, 4, 48, seed=4), draw(tokens, 48, seed=5)
    for attention in (triton, latent):
        attention.plan(spans)
    for layer in (0, 1):
        torch.testing.assert_close(triton(layer, q, row), latent(layer, q, row), rtol=1e-5, atol=3e-6)
    assert torch.equal(ours.tensor, theirs.tensor)


STEPS = [[(40, 41), (7, 8), (0, 1)], [(41, 42), (8, 9)]]


@pytest.mark.parametrize("kind", [GroupKind.GQA, GroupKind.MLA])
def test_a_static_plan_follows_its_buffers(kind):
    """Planned once, run for steps of other sequences: what a graph replays. Rows of padding write nowhere."""
    rope = 16 if kind is GroupKind.MLA else 0
    ours, theirs = pools(kind, kv_heads=2 if kind is GroupKind.GQA else 1, head_dim=32, rope_dim=rope)
    config = SimpleNamespace(heads=4, windows=(None, 8), softmax_scale=0.2)
    static, planned = make_triton_attention(ours, config), make_triton_attention(theirs, config)
    buffers = DecodeBuffers(4, 4, ours.device)
    assert isinstance(static, StaticAttention)
    static.plan_decode(buffers, 64)
    for number, lengths in enumerate(STEPS):
        spans = spans_of(lengths, 16, 32, seed=number)
        q, new = draw(4, 4, 32 + rope, seed=4), [draw(4, 32 + rope, seed=5)]
        if kind is GroupKind.GQA:
            new = draw(2, 4, 2, 32, seed=5).unbind(0)
        buffers.fill(spans, range(len(spans)), 16)
        planned.plan(spans)
        for layer in (0, 1):
            result = static(layer, q, *new)[: len(spans)]
            expected = planned(layer, q[: len(spans)], *(x[: len(spans)] for x in new))
            torch.testing.assert_close(result, expected)
        assert torch.equal(ours.tensor, theirs.tensor)


def test_refuses_what_paged_attention_refuses():
    (pool, _) = pools(GroupKind.GQA, kv_heads=2, head_dim=32)
    attention = TritonAttention(pool, 4)
    with pytest.raises(CapacityError, match="room for 16"):
        attention.plan([spans_of([(0, 3)], 16, 32)[0]._replace(block_ids=(1,), stop=17)])
    attention.plan(spans_of([(0, 3)], 16, 32))
    with pytest.raises(FormatMismatch, match="plan this step's spans"):
        attention(0, draw(2, 4, 32), draw(2, 2, 32), draw(2, 2, 32))


def test_pools_on_cuda_get_kernels_where_triton_is(monkeypatch):
    asked = []
    monkeypatch.setattr(triton_attention, "make_triton_attention", lambda *given: asked.append(given))
    pool, config = SimpleNamespace(device=torch.device("cuda"), windowed=None), SimpleNamespace()
    make_attention(pool, config)
    assert asked == [(pool, config)]
    (pool, _) = pools(GroupKind.GQA, kv_heads=2, head_dim=32)
    made = make_attention(pool, SimpleNamespace(heads=4, windows=(), softmax_scale=1.0))
    assert not isinstance(made, TritonAttention)
    assert len(asked) == 1


def generate(loaded):
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=64, token_budget=16))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add("long", [(7 * at) % 200 + 1 for at in range(21)], params)
    engine.add("short", [5, 6, 7], params)
    outputs = {}
    while engine.has_work:
        outputs |= {output.id: output.token_ids for output in engine.step()}
    return outputs


def test_the_engine_says_the_same(monkeypatch):
    loaded = tiny_model()
    expected = generate(loaded)
    made = []

    def make(pool, config):
        made.append(make_triton_attention(pool, config))
        return made[-1]

    monkeypatch.setattr(runner, "make_attention", make)
    assert generate(loaded) == expected
    assert [type(attention) for attention in made] == [TritonAttention]


def test_so_it_does_with_a_window_in_one_layer(monkeypatch):
    loaded = tiny_model((None, 6))
    expected = generate(loaded)
    made = []

    def over(memory, config):
        made.append(make_triton_attention(memory, config))
        return made[-1]

    monkeypatch.setattr(choosing, "_over", over)
    assert generate(loaded) == expected
    assert [type(each) for each in made] == [TritonAttention, TritonAttention]
