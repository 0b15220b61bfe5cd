"""Steps that are planned before earlier ones have run, as on a GPU or with several stages: vLLM's own queue of batches,
which it has on no CPU by itself.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm_world import BLOCK, Vllm, tiers, tokens_of, whole_blocks

SHARED = tokens_of(2000, 4 * BLOCK)
PROMPTS = [[*SHARED, *tokens_of(2001 + each, 3 * BLOCK + 5)] for each in range(3)]


@pytest.fixture(scope="module")
def vllm(tiny: Path) -> Iterator[Vllm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmConfig, "max_concurrent_batches", property(lambda _: 2))
        with Vllm(tiny, tiers(load="sync"), max_num_batched_tokens=2 * BLOCK) as vllm:
            assert vllm.engine.engine_core.engine_core.batch_queue is not None
            yield vllm


@pytest.fixture
def in_host(vllm: Vllm, reference) -> list[list[int]]:
    """What the prompts must give; the blocks of the first one are in host and not on the device."""
    vllm.connector.reset_cache()
    vllm.forget()
    expected = reference(PROMPTS, 8)
    assert vllm.tokens(PROMPTS[:1]) == expected[:1]
    vllm.only("host")
    return expected


def test_what_was_computed_comes_back(vllm, in_host):
    assert vllm.loading(PROMPTS) == (in_host, {"host": whole_blocks(PROMPTS[:1])})
    vllm.only("host")
    assert vllm.loading(PROMPTS) == (in_host, {"host": 4 + 3 * 3})
    vllm.check_at_rest()


@pytest.mark.parametrize("block", [0, 3])
def test_nothing_is_computed_on_top_of_a_load_that_fails(vllm, in_host, block):
    # The prompt's rest takes two steps, of which the second one would be planned before the load has failed.
    spoiled = vllm.spoil_next_load(block)
    assert vllm.tokens(PROMPTS[1:]) == in_host[1:]
    assert len(spoiled) == 1
    # Nor was anything wrong kept.
    vllm.only("host")
    assert vllm.tokens(PROMPTS) == in_host
    vllm.check_at_rest()


def test_aborted_at_any_moment(vllm, in_host):
    for delay in range(6):
        names = [vllm.submit(prompt) for prompt in PROMPTS]
        for _ in range(delay):
            vllm.step()
        vllm.within_next_step(lambda names=names: vllm.abort(names[::2]))
        vllm.run()
        assert vllm.answers[names[1]].tokens == in_host[1]
        vllm.check_at_rest()
        vllm.only("host")
    assert vllm.tokens(PROMPTS) == in_host
    vllm.check_at_rest()
