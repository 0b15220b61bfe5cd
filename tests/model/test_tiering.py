"""The main job on the real model: greedy fp32 output is the same wherever the prefix was found."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier import LLM, SamplingParams
from kvtier.engine import RequestOutput
from kvtier.errors import RequestError
from kvtier.hints import RequestHints

pytestmark = pytest.mark.model

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def build(model: Path, nvme: Path | None = None, **engine: Any) -> LLM:
    # What is found must be loaded, however busy the machine: the gate is measured elsewhere.
    tiering: dict[str, Any] = {"host": {"capacity": "256MiB"}, "recompute_gate": False}
    if nvme is not None:
        tiering["nvme"] = {"path": str(nvme), "capacity": "256MiB", "min_free": "0"}
    return LLM(model, tiering=tiering, config={"model": {"dtype": "float32"}}, num_blocks=64, **engine)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    # About 300 and 250 tokens with a common beginning, and one that shares nothing.
    return [TEXT[:1500], TEXT[:1100] + " But", "An unrelated question:"]


@pytest.fixture(scope="module")
def reference(default_model: Path, prompts: list[str]) -> list[list[int]]:
    off = LLM(default_model, tiering={"host": None}, config={"model": {"dtype": "float32"}}, num_blocks=64)
    with off as llm:
        assert llm.store is None
        outputs = []
        for prompt in prompts:
            outputs.append(list(llm.generate(prompt, GREEDY).token_ids))
            llm.clear_device_cache()
        return outputs


@pytest.fixture
def llm(default_model: Path, tmp_path: Path) -> Iterator[LLM]:
    with contextlib.closing(build(default_model, tmp_path / "nvme")) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def block_bytes(llm: LLM) -> int:
    return llm.model.model.layout(16).block_bytes()


def test_found_in_device_host_and_nvme(llm: LLM, prompts: list[str], reference: list[list[int]]) -> None:
    cold = llm.generate(prompts, GREEDY)
    assert tokens(cold) == reference
    warm = llm.generate(prompts, GREEDY)
    assert tokens(warm) == reference
    assert warm[0].metrics.cached_tokens == (warm[0].prompt_tokens - 1) // 16 * 16
    assert llm.loaded_bytes() == {"host": 0, "nvme": 0}

    llm.clear_device_cache()
    from_host = llm.generate(prompts[0], GREEDY)
    assert list(from_host.token_ids) == reference[0]
    assert from_host.metrics.loaded_tokens == (from_host.prompt_tokens - 1) // 16 * 16
    assert llm.loaded_bytes()["host"] == from_host.metrics.loaded_tokens // 16 * block_bytes(llm)

    llm.flush()
    llm.clear_device_cache()
    llm.clear_tier("host")
    from_nvme = llm.generate(prompts[0], GREEDY)
    assert list(from_nvme.token_ids) == reference[0]
    assert from_nvme.metrics.loaded_tokens == from_host.metrics.loaded_tokens
    assert llm.loaded_bytes()["nvme"] == from_nvme.metrics.loaded_tokens // 16 * block_bytes(llm)


def test_found_after_a_restart(
    default_model: Path, tmp_path: Path, prompts: list[str], reference: list[list[int]]
) -> None:
    with build(default_model, tmp_path / "nvme") as first:
        first.generate(prompts, GREEDY)
    with build(default_model, tmp_path / "nvme") as second:
        outputs = [second.generate(prompt, GREEDY) for prompt in prompts]
        assert tokens(outputs) == reference
        assert outputs[0].metrics.loaded_tokens == (outputs[0].prompt_tokens - 1) // 16 * 16


def test_another_salt_or_dtype_is_a_clean_miss(default_model: Path, tmp_path: Path, prompts: list[str]) -> None:
    with build(default_model, tmp_path / "nvme") as first:
        first.generate(prompts[0], GREEDY)
    other = {"host": {"capacity": "256MiB"}, "nvme": {"path": str(tmp_path / "nvme"), "capacity": "256MiB"}}
    with LLM(default_model, tiering=other, config={"model": {"dtype": "bfloat16"}}, num_blocks=64) as second:
        assert second.generate(prompts[0], GREEDY).metrics.loaded_tokens == 0


def test_all_blocks_of_a_chunked_prefill_are_stored(
    default_model: Path, tmp_path: Path, prompts: list[str], reference: list[list[int]]
) -> None:
    with build(default_model, tmp_path / "nvme", token_budget=48) as llm:
        assert list(llm.generate(prompts[0], GREEDY).token_ids) == reference[0]
        llm.clear_device_cache()
        again = llm.generate(prompts[0], GREEDY)
        assert list(again.token_ids) == reference[0]
        assert again.metrics.loaded_tokens == (again.prompt_tokens - 1) // 16 * 16


def test_equal_prompts_at_once_load_together(llm: LLM, prompts: list[str], reference: list[list[int]]) -> None:
    llm.generate(prompts[0], GREEDY)
    llm.flush()
    llm.clear_device_cache()
    llm.clear_tier("host")
    outputs = llm.generate([prompts[0]] * 3, GREEDY)
    assert tokens(outputs) == [reference[0]] * 3
    assert llm.store is not None
    stats = llm.store.stats()
    assert all(stats[tier][what] == 0 for tier in ("host", "nvme") for what in ("leases", "reservations"))


def test_hints_change_no_output(llm: LLM, prompts: list[str], reference: list[list[int]]) -> None:
    hints = [RequestHints(priority=4.0, session="a"), None, RequestHints(session="b", end_of_session=True)]
    assert tokens(llm.generate(prompts, GREEDY, hints=hints)) == reference
    llm.clear_device_cache()
    assert tokens(llm.generate(prompts, GREEDY, hints=RequestHints(reuse="none", ttl=0.0))) == reference
    with pytest.raises(RequestError, match="2 hints for 3 prompts"):
        llm.generate(prompts, GREEDY, hints=hints[:2])


def test_lossy_kv_on_nvme_is_for_those_who_accept_it(default_model: Path, tmp_path: Path) -> None:
    tiering = {
        "host": {"capacity": "256MiB"},
        "nvme": {"path": str(tmp_path / "nvme"), "capacity": "256MiB", "min_free": "0", "format": "int8"},
        "accept_lossy": True,
    }
    with LLM(default_model, tiering=tiering, config={"model": {"dtype": "float32"}}, num_blocks=64) as llm:
        prompt = TEXT[:400]
        exact = llm.generate(prompt, GREEDY).token_ids
        for params, loads in ((replace(GREEDY, accept_lossy=False), False), (GREEDY, True)):
            llm.flush()
            llm.clear_device_cache()
            llm.clear_tier("host")
            output = llm.generate(prompt, params)
            reusable = (output.prompt_tokens - 1) // 16 * 16
            assert output.metrics.loaded_tokens == (reusable if loads else 0)
            assert loads or output.token_ids == exact
        # int8 takes a little more than a quarter of float32.
        assert 0.25 < llm.loaded_bytes()["nvme"] / (reusable // 16 * block_bytes(llm)) < 0.3
        assert llm.generate(prompt, GREEDY).metrics.cached_tokens == reusable
        strict = llm.generate(prompt, replace(GREEDY, accept_lossy=False))
        assert (strict.metrics.cached_tokens, strict.metrics.loaded_tokens) == (0, 0)
        assert strict.token_ids == exact


def test_flipped_bytes_on_nvme_cost_a_recompute(
    llm: LLM, tmp_path: Path, prompts: list[str], reference: list[list[int]]
) -> None:
    llm.generate(prompts[0], GREEDY)
    llm.flush()
    llm.clear_device_cache()
    llm.clear_tier("host")
    assert llm.store is not None
    for segment in (tmp_path / "nvme").glob("seg-*.kv"):
        with segment.open("r+b") as file:
            # One byte in the middle of every block: nothing of the file may be used.
            for at in range(block_bytes(llm) // 2, segment.stat().st_size, block_bytes(llm)):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
    output = llm.generate(prompts[0], GREEDY)
    assert list(output.token_ids) == reference[0]
    assert output.metrics.loaded_tokens == 0
    assert llm.store.metrics.value("corrupt_blocks_total", tier="nvme") >= 1


def test_every_length_around_a_block_edge(llm: LLM) -> None:
    ids = llm.model.tokenizer.encode(TEXT[200:1200])
    params = replace(GREEDY, max_tokens=3)
    for length in (1, 15, 16, 17, 31, 32, 33, 48, 49):
        cold = llm.generate([ids[:length]], params)[0]
        llm.clear_device_cache()
        again = llm.generate([ids[:length]], params)[0]
        assert again.token_ids == cold.token_ids
        assert again.metrics.loaded_tokens == (length - 1) // 16 * 16
        llm.clear_device_cache()
        llm.clear_tier(None)
