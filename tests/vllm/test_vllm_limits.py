"""Tiers that are full, too small, or cannot be opened."""

import pytest
import vllm_world
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


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_half_a_role_is_an_error_at_the_start(tiny, monkeypatch, role):
    whole = vllm_world.transfer_config

    def half(*arguments: object) -> object:
        config = whole(*arguments)
        config.kv_role = role
        return config

    monkeypatch.setattr(vllm_world, "transfer_config", half)
    with pytest.raises(Exception, match=f"kv_role = '{role}': expected 'kv_both'"):
        Vllm(tiny, tiers())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load": "soon"}, "load = 'soon'"),
        ({"nvme": {"path": "/proc/kvtier"}}, "/proc"),
        ({"nvme": {"path": "nvme", "format": "kivi4"}}, "kivi4"),
        ({"host": {"capacity": "1KiB"}}, "host.capacity"),
        ({"hots": {}}, "hots"),
    ],
)
def test_a_setting_that_makes_no_sense_is_an_error_at_the_start(tiny, tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=message):
        Vllm(tiny, settings)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_prompts_that_are_longer_than_host(tiny, tmp_path, reference, load):
    prompts = [tokens_of(950 + each, 6 * BLOCK + 9) for each in range(3)]
    expected = reference(prompts, 8)
    with Vllm(tiny, tiers(tmp_path / "nvme", host="200KiB", load=load)) as vllm:
        vllm.tokens(prompts)
        for _ in range(2):
            vllm.settle()
            vllm.forget()
            found, loaded = vllm.loading(prompts)
            assert found == expected
            assert 0 < sum(loaded.values()) <= 18
        vllm.check_at_rest()


@pytest.mark.parametrize("load", ["sync", "async"])
def test_without_prefix_caching_on_the_device(tiny, reference, load):
    prompts = [tokens_of(970 + each, 6 * BLOCK + 9) for each in range(2)]
    expected = reference(prompts, 8)
    with Vllm(tiny, tiers(load=load), enable_prefix_caching=False) as vllm:
        vllm.tokens(prompts)
        for _ in range(2):
            vllm.settle()
            assert vllm.loading(prompts) == (expected, {"host": 12})
        vllm.check_at_rest()
