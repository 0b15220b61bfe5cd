"""What comes at an awkward moment: while a step runs, before an earlier step has run, while others load."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm_world import BLOCK, Vllm, tiers, tokens_of

PROMPT = tokens_of(1900, 5 * BLOCK + 9)
COUSIN = [*PROMPT[: 4 * BLOCK], *tokens_of(1901, 3 * BLOCK + 5)]


@pytest.fixture(scope="module", params=["sync", "async"])
def vllm(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Vllm]:
    # What is to be computed again takes several steps, in which others go on.
    options = {"max_num_batched_tokens": 4 * BLOCK, "long_prefill_token_threshold": BLOCK}
    with Vllm(tiny, tiers(load=request.param), **options) as vllm:
        yield vllm


@pytest.fixture
def in_host(vllm: Vllm, reference) -> list[list[int]]:
    """What `PROMPT` and `COUSIN` must give; the blocks of `PROMPT` are in host and not on the device."""
    vllm.connector.reset_cache()
    vllm.forget()
    expected = reference([PROMPT, COUSIN], 8)
    assert vllm.tokens([PROMPT]) == expected[:1]
    vllm.only("host")
    return expected


@pytest.mark.parametrize("block", [None, 0, 3])
def test_aborted_while_the_step_that_loads_runs(vllm, in_host, block):
    spoiled = [] if block is None else vllm.spoil_next_load(block)
    name = vllm.submit(PROMPT)
    plan = vllm.connector._scheduler.plan
    loads: list[int] = []

    def watched(output):  # type: ignore[no-untyped-def]
        work = plan(output)
        if work.plan.loads and not loads:
            loads.extend(work.plan.loads)
            vllm.within_next_step(lambda: vllm.abort([name]))
        return work

    vllm.connector._scheduler.plan = watched
    vllm.run()
    vllm.connector._scheduler.plan = plan
    assert loads
    assert block is None or spoiled == loads
    vllm.check_at_rest()
    for _ in range(2):
        assert vllm.tokens([PROMPT, COUSIN]) == in_host
        vllm.only("host")


def test_who_is_not_kept_does_not_read_what_is_being_loaded(vllm, in_host):
    """A request with streaming input has no names in the store, but vLLM's on the device."""
    spoiled = vllm.spoil_next_load(0)
    first = vllm.submit(PROMPT)
    other = vllm.submit(COUSIN)
    scheduler, side = vllm.scheduler, vllm.connector._scheduler
    (unkept,) = [name for name in scheduler.requests if name.startswith(f"{other}-")]
    del side._requests[unkept]
    vllm.run()
    assert len(spoiled) == 1
    assert [vllm.answers[name].tokens for name in (first, other)] == in_host
    vllm.check_at_rest()


def test_saves_are_fenced_against_who_is_not_kept(vllm, in_host):
    name = vllm.submit(COUSIN)
    side = vllm.connector._scheduler
    (unkept,) = [known for known in vllm.scheduler.requests if known.startswith(f"{name}-")]
    del side._requests[unkept]
    written = []
    plan = side.hook.plan

    def watched(step):  # type: ignore[no-untyped-def]
        written.append(step.written)
        return plan(step)

    side.hook.plan = watched
    vllm.step()
    side.hook.plan = plan
    blocks = vllm.scheduler.kv_cache_manager.get_block_ids(unkept)[0]
    assert blocks
    assert set(blocks) <= written[0]
    vllm.run()
    assert vllm.answers[name].tokens == in_host[1]
    vllm.check_at_rest()


def test_several_outputs_of_one_prompt(vllm, in_host):
    params = SamplingParams(n=3, temperature=1.0, top_k=1, max_tokens=8, ignore_eos=True, detokenize=False)
    before = vllm.loaded().get("host", 0)
    (answer,) = vllm.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert [list(output.token_ids) for output in answer.outputs] == in_host[:1] * 3
    assert vllm.loaded()["host"] > before
    vllm.check_at_rest()


def test_prompt_logprobs_are_computed_and_equal(vllm, in_host):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, prompt_logprobs=1)
    (answer,) = vllm.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert [list(answer.outputs[0].token_ids)] == in_host[:1]
    assert len(answer.prompt_logprobs) == len(PROMPT)
    vllm.check_at_rest()
