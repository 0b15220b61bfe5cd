"""GroupRouter against transformers' routers and against the definition, one token at a time."""

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from kvtier.engine.models.deepseek_config import Routing
from kvtier.engine.models.deepseek_routing import GroupRouter
from kvtier.errors import ModelError

HIDDEN = 24
LIMITED = Routing(
    experts=12,
    chosen=4,
    scoring="sigmoid",
    groups=4,
    kept_groups=2,
    votes=2,
    normalise=True,
    scale=2.5,
    corrected=True,
)
GREEDY = replace(LIMITED, scoring="softmax", groups=1, kept_groups=1, votes=1, normalise=False, corrected=False)


def inputs(routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, HIDDEN, generator=generator)
    weight = torch.randn(routing.experts, HIDDEN, generator=generator) * 0.3
    bias = torch.randn(routing.experts, generator=generator) * 0.2
    return x, weight, bias if routing.corrected else None


def by_definition(routing: Routing, scores: list[float], bias: list[float]) -> dict[int, float]:
    """The experts of one token and their weights."""
    ranked = [score + correction for score, correction in zip(scores, bias, strict=True)]
    size = routing.experts // routing.groups
    members = [range(group * size, (group + 1) * size) for group in range(routing.groups)]
    standing = [sum(sorted((ranked[at] for at in group), reverse=True)[: routing.votes]) for group in members]
    best = sorted(range(routing.groups), key=lambda group: -standing[group])[: routing.kept_groups]
    allowed = [at for group in best for at in members[group]]
    chosen = sorted(allowed, key=lambda at: -ranked[at])[: routing.chosen]
    total = sum(scores[at] for at in chosen) if routing.normalise else 1.0
    return {at: scores[at] / total * routing.scale for at in chosen}


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "kept_groups", "votes"), [(1, 1, 1), (4, 2, 1), (4, 2, 2), (6, 2, 2), (4, 4, 3)])
def test_equals_the_definition(
    groups: int, kept_groups: int, votes: int, scoring: str, corrected: bool, normalise: bool
) -> None:
    routing = replace(
        LIMITED,
        groups=groups,
        kept_groups=kept_groups,
        votes=votes,
        scoring=scoring,
        corrected=corrected,
        normalise=normalise,
    )
    x, weight, bias = inputs(routing)
    chosen, weights = GroupRouter(routing, weight, bias)(x)
    logits = x.double() @ weight.double().T
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    corrections = [0.0] * routing.experts if bias is None else bias.tolist()
    for at in range(len(x)):
        expected = by_definition(routing, scores[at].tolist(), corrections)
        ours = dict(zip(chosen[at].tolist(), weights[at].tolist(), strict=True))
        assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("limited", [True, False])
def test_equals_the_second_version_of_transformers(limited: bool) -> None:
    routing = replace(GREEDY, groups=4, kept_groups=2) if limited else GREEDY
    x, weight, _ = inputs(routing)
    method = "group_limited_greedy" if limited else "greedy"
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        num_attention_heads=2,
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        topk_method=method,
        routed_scaling_factor=2.5,
    )
    same_choice(routing, DeepseekV2TopkRouter(config), x, weight, None)


def test_equals_the_third_version_of_transformers() -> None:
    x, weight, bias = inputs(LIMITED)
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    assert bias is not None
    router.e_score_correction_bias.copy_(bias)
    same_choice(LIMITED, router, x, weight, bias)


def same_choice(
    routing: Routing, router: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    with torch.inference_mode():
        router.weight.copy_(weight)
        _, their_weights, their_chosen = router(x)
        chosen, weights = GroupRouter(routing, weight, bias)(x)
    ours, theirs = (torch.zeros(len(x), routing.experts) for _ in range(2))
    ours.scatter_(1, chosen, weights)
    theirs.scatter_(1, their_chosen, their_weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_token_is_routed_the_same_in_any_company() -> None:
    x, weight, bias = inputs(LIMITED)
    router = GroupRouter(LIMITED, weight, bias)
    chosen, weights = router(x)
    for at in (0, 50, 199):
        alone = router(x[at : at + 1])
        assert torch.equal(alone[0][0], chosen[at])
        torch.testing.assert_close(alone[1][0], weights[at])
    assert router(x[:0])[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 5}, "12 experts in 5 groups"),
        ({"kept_groups": 5}, "5 groups"),
        ({"chosen": 7}, "7 experts of 2 groups"),
        ({"chosen": 0}, "0 experts"),
        ({"votes": 4}, "4 votes in groups of 3"),
    ],
)
def test_routing_that_cannot_be_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(LIMITED, **change)
