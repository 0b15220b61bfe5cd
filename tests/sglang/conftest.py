"""SGLang itself, without installing it: its unpacked wheel under a stand-in for the package that imports everything."""

import importlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DEFAULT = Path(__file__).parents[2] / "build" / "sglang" / "wheel"


class Sglang(NamedTuple):
    """The parts of SGLang that a storage backend meets: its modules, and where they lie."""

    contract: types.ModuleType
    factory: type
    path: Path


def wheel() -> Path:
    """The directory that SGLang's wheel is unpacked in."""
    return Path(os.environ.get("KVTIER_SGLANG", DEFAULT))


def python(module: str, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    """Start a module of these tests in a process of its own."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2], **streams)


def stand_in(path: Path) -> None:
    """Make `sglang` a package without an `__init__`, which would import half of the world."""
    if "sglang" not in sys.modules:
        package = types.ModuleType("sglang")
        package.__path__ = [str(path / "sglang")]
        sys.modules["sglang"] = package


@pytest.fixture(scope="session")
def sglang() -> Sglang:
    """SGLang's own storage contract and factory; skips where its wheel is not there.

    With KVTIER_REQUIRE_SGLANG=1 its absence is a failure.
    """
    path = wheel()
    if not (path / "sglang" / "srt" / "mem_cache" / "hicache_storage.py").is_file():
        reason = f"no SGLang in {path}: run make test-sglang, or name the unpacked wheel in KVTIER_SGLANG"
        if os.environ.get("KVTIER_REQUIRE_SGLANG") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    stand_in(path)
    return Sglang(
        importlib.import_module("sglang.srt.mem_cache.hicache_storage"),
        importlib.import_module("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory,
        path,
    )


@pytest.fixture(autouse=True)
def no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have some."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
