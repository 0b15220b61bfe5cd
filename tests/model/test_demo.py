"""The demo and the example as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
BLOCK_TOKENS = 16
TOKEN_BYTES = 46_080  # 30 layers x (K, V) x 3 KV heads x 64 elements x 4 bytes


@pytest.fixture(scope="module")
def demo(default_model: Path) -> dict[str, Any]:
    before = _directories(default_model)
    command = [sys.executable, "-c", "import sys; from kvtier.cli import main; sys.exit(main())", "demo", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout) | {"left": _directories(default_model) - before}


def _directories(model: Path) -> set[Path]:
    return set(model.parents[1].glob("demo-*"))


def test_every_place_is_shown(demo: dict[str, Any]) -> None:
    assert [row["source"] for row in demo["rows"]] == ["cold", "device", "host", "nvme", "nvme-after-kill"]
    assert demo["prompt_tokens"] > 1000


def test_outputs_are_identical(demo: dict[str, Any]) -> None:
    assert demo["identical"] is True


def test_bytes_moved_follow_from_the_layout(demo: dict[str, Any]) -> None:
    for row in demo["rows"]:
        loaded = row["tokens_reused"] if row["source"] not in ("cold", "device") else 0
        assert row["bytes_moved"] == loaded * TOKEN_BYTES
        assert row["tokens_reused"] % BLOCK_TOKENS == 0
    cold, *others = demo["rows"]
    assert cold["tokens_reused"] == 0
    for row in others:
        assert row["tokens_reused"] + row["tokens_computed"] == cold["tokens_computed"]
        assert row["tokens_computed"] < 0.05 * cold["tokens_computed"]


def test_nothing_is_left_behind(demo: dict[str, Any]) -> None:
    assert demo["left"] == set()


def test_the_example(default_model: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples/shared_document.py"), str(default_model)],
        env=os.environ | {"KVTIER_MODEL__DTYPE": "float32"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lives = [line.split(" life: ") for line in result.stdout.splitlines()]
    assert [life for life, _ in lives] == ["first", "first", "second", "second"]
    assert " 0 loaded" in lives[0][1]
    assert " 0 loaded" not in lives[2][1]
