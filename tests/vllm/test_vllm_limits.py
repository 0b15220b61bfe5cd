"""Tiers that are full, too small, or cannot be opened."""

import pytest
from vllm_world import BLOCK, Vllm, tiers, tokens_of

from kvtier.nvme.checking import FAULTS
from kvtier.nvme.inspection import look


def test_a_full_disk_costs_hits_only(tiny, tmp_path, reference):
    path = tmp_path / "nvme"
    prompts = [tokens_of(900 + each, 5 * BLOCK + 1) for each in range(12)]
    expected = reference(prompts, 8)
    settings = tiers(path, host="1MiB")
    settings["nvme"] |= {"capacity": "2MiB", "segment_size": "1MiB"}
    with Vllm(tiny, settings) as vllm:
        for _ in range(2):
            for prompt, answer in zip(prompts, expected, strict=True):
                assert vllm.tokens([prompt]) == [answer]
            vllm.only("nvme")
        assert vllm.value("occupied_bytes", tier="nvme") <= 2 << 20
        vllm.check_at_rest()
    with look(path) as found:
        report = found.check(verify=True)
    assert {fault: report[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0)


def test_a_tier_that_cannot_be_opened_is_an_error_at_the_start(tiny, tmp_path):
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(Exception, match="file"):
        Vllm(tiny, tiers(tmp_path / "file"))
