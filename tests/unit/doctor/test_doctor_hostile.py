"""Settings that no tier could be opened with, and numbers that are none."""

from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.config import Config
from kvtier.doctor import Level, Subject, disk


def test_a_directory_below_a_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Config.model_validate({"tiering": {"nvme": {"path": str(tmp_path / "file" / "sub" / "kv")}}})
    (finding,) = disk.directory(Subject(settings))
    assert finding.level is Level.PROBLEM
    assert f"{tmp_path / 'file'} is a file" in finding.what


@pytest.mark.parametrize("rate", ["nan", "inf", "0", "-1"])
def test_a_prefill_rate_is_a_speed(capsys: pytest.CaptureFixture[str], rate: str) -> None:
    assert main(["doctor", f"--prefill-rate={rate}"]) == 2
    assert "--prefill-rate" in capsys.readouterr().err
