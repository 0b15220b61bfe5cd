"""kvtier's tiers below vLLM's own host tier: the same tokens from each, read once, and nothing left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from secondary_world import BYTES, PROMPTS, Tiered, nvme
from vllm_world import BLOCK, tokens_of, whole_blocks


@pytest.fixture(scope="module")
def vllm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    with Tiered(tiny, nvme(tmp_path_factory.mktemp("secondary"))) as vllm:
        yield vllm


def test_each_tier_gives_the_same_tokens(vllm, reference):
    expected = reference(PROMPTS, 8)
    assert vllm.given(PROMPTS) == (expected, 0)
    assert vllm.given(PROMPTS) == (expected, 0)  # from the device
    vllm.forget()
    assert vllm.given(PROMPTS) == (expected, BYTES)  # from vLLM's host tier
    assert vllm.read_blocks() == 0
    vllm.forget_hosts()
    assert vllm.given(PROMPTS) == (expected, BYTES)
    assert vllm.read_blocks() == whole_blocks(PROMPTS)


def test_prompts_that_share_blocks_and_come_together_are_read_once(vllm, reference):
    shared = tokens_of(20, 128)
    prompts = [shared + tokens_of(21 + at, 40) for at in range(3)]
    expected = reference(prompts, 8)
    assert vllm.given(prompts)[0] == expected
    vllm.forget_hosts()
    before = vllm.read_blocks()
    found, nbytes = vllm.given(prompts)
    assert found == expected
    assert nbytes > 0
    assert vllm.read_blocks() - before == len(shared) // BLOCK + len(prompts)


def test_an_abort_while_blocks_are_on_their_way_leaves_nothing_held(vllm, reference):
    prompt = tokens_of(30, 330)
    expected = reference([prompt], 8)
    vllm.tokens([prompt])
    vllm.forget_hosts()
    name = vllm.submit(prompt)
    vllm.step()
    vllm.abort([name])
    vllm.settle()
    assert vllm.all_free
    store = vllm.tier.store
    assert not any(store.stats()[tier.name]["leases"] for tier in store.tiers)
    assert vllm.tokens([prompt]) == expected
