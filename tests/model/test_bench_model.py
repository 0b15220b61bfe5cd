"""A bench of the real model in this process: lengths hold for its tokenizer, and histories come back from host."""

import asyncio
from pathlib import Path

import pytest

from kvtier import AsyncLLM
from kvtier.bench import Conversations, Load, Pace, figures, measure
from kvtier.bench.local import LocalTarget

pytestmark = pytest.mark.model


def test_chats_of_the_real_model_come_back_from_host(default_model: Path) -> None:
    tiering = {"host": {"capacity": "256MiB"}, "recompute_gate": False}
    workload = Conversations(chats=3, turns=2, prompt_tokens=200, turn_tokens=40, output_tokens=8)
    load = Load(workload.scripts(Pace(), 1), seed=1, concurrency=1, warm_up=0)

    async def run():
        # Room for one chat: 20 blocks of 16 tokens.
        target = LocalTarget(
            AsyncLLM(default_model, tiering=tiering, num_blocks=24, max_running=1), "m", "here", ignore_eos=True
        )
        try:
            return await measure(target, load)
        finally:
            await target.close()

    run = asyncio.run(run())
    assert [sample.error for sample in run.samples] == [None] * 6
    first = [sample.usage for sample in run.samples if sample.is_first]
    later = [sample.usage for sample in run.samples if not sample.is_first]
    # The template's system message, and the frames of messages: some 30 tokens.
    assert all(200 <= usage.prompt_tokens <= 240 for usage in first)
    assert all(240 + 8 <= usage.prompt_tokens <= 300 for usage in later)
    assert all(usage.output_tokens == 8 for usage in (*first, *later))
    found = {figure.name: figure.value for figure in figures(run)}
    assert found["bench.tokens.cached.later"] > 0.7
    assert found["bench.tokens.loaded.later"] > 0.6
