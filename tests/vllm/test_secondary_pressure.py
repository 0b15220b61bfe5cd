"""kvtier's tiers below vLLM's own host tier, where NVMe hangs, or is smaller than what is computed."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from secondary_world import PROMPTS, Tiered, nvme
from tiny_llama import BLOCK_BYTES
from vllm_world import BLOCK, tokens_of, whole_blocks

DEADLINE = 0.5


@contextmanager
def hanging(tier: Any, verb: str) -> Iterator[None]:
    """The tier's verb comes back when this ends, not before."""
    free, real = threading.Event(), getattr(tier, verb)

    def hang(*args: Any, **kwargs: Any) -> Any:
        assert free.wait(60)
        return real(*args, **kwargs)

    setattr(tier, verb, hang)
    try:
        yield
    finally:
        free.set()
        setattr(tier, verb, real)


@pytest.mark.parametrize("verb", ["write", "read", "acquire"])
def test_a_disk_that_hangs_costs_its_deadline_and_no_token(tiny, reference, tmp_path, verb):
    expected = reference(PROMPTS, 8)
    with Tiered(tiny, nvme(tmp_path, load_deadline=DEADLINE)) as vllm:
        (below,) = vllm.tier.store.lower
        if verb != "write":
            assert vllm.tokens(PROMPTS) == expected
            vllm.forget_hosts()
        with hanging(below, verb):
            start = time.monotonic()
            assert vllm.given(PROMPTS) == (expected, 0)
            vllm.tier.drain_jobs()
            waited = time.monotonic() - start
            # Three prompts, each of which may have waited before the breaker was open, and vLLM's own time.
            assert waited < 3 * DEADLINE + 10
            again = tokens_of(50, 100)
            assert vllm.tokens([again]) == reference([again], 8)
        vllm.settle()
        vllm.tier.store.settle()
        assert vllm.all_free
        assert not any(vllm.tier.store.stats()[tier.name]["leases"] for tier in vllm.tier.store.tiers)
        vllm.forget()
        assert vllm.tokens(PROMPTS) == expected


def test_what_vllm_uses_from_its_own_memory_outlives_on_nvme_what_it_does_not_use(tiny, reference, tmp_path):
    hot, *cold = (tokens_of(60 + at, 8 * BLOCK + 2) for at in range(6))
    expected = reference([hot], 8)
    with Tiered(tiny, nvme(tmp_path, capacity=26 * BLOCK_BYTES // 4096 * 4096)) as vllm:
        for prompt in cold:
            assert vllm.tokens([hot]) == expected
            vllm.tokens([prompt])
            vllm.settle()
        written = vllm.tier.store.metrics.value("written_bytes_total", tier="nvme")
        assert written == (1 + len(cold)) * 8 * BLOCK_BYTES, "each once: the hot one was not lost and stored again"
        vllm.forget_hosts()
        assert vllm.given([hot]) == (expected, whole_blocks([hot]) * BLOCK_BYTES)
        vllm.forget_hosts()
        assert vllm.given([cold[0]])[1] == 0, "that was the oldest"
