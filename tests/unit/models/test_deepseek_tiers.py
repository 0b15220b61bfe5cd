"""DeepSeek's latents through host and NVMe: identical in lossless formats, and lossy only for who accepts it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepseek_runs import GREEDY, Expected, expected

from kvtier import LLM
from kvtier.config import load_config
from kvtier.doctor import Finding, Level, Subject, examine
from kvtier.doctor.model import measure_prefill, model_facts
from kvtier.engine import RequestOutput
from kvtier.errors import KVTierError

LENGTHS = (20, 21, 22, 70)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    directory = tmp_path_factory.mktemp("deepseek")
    return {kind: expected(directory / kind, kind, LENGTHS) for kind in ("v2", "v3-whole-queries")}


@pytest.fixture
def reference(models: dict[str, Expected]) -> Expected:
    return models["v3-whole-queries"]


def build(model: Path, nvme: Path, fmt: str = "raw", *, dtype: str = "float32", **tiering: Any) -> LLM:
    tiers = {
        "host": {"capacity": "16MiB"},
        "nvme": {"path": str(nvme), "capacity": "64MiB", "min_free": "0", "format": fmt},
        # What is found must be loaded, however busy the machine: the gate is measured elsewhere.
        "recompute_gate": False,
    }
    return LLM(model, tiering=tiers | tiering, config={"model": {"dtype": dtype}}, num_blocks=128, block_size=4)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def reusable(prompts: list[list[int]]) -> list[int]:
    return [(len(prompt) - 1) // 4 * 4 for prompt in prompts]


@pytest.mark.parametrize("fmt", ["raw", "bitsplit"])
@pytest.mark.parametrize("kind", ["v2", "v3-whole-queries"])
def test_identical_from_host_and_from_nvme_after_a_restart(
    models: dict[str, Expected], tmp_path: Path, kind: str, fmt: str
) -> None:
    reference = models[kind]
    with build(reference.directory, tmp_path / "nvme", fmt) as llm:
        assert tokens(llm.generate(reference.prompts, GREEDY)) == reference.continuations
        llm.flush()
        llm.clear_device_cache()
        from_host = [llm.generate([prompt], GREEDY)[0] for prompt in reference.prompts]
        assert tokens(from_host) == reference.continuations
        assert [output.metrics.loaded_tokens for output in from_host] == reusable(reference.prompts)
        assert llm.loaded_bytes()["host"] == sum(reusable(reference.prompts)) // 4 * block_bytes(llm)
    with build(reference.directory, tmp_path / "nvme", fmt) as again:
        outputs = [again.generate([prompt], GREEDY)[0] for prompt in reference.prompts]
        assert tokens(outputs) == reference.continuations
        assert [output.metrics.loaded_tokens for output in outputs] == reusable(reference.prompts)
        assert again.loaded_bytes()["nvme"] > 0


def block_bytes(llm: LLM) -> int:
    return llm.model.model.layout(4).block_bytes()


@pytest.mark.parametrize(("fmt", "smaller"), [("mla8", 3.0), ("mla4", 4.0)])
def test_lossy_latents_are_for_those_who_accept_them(
    reference: Expected, tmp_path: Path, fmt: str, smaller: float
) -> None:
    prompt, wanted = reference.prompts[-1], reusable(reference.prompts)[-1]
    with build(reference.directory, tmp_path / "nvme", fmt, accept_lossy=True) as llm:
        assert tokens(llm.generate([prompt], GREEDY)) == reference.continuations[-1:]
        for params, loaded in ((replace(GREEDY, accept_lossy=False), 0), (replace(GREEDY, logprobs=0), wanted)):
            llm.flush()
            llm.clear_device_cache()
            llm.clear_tier("host")
            (output,) = llm.generate([prompt], params)
            assert output.metrics.loaded_tokens == loaded
            assert output.finish_reason == "length"
            assert loaded or list(output.token_ids) == reference.continuations[-1]
        assert output.logprobs is not None
        assert all(math.isfinite(each.logprob) for each in output.logprobs)
        assert llm.loaded_bytes()["nvme"] * smaller < wanted // 4 * block_bytes(llm)


@pytest.mark.parametrize("fmt", ["int8", "k8v4", "int4r"])
def test_formats_of_keys_and_values_refuse_latents(reference: Expected, tmp_path: Path, fmt: str) -> None:
    with pytest.raises(KVTierError, match="kind mla, expected gqa"):
        build(reference.directory, tmp_path / "nvme", fmt, accept_lossy=True)


def test_another_dtype_or_model_is_a_clean_miss(models: dict[str, Expected], tmp_path: Path) -> None:
    first, other = models.values()
    with build(first.directory, tmp_path / "nvme") as llm:
        llm.generate(first.prompts, GREEDY)
    for directory, dtype in ((first.directory, "bfloat16"), (other.directory, "float32")):
        with build(directory, tmp_path / "nvme", dtype=dtype) as llm:
            assert llm.generate(first.prompts, GREEDY)[0].metrics.loaded_tokens == 0


def test_the_doctor_sizes_and_measures_it(reference: Expected, tmp_path: Path) -> None:
    def findings(fmt: str) -> dict[str, Finding]:
        overrides = {
            "model": {"path": str(reference.directory), "dtype": "float32"},
            "engine": {"block_size": 32},
            "tiering": {"host": {"capacity": "16MiB"}, "nvme": {"path": str(tmp_path), "format": fmt}},
        }
        config = load_config(overrides, environ={}, search=False).config
        subject = Subject(config, model_facts(config), measure_prefill(config))
        assert subject.prefill_tokens_per_second is not None
        assert subject.prefill_tokens_per_second > 0
        found = list(examine(subject, ["layout", "encoding", "capacity"]))
        return {
            finding.check: max((each for each in found if each.check == finding.check), key=level) for finding in found
        }

    def level(finding: Finding) -> int:
        return list(Level).index(finding.level)

    sound = findings("raw")
    assert [finding.level for finding in sound.values()] == [Level.OK] * 3
    assert f"{(24 + 8) * 3 * 4} B of KV per token" in sound["layout"].what
    assert "kind mla, expected gqa" in findings("int8")["capacity"].what


def test_identical_when_swapped_out_and_back(reference: Expected) -> None:
    # Three prompts fit, but not what they grow to.
    prompts, continuations = reference.prompts[:3], reference.continuations[:3]
    options = {"model": {"dtype": "float32"}, "engine": {"preemption": "swap", "watermark": 0.0}}
    tiers = {"host": {"capacity": "16MiB"}, "recompute_gate": False}
    with LLM(reference.directory, tiering=tiers, config=options, num_blocks=19, block_size=4) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert tokens(outputs) == continuations
        assert any(output.metrics.preemptions for output in outputs)
        # Nothing was stored before: what was loaded had been swapped out.
        assert any(output.metrics.loaded_tokens for output in outputs)
