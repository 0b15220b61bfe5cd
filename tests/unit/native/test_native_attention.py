"""Which attention kernels run, which library their threads come from, and what they refuse."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvtier.errors import ConfigError
from kvtier.native import attention

built = pytest.mark.skipif(len(attention.implementations()) == 1, reason="the extension was not built")


def _python(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_best_implementation_is_chosen():
    names = attention.implementations()
    assert names[0] == "reference"
    if "KVTIER_NATIVE" not in os.environ:
        assert (attention.kernels() is None) == (len(names) == 1)


def test_torch_does_it_where_it_is_told_to():
    code = "from kvtier.native import attention; print(attention.kernels())"
    assert _python(code, KVTIER_NATIVE="reference") == "None"


def test_an_implementation_that_is_not_there_changes_nothing():
    before = attention.kernels()
    with pytest.raises(ConfigError, match=r"'avx1024': this machine has auto, reference"), attention.using("avx1024"):
        pass
    assert attention.kernels() is before
    with attention.using("reference"):
        assert attention.kernels() is None
    assert attention.kernels() is before


def test_an_extension_of_another_interface_is_not_used(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "kvtier.native._attention", SimpleNamespace(INTERFACE=attention.INTERFACE + 1))
    attention._load.cache_clear()
    try:
        assert attention.implementations() == ("reference",)
        assert "build it again" in caplog.text
        with pytest.raises(ConfigError, match="was not built"):
            attention.compiled()
    finally:
        attention._load.cache_clear()


@built
def test_it_shares_the_openmp_runtime_of_torch():
    code = (
        "import torch; from kvtier.native import attention; attention.compiled();"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}))"
    )
    assert _python(code) == "1"


@built
@pytest.mark.parametrize(
    ("call", "arguments", "error", "match"),
    [
        ("attend", [0] * 23, TypeError, "23 arguments: expected 24"),
        ("attend", [1] * 24, ValueError, "multiple of 16"),
        ("write_rows", [0] * 13, ValueError, "at least one token"),
        ("rms_norm", [0, 0, 0, 0, 1, 1, 0, 24, 0, 1, 1e-5], ValueError, "multiple of 16"),
        ("rms_norm", [0, 0, 0, 0, 1, 1, 0, 16, 0, 1, "eps"], TypeError, "real number"),
        ("rms_norm", [0] * 10, TypeError, "9 arguments: expected 10"),
        ("rotate", [0, 0, 0, 0, 1, 1, 48, 0, 1], ValueError, "multiple of 32"),
        ("silu_times", [0, 0, 1, 16, 2, 1], ValueError, "float32 or bfloat16"),
        ("silu_times", [0, 0, -1, 16, 0, 1], ValueError, "argument 2 is -1"),
        ("silu_times", [0, 0, 1.5, 16, 0, 1], TypeError, "integer"),
    ],
)
def test_what_the_kernels_refuse(call, arguments, error, match):
    with pytest.raises(error, match=match):
        getattr(attention.compiled(), call)(*arguments)
