"""`kvtier doctor` as a user runs it."""

import json
from pathlib import Path

import pytest

from kvtier.cli import main


@pytest.fixture(autouse=True)
def _no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path / "cache"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "some.toml"
    path.write_text(
        f'[tiering.host]\ncapacity = "32MiB"\n[tiering.nvme]\npath = "{tmp_path}/n"\ncapacity = "64MiB"\nmin_free = 0\n'
    )
    return path


def test_findings_are_lines_with_remedies(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    code, out, err = run(capsys, "--config", str(config), "--prefill-rate", "1000")
    assert code == 0
    assert "the default model is not here" in err
    lines = out.splitlines()
    assert lines[-1].startswith("0 problems, ")
    levels = [line.split()[0] for line in lines[:-1]]
    assert set(levels) <= {"ok", "warning", "->"}
    assert levels.count("->") == levels.count("warning") > 0
    assert not (tmp_path / "n").exists()


def test_json_and_exit_code(capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path) -> None:
    (tmp_path / "n").write_text("a file where the directory should be")
    code, out, _ = run(capsys, "--config", str(config), "--json")
    said = json.loads(out)
    assert code == 1
    assert said["problems"] >= 1
    (bad,) = [one for one in said["findings"] if one["check"] == "directory"]
    assert (bad["level"], set(bad)) == ("problem", {"check", "level", "what", "remedy"})
    assert said["warnings"] == sum(one["level"] == "warning" for one in said["findings"])


def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "--prefill-rate", "-3")
    assert (code, err) == (2, "error: --prefill-rate -3.0: expected tokens per second, above 0\n")
    code, _, err = run(capsys, "--config", str(tmp_path / "absent.toml"))
    assert code == 2
    assert "absent.toml" in err
    assert len(err.splitlines()) == 1


@pytest.mark.model
def test_the_default_model_is_measured(default_model: Path, config: Path) -> None:
    from kvtier.config import load_config
    from kvtier.doctor.model import measure_prefill, model_facts

    loaded = load_config({"model": {"path": str(default_model)}}, environ={}, file=config).config
    facts = model_facts(loaded)
    # 30 layers, 3 KV heads of 64 elements, K and V.
    assert facts.token_bytes == 30 * 2 * 3 * 64 * {"float32": 4, "bfloat16": 2}[facts.layout.groups[0].dtype]
    assert measure_prefill(loaded) > 1
    coded = loaded.model_copy(update={"engine": loaded.engine.model_copy(update={"kv_format": "int8"})})
    assert model_facts(coded).token_bytes == 30 * 2 * 3 * (64 + 2)
