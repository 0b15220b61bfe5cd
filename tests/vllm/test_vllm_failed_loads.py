"""A load that fails after vLLM was promised its blocks, under both of vLLM's policies."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_world import BLOCK, Answer, Vllm, tiers, tokens_of

from kvtier.hooks import Step, TransferPlan

PREFIX = tokens_of(1300, 4 * BLOCK)
PROMPTS = [
    [*PREFIX, *tokens_of(1301, 2 * BLOCK + 9)],
    tokens_of(1302, 5 * BLOCK + 2),
    [*PREFIX, *tokens_of(1303, BLOCK + 1)],
]
NOWHERE = 9999
"""A region that no worker maps."""


@pytest.fixture(scope="module", params=["recompute", "fail"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["sync", "async"])
def vllm(request: pytest.FixtureRequest, policy: str, tiny: Path) -> Iterator[Vllm]:
    # What a load did not bring takes several steps to compute again.
    with Vllm(tiny, tiers(load=request.param), policy=policy, max_num_batched_tokens=BLOCK + 16) as vllm:
        yield vllm


def spoil_next_load(vllm: Vllm, block: int) -> list[int]:
    """The memory of one block of the next load is gone; jobs that this befell."""
    hook, spoiled = vllm.connector._scheduler.hook, list[int]()
    plan = hook.plan

    def spoiling(step: Step) -> TransferPlan:
        made = plan(step)
        if spoiled or not made.loads:
            return made
        job, loads = next(iter(made.loads.items()))
        bad = loads[block]._replace(span=loads[block].span._replace(region=NOWHERE))
        spoiled.append(job)
        return replace(made, loads={**made.loads, job: (*loads[:block], bad, *loads[block + 1 :])})

    hook.plan = spoiling
    return spoiled


def check(answers: list[Answer], expected: list[list[int]], policy: str) -> None:
    """Under `fail` some end in an error and the others as they should, under `recompute` all."""
    reasons = {answer.reason for answer in answers}
    assert reasons <= ({"length"} if policy == "recompute" else {"length", "error"})
    assert policy == "recompute" or "error" in reasons
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.reason == "error" or answer.tokens == tokens


@pytest.mark.parametrize("block", [0, 3])
def test_one_failed_block(vllm, policy, reference, block):
    expected = reference(PROMPTS, 12)
    assert vllm.tokens(PROMPTS, 12) == expected
    vllm.only("host")
    spoiled = spoil_next_load(vllm, block)
    answers = vllm.generate(PROMPTS, 12)
    assert len(spoiled) == 1
    check(answers, expected, policy)
    vllm.check_at_rest()
    # What is stored is as it was.
    vllm.only("host")
    assert vllm.loading(PROMPTS, 12) == (expected, {"host": 6 + 5 + 1})


def test_a_lone_request_whose_load_fails_ends(vllm, policy, reference):
    """No other traffic would wake the engine."""
    expected = reference(PROMPTS[:1], 12)
    vllm.tokens(PROMPTS[:1], 12)
    vllm.only("host")
    assert spoil_next_load(vllm, 2) == []
    (answer,) = vllm.generate(PROMPTS[:1], 12)
    assert answer.reason == ("length" if policy == "recompute" else "error")
    if policy == "recompute":
        assert [answer.tokens] == expected
    assert vllm.tokens(PROMPTS[:1], 12) == expected
    vllm.check_at_rest()


def test_aborted_while_its_failed_load_is_on_its_way(vllm, reference):
    expected = reference(PROMPTS, 12)
    vllm.tokens(PROMPTS, 12)
    vllm.only("host")
    spoil_next_load(vllm, 1)
    names = [vllm.submit(prompt, 12) for prompt in PROMPTS]
    vllm.step()
    vllm.abort(names)
    vllm.run()
    vllm.check_at_rest()
    assert vllm.tokens(PROMPTS, 12) == expected
    vllm.check_at_rest()


def test_who_shares_a_failed_block_does_not_read_it(vllm, policy, reference):
    asked = [PROMPTS[0], PROMPTS[2], PROMPTS[0]]
    expected = reference(asked, 12)
    assert vllm.tokens(asked, 12) == expected
    vllm.only("host")
    spoiled = spoil_next_load(vllm, 0)
    check(vllm.generate(asked, 12), expected, policy)
    assert len(spoiled) == 1
    vllm.check_at_rest()


def test_who_comes_after_a_failed_load_does_not_read_it(vllm, policy, reference):
    asked = [PROMPTS[0], PROMPTS[2]]
    expected = reference(asked, 12)
    assert vllm.tokens(asked, 12) == expected
    vllm.only("host")
    spoiled = spoil_next_load(vllm, 1)
    names = [vllm.submit(PROMPTS[0], 12)]
    while not spoiled:
        vllm.step()
    names.append(vllm.submit(PROMPTS[2], 12))
    vllm.run()
    check([vllm.answers[name] for name in names], expected, policy)
    vllm.check_at_rest()


def test_who_comes_after_an_aborted_failed_load_does_not_read_it(vllm, reference):
    expected = reference(PROMPTS[:1], 12)
    assert vllm.tokens(PROMPTS[:1], 12) == expected
    vllm.only("host")
    spoiled = spoil_next_load(vllm, 1)
    name = vllm.submit(PROMPTS[0], 12)
    while not spoiled:
        vllm.step()
    vllm.abort([name])
    vllm.run()
    assert vllm.tokens(PROMPTS[:1], 12) == expected
    vllm.check_at_rest()
