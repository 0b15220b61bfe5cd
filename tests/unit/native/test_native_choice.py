"""Which implementation runs: built or not, of this interface or another, and as the environment says."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvtier import native
from kvtier.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_numpy_is_always_there_and_the_best_is_chosen():
    names = native.implementations()
    assert names[0] == "reference"
    assert native.available() == (len(names) > 1)
    if "KVTIER_NATIVE" not in os.environ:
        assert native.selected() == names[-1]


def test_another_implementation_for_a_while():
    before = native.selected()
    for name in native.implementations():
        with native.using(name):
            assert native.selected() == name
    assert native.selected() == before


def test_an_implementation_that_is_not_there_changes_nothing():
    before = native.selected()
    with pytest.raises(ConfigError, match=r"'avx1024': this machine has auto, reference"), native.using("avx1024"):
        pass
    assert native.selected() == before


def test_an_extension_of_another_interface_is_not_used(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "kvtier.native._codecs", types.SimpleNamespace(INTERFACE=0))
    assert native._load() is None
    assert "has interface 0" in caplog.text


def in_process(setting, code):
    environment = {**os.environ, "KVTIER_NATIVE": setting}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_the_environment_chooses():
    result = in_process("reference", "from kvtier import native; print(native.selected())")
    assert result.stdout == "reference\n"
    result = in_process("fast", "import kvtier.native")
    assert result.returncode != 0
    assert "ConfigError: KVTIER_NATIVE='fast': this machine has auto, reference" in result.stderr.splitlines()[-1]


def test_without_the_extension_numpy_is_used():
    code = (
        "import sys; sys.modules['kvtier.native._codecs'] = None; "
        "from kvtier import native; print(native.available(), native.selected())"
    )
    assert in_process("auto", code).stdout == "False reference\n"


def test_a_build_without_a_compiler_says_so_in_a_line_and_goes_on(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path]
    environment = {**os.environ, "CC": str(tmp_path / "no-such-compiler")}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    notices = [line for line in result.stderr.splitlines() if "kvtier.native._codecs was not built" in line]
    assert len(notices) == 1
    assert list(tmp_path.rglob("*.so")) == []
