"""kvtier's tiers below vLLM's own host tier, engine after engine: damage, new processes, other weights, remote."""

import pytest
from kvtier_vllm.secondary import KVTierSecondaryTier
from secondary_world import BYTES, PROMPTS, Tiered, fresh, nvme
from tiny_llama import BLOCK_BYTES, save_llama
from vllm_world import whole_blocks

from kvtier.errors import ConfigError


def test_a_damaged_block_is_a_miss_and_is_computed(tiny, reference, tmp_path):
    expected = reference(PROMPTS, 8)
    with Tiered(tiny, nvme(tmp_path)) as vllm:
        assert vllm.tokens(PROMPTS) == expected
        vllm.settle()
    with next(tmp_path.glob("*.kv")).open("r+b") as file:
        file.seek(BLOCK_BYTES // 2)  # of the first block of the file
        file.write(b"\xff" * 64)
    with Tiered(tiny, nvme(tmp_path)) as vllm:
        found, nbytes = vllm.given(PROMPTS)
        assert found == expected
        assert 0 < nbytes < BYTES
        assert vllm.tier.store.metrics.value("corrupt_blocks_total", tier="nvme") == 1
        # It was stored again.
        vllm.forget_hosts()
        assert vllm.given(PROMPTS) == (expected, BYTES)


def test_a_new_process_finds_it_and_one_with_other_weights_does_not(tiny, reference, tmp_path):
    tier = nvme(tmp_path / "nvme")
    expected = reference(PROMPTS, 8)
    with Tiered(tiny, tier) as vllm:
        assert vllm.given(PROMPTS) == (expected, 0)
        vllm.settle()
    assert fresh(tiny, tier, PROMPTS) == (expected, BYTES)
    with Tiered(save_llama(tmp_path / "other", seed=1), tier) as vllm:
        assert vllm.given(PROMPTS)[1] == 0


def test_a_remote_tier_is_asked_without_waiting_for_it(tiny, reference, tmp_path):
    pytest.importorskip("obstore")
    expected = reference(PROMPTS, 8)
    remote = {"url": f"file://{tmp_path}", "options": "run=1"}
    with Tiered(tiny, {"remote": remote, "host": {"capacity": 8 << 20}}) as vllm:
        assert vllm.given(PROMPTS) == (expected, 0)
        vllm.forget_hosts()
        assert vllm.given(PROMPTS) == (expected, BYTES)
        assert vllm.read_blocks("remote") == whole_blocks(PROMPTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no tier below host"),
        ({"nvme": {"path": "x", "format": "bitsplit"}}, "expected raw"),
        ({"nvme": {"path": "x", "capacty": 1}}, "did you mean"),
        ({"nvme": {"path": "x"}, "host": "1GiB"}, "tiering.host"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        KVTierSecondaryTier(None, memoryview(bytearray(1 << 12)), "test", **settings)
