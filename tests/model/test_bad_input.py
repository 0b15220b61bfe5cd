"""What a user gets wrong: one line that says what to do, an exit code, and nothing written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier import LLM
from kvtier.errors import CapacityError, ConfigError, KVTierError, ModelError, RequestError

pytestmark = pytest.mark.model


def demo(*arguments: str, cache: Path) -> "subprocess.CompletedProcess[str]":
    environ = os.environ | {"KVTIER_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", "import sys; from kvtier.cli import main; sys.exit(main())", "demo", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)


def assert_one_line(result: "subprocess.CompletedProcess[str]", *words: str) -> None:
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]


@pytest.fixture
def small_context(default_model: Path, tmp_path: Path) -> Path:
    """The default model with a context that no license fits into."""
    copy = tmp_path / "small-context"
    shutil.copytree(default_model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    return copy


def test_missing_model_directory(tmp_path: Path) -> None:
    result = demo("--model", str(tmp_path / "nowhere"), cache=tmp_path / "cache")
    assert_one_line(result, "nowhere", "expected")
    assert list(tmp_path.rglob("*.kv")) == []


def test_truncated_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(40))
    assert_one_line(demo("--model", str(path), cache=tmp_path / "cache"), "model.gguf")


def test_unsupported_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    assert_one_line(demo("--model", str(tmp_path), cache=tmp_path / "cache"), "GPT2LMHeadModel", "LlamaForCausalLM")


def test_unusable_cache_directory(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert_one_line(demo(cache=blocked / "cache"), "cache")
    assert blocked.read_text() == "in the way"


def test_cache_directory_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "VERSION").write_text("kvtier cache 999\n")
    assert_one_line(demo(cache=tmp_path), str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def test_prompt_longer_than_the_context(small_context: Path, tmp_path: Path) -> None:
    assert_one_line(demo("--model", str(small_context), cache=tmp_path / "cache"), "256", "context")


def test_requests_are_refused_before_anything_runs(default_model: Path) -> None:
    with LLM(default_model, tiering={"host": None}, num_blocks=8) as llm:
        for prompt, word in (("", "empty"), ([], "empty"), ([10**6], "token id"), ([1] * 500, "context")):
            with pytest.raises(RequestError, match=word):
                llm.generate([[1, 2], prompt])
            assert llm.engine.stats().steps == 0
            assert not llm.engine.has_work
        with pytest.raises(RequestError, match="expected"):
            llm.generate([1, 2, 3])
        with pytest.raises(RequestError, match="SamplingParams"):
            llm.generate("text", {"max_tokens": 3})
    with pytest.raises(KVTierError, match="closed"):
        llm.generate("text")


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_capacity_below_one_block(default_model: Path, tmp_path: Path, tier: str) -> None:
    tiering = {"host": {"capacity": "1GiB"}, "nvme": {"path": str(tmp_path / "nvme"), "capacity": "1GiB"}}
    tiering[tier]["capacity"] = "64KiB"
    with pytest.raises(CapacityError, match=f"{tier}.capacity.*one KV block"):
        LLM(default_model, tiering=tiering)
    assert list(tmp_path.iterdir()) == []


def test_a_device_pool_that_cannot_be_made_leaves_no_directory(default_model: Path, tmp_path: Path) -> None:
    tiering = {"nvme": {"path": str(tmp_path / "nvme"), "capacity": "1GiB"}}
    with pytest.raises(CapacityError, match="one block"):
        LLM(default_model, tiering=tiering, memory="4KiB")
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(default_model, tiering=tiering, num_blocks=4, max_model_len=1000)
    assert list(tmp_path.iterdir()) == []


def test_contradictions_are_refused(default_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gateway"):
        LLM(default_model, tiering={"host": None, "nvme": {"path": str(tmp_path / "nvme")}})
    with pytest.raises(ConfigError, match=r"max_runing.*max_running"):
        LLM(default_model, max_runing=4)
    for wrong in ({"engine": 5}, {"model": None}):
        with pytest.raises(ConfigError, match="expected a mapping"):
            LLM(default_model, config=wrong)
    with pytest.raises(ModelError):
        LLM(tmp_path)
    assert list(tmp_path.iterdir()) == []
