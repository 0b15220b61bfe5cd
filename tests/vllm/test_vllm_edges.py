"""Prompts of every length around the edges of blocks, computed in several steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_world import BLOCK, Vllm, tiers, tokens_of, whole_blocks

LENGTHS = sorted({1, 2, *(edge * BLOCK + off for edge in range(1, 6) for off in (-1, 0, 1))})
BUDGET = 48
"""Tokens a step: no whole number of blocks, and every longer prompt takes several."""


@pytest.fixture(scope="module", params=["sync", "async"])
def vllm(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Vllm]:
    with Vllm(tiny, tiers(load=request.param), max_num_batched_tokens=BUDGET, max_num_seqs=4) as vllm:
        yield vllm


def test_one_token_is_left_to_compute(vllm, reference):
    prompts = [tokens_of(length, length) for length in LENGTHS]
    expected = reference(prompts, 6)
    assert vllm.tokens(prompts, 6) == expected
    vllm.only("host")
    for prompt, answer in zip(prompts, expected, strict=True):
        blocks = whole_blocks([prompt])
        assert vllm.loading([prompt], 6) == ([answer], {"host": blocks} if blocks else {}), len(prompt)
    vllm.check_at_rest()


def test_all_lengths_at_once(vllm, reference):
    prompts = [tokens_of(length, length) for length in LENGTHS]
    expected = reference(prompts, 6)
    vllm.only("host")
    assert vllm.loading(prompts, 6) == (expected, {"host": whole_blocks(prompts)})
    vllm.check_at_rest()


def test_all_chunks_of_a_long_prompt_are_stored(vllm, reference):
    prompts = [tokens_of(1000, 9 * BLOCK + 17)]
    expected = reference(prompts, 4)
    assert vllm.tokens(prompts, 4) == expected
    vllm.only("host")
    assert vllm.loading(prompts, 4) == (expected, {"host": 9})


@pytest.mark.parametrize("common", [BLOCK - 1, BLOCK, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_prompts_part_inside_and_at_the_end_of_a_block(vllm, reference, common):
    first = tokens_of(2000 + common, 5 * BLOCK)
    second = [*first[:common], *tokens_of(3000 + common, 40)]
    expected = reference([first, second], 6)
    assert vllm.tokens([first], 6) == expected[:1]
    vllm.only("host")
    blocks = common // BLOCK
    assert vllm.loading([second], 6) == (expected[1:], {"host": blocks} if blocks else {})
