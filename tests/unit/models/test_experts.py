"""Experts and their routing against a plain loop over tokens."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvtier.engine.models.experts import Experts, MixtureMlp, SharedExpert, softmax_routing
from kvtier.engine.models.layers import GatedMlp
from kvtier.engine.models.linear import Linear
from kvtier.errors import ModelError

HIDDEN, WIDTH, COUNT = 24, 16, 5


def matrices(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


GATE_UP, DOWN = matrices(1, COUNT, 2 * WIDTH, HIDDEN), matrices(2, COUNT, HIDDEN, WIDTH)


def product(weight: Tensor) -> Linear:
    return partial(functional.linear, weight=weight)


def experts(dtype: torch.dtype = torch.float32) -> Experts:
    return Experts([product(one.to(dtype)) for one in GATE_UP], [product(one.to(dtype)) for one in DOWN])


def gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.double().T).chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ down.double().T


def by_loop(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """float64, one token and one expert at a time."""
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, (row, picks, shares) in enumerate(zip(x.double(), chosen, weights.double(), strict=True)):
        for expert, share in zip(picks.tolist(), shares, strict=True):
            out[token] += share * gated(row, GATE_UP[expert], DOWN[expert])
    return out


def routing(tokens: int, choices: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + choices)
    chosen = torch.stack([torch.randperm(COUNT, generator=generator)[:choices] for _ in range(tokens)])
    return chosen, torch.rand(tokens, choices, generator=generator)


@pytest.mark.parametrize(("tokens", "choices"), [(1, 1), (1, 3), (7, 2), (40, 5)])
def test_experts_equal_a_loop(tokens: int, choices: int) -> None:
    x = matrices(3, tokens, HIDDEN)
    chosen, weights = routing(tokens, choices)
    out = experts()(x, chosen, weights)
    torch.testing.assert_close(out.double(), by_loop(x, chosen, weights), atol=1e-6, rtol=1e-5)


def test_experts_in_bfloat16_keep_its_precision() -> None:
    x, (chosen, weights) = matrices(3, 30, HIDDEN).bfloat16(), routing(30, 2)
    out = experts(torch.bfloat16)(x, chosen, weights.bfloat16())
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), by_loop(x, chosen, weights.bfloat16()), atol=0.02, rtol=0.02)


def test_no_token_and_experts_that_nobody_chose() -> None:
    x = matrices(3, 4, HIDDEN)
    assert experts()(x[:0], torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)).shape == (0, HIDDEN)
    used: list[int] = []

    def noting(expert: int) -> Linear:
        return lambda rows: used.append(expert) or rows @ GATE_UP[expert].T

    some = Experts([noting(expert) for expert in range(COUNT)], [product(one) for one in DOWN])
    chosen, weights = torch.tensor([[1, 3], [3, 1], [1, 3], [3, 1]]), torch.full((4, 2), 0.5)
    torch.testing.assert_close(some(x, chosen, weights).double(), by_loop(x, chosen, weights), atol=1e-6, rtol=1e-5)
    assert used == [1, 3]


def test_a_token_is_summed_in_its_own_order_whoever_else_is_there() -> None:
    # A product without rounding of its own, so that nothing but the order of the sums is seen.
    huge, small = torch.tensor([[1e8, 0.0]]), torch.tensor([[1.0, 0.0]])
    sizes = [1e8, 1.0, -1e8]
    exact = Experts([lambda rows: rows.new_ones(len(rows), 2)] * 3, [lambda rows, at=at: rows * at for at in sizes])
    chosen, weights = torch.tensor([[0, 1, 2], [2, 0, 1]]), torch.ones(2, 3)
    together = exact(torch.cat((huge, small)), chosen, weights)
    alone = [exact(x, pick[None], weights[:1]) for x, pick in zip((huge, small), chosen, strict=True)]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(together[0], together[1]), "the order of the sum makes no difference here"


@pytest.mark.parametrize("normalise", [True, False])
def test_routing_takes_the_most_probable(normalise: bool) -> None:
    logits = matrices(4, 50, COUNT).bfloat16()
    chosen, weights = softmax_routing(logits, 2, normalise=normalise)
    assert weights.dtype is torch.float32
    for row, picks, shares in zip(logits.double(), chosen.tolist(), weights.tolist(), strict=True):
        odds = (row.exp() / row.exp().sum()).tolist()
        best = sorted(odds, reverse=True)[:2]
        expected = [one / sum(best) for one in best] if normalise else best
        assert [odds[pick] for pick in picks] == best
        assert shares == pytest.approx(expected, rel=1e-5)


def test_mixture_adds_the_gated_shared_expert() -> None:
    x, router, gate = matrices(5, 9, HIDDEN), matrices(6, COUNT, HIDDEN), matrices(7, 1, HIDDEN)
    gate_up, down = matrices(8, 2 * 12, HIDDEN), matrices(9, HIDDEN, 12)
    shared = SharedExpert(GatedMlp(product(gate_up), product(down)), product(gate))
    bare = MixtureMlp(product(router), experts(), 2, normalise=True)
    chosen, weights = softmax_routing(x @ router.T, 2, normalise=True)
    routed = by_loop(x, chosen, weights)
    torch.testing.assert_close(bare(x).double(), routed, atol=1e-6, rtol=1e-5)
    both = MixtureMlp(product(router), experts(), 2, normalise=True, shared=shared)
    added = torch.sigmoid(x.double() @ gate.double().T) * gated(x.double(), gate_up, down)
    torch.testing.assert_close(both(x).double(), routed + added, atol=1e-6, rtol=1e-5)


def test_unequal_halves_are_refused() -> None:
    with pytest.raises(ModelError, match="2 gate_up and 1 down products: expected one of each"):
        Experts([product(GATE_UP[0])] * 2, [product(DOWN[0])])
    with pytest.raises(ModelError, match="0 gate_up"):
        Experts([], [])
