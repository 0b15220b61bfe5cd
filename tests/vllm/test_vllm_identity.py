"""Who finds whose KV: by salt, adapter, weights, number format, block size, after a restart."""

from pathlib import Path

import pytest
from tiny_llama import save_llama
from vllm.lora.request import LoRARequest
from vllm_world import BLOCK, Vllm, tiers, tokens_of

PROMPTS = [tokens_of(500, 6 * BLOCK + 3), tokens_of(501, 4 * BLOCK + 1)]
BLOCKS = 10


def test_a_salt_finds_its_own_blocks_only(tiny, tmp_path, reference):
    expected = reference(PROMPTS, 8)
    with Vllm(tiny, tiers(tmp_path / "nvme")) as vllm:
        for salt in (None, "a", "b", "aa"):
            assert vllm.loading(PROMPTS, salt=salt) == (expected, {}), salt
            vllm.only("host")
        for salt in (None, "a", "b", "aa"):
            vllm.only("nvme")
            assert vllm.loading(PROMPTS, salt=salt) == (expected, {"nvme": BLOCKS}), salt


def test_the_salt_of_an_engine_separates_it(tiny, tmp_path, reference):
    expected = reference(PROMPTS, 8)
    for salt, loaded in (("one", {}), ("two", {}), ("one", {"nvme": BLOCKS})):
        with Vllm(tiny, tiers(tmp_path / "nvme", salt=salt)) as vllm:
            assert vllm.loading(PROMPTS) == (expected, loaded)


def test_an_adapter_finds_its_own_blocks_only(tiny, tiny_adapters, tmp_path, reference):
    loras = [None, *(LoRARequest(f"lora-{at}", at, str(path)) for at, path in enumerate(tiny_adapters, 1))]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with Vllm(tiny, **options) as plain:
        expected = [plain.tokens(PROMPTS, lora=lora) for lora in loras]
    assert expected[0] == reference(PROMPTS, 8)
    assert expected[0] != expected[1] != expected[2]
    with Vllm(tiny, tiers(tmp_path / "nvme"), **options) as vllm:
        for lora, answers in zip(loras, expected, strict=True):
            assert vllm.loading(PROMPTS, lora=lora) == (answers, {})
            vllm.only("host")
        for lora, answers in zip(loras, expected, strict=True):
            vllm.only("nvme")
            assert vllm.loading(PROMPTS, lora=lora) == (answers, {"nvme": BLOCKS})


@pytest.mark.parametrize("load", ["sync", "async", "auto"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_next_engine_finds_everything(tiny, tmp_path, reference, load, policy):
    expected = reference(PROMPTS, 8)
    for loaded in ({}, {"nvme": BLOCKS}):
        with Vllm(tiny, tiers(tmp_path / "nvme", load=load), policy=policy) as vllm:
            assert vllm.loading(PROMPTS) == (expected, loaded)


@pytest.fixture
def written(tiny: Path, tmp_path: Path) -> Path:
    """A directory that an engine with `tiny` has filled."""
    with Vllm(tiny, tiers(tmp_path / "nvme")) as vllm:
        vllm.tokens(PROMPTS)
    return tmp_path / "nvme"


def test_other_weights_find_nothing(written, tiny, tmp_path):
    other = save_llama(tmp_path / "other", seed=1)
    with Vllm(other) as plain:
        expected = plain.tokens(PROMPTS)
    with Vllm(other, tiers(written)) as vllm:
        assert vllm.loading(PROMPTS) == (expected, {})
        vllm.only("nvme")
        assert vllm.loading(PROMPTS) == (expected, {"nvme": BLOCKS})


def test_the_same_weights_in_another_place_find_everything(written, tmp_path, reference):
    moved = save_llama(tmp_path / "moved", seed=0)
    with Vllm(moved, tiers(written)) as vllm:
        assert vllm.loading(PROMPTS) == (reference(PROMPTS, 8), {"nvme": BLOCKS})


@pytest.mark.parametrize("options", [{"block_size": 2 * BLOCK}, {"dtype": "bfloat16"}], ids=str)
def test_another_layout_finds_nothing(written, tiny, options):
    with Vllm(tiny, **options) as plain:
        expected = plain.tokens(PROMPTS)
    with Vllm(tiny, tiers(written), **options) as vllm:
        assert vllm.tokens(PROMPTS) == expected
        assert vllm.loaded() == {}
        vllm.only("nvme")
        assert vllm.tokens(PROMPTS) == expected
        assert vllm.loaded()["nvme"] > 0
