"""What is released: the source archive builds, and what is installed from it works far from the checkout.

The wheels are built from the unpacked archive, once with a compiler (at -O0: it is asked whether it builds, not how
fast the result is) and once with one that always fails. Dependencies are those of the environment that runs the tests.
"""

import email
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import kvtier

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvtier", "kvtier_engine", "kvtier_sglang", "kvtier_transformers", "kvtier_vllm")
FOLDERS = ("kvtier", "adapters", "benchmarks", "changes", "docs", "examples", "tests")
FILES = {"LICENSE", "MANIFEST.in", "Makefile", "README.md", "constraints.txt", "pyproject.toml", "setup.py", ".ci/run"}
EXTENSIONS = {"_attention", "_checksum", "_codecs", "_products"}
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
pytestmark = pytest.mark.timeout(400)  # a busy machine compiles slowly
NO_SOURCE = shutil.ignore_patterns(".?*", "__pycache__", "*.egg-info", "*.so", "*.pyc", "build", "dist", "site")


def build(kind: str, source: Path, out: Path, **environment: str) -> tuple[Path, str]:
    """The archive that the build backend makes of a directory, and what it said."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
    done = subprocess.run(
        command, cwd=source, env={**os.environ, **environment}, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = out.iterdir()
    return archive, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without what is built or ignored."""
    copy = tmp_path_factory.mktemp("source") / "kvtier"
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.name in FOLDERS:
            shutil.copytree(path, copy / path.name, ignore=NO_SOURCE)
        elif path.is_file():
            shutil.copy(path, copy)
    shutil.copytree(ROOT / ".ci", copy / ".ci")
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))[0]


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    def unpack() -> Path:
        directory = tmp_path_factory.mktemp("unpacked")
        with tarfile.open(sdist) as archive:
            archive.extractall(directory, filter="data")
        (tree,) = directory.iterdir()
        return tree

    return unpack


@pytest.fixture(scope="module")
def plain(unpacked: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return build("wheel", unpacked(), tmp_path_factory.mktemp("plain"), CC="/bin/false")


@pytest.fixture(scope="module")
def compiled(unpacked: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    tree = unpacked()
    quick = tree.parent / "cc"
    quick.write_text('#!/bin/sh\nexec gcc "$@" -O0\n')
    quick.chmod(0o755)
    return build("wheel", tree, tmp_path_factory.mktemp("compiled"), CC=str(quick))


def test_the_source_archive_has_everything_that_builds_and_tests_need(source: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        str(path.relative_to(source)) for folder in FOLDERS for path in (source / folder).rglob("*") if path.is_file()
    }
    assert len(wanted) > 500
    assert sorted((wanted | FILES) - names) == []
    assert [name for name in names if name.endswith((".so", ".pyc"))] == []


def test_a_wheel_has_the_packages_and_nothing_else(source: Path, compiled: tuple[Path, str]) -> None:
    with zipfile.ZipFile(compiled[0]) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    roots = [(source, "kvtier"), *((source / "adapters", package) for package in PACKAGES[1:])]
    modules = {str(path.relative_to(root)) for root, package in roots for path in (root / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    dashboard = {f"kvtier/service/dashboard/{path.name}" for path in (source / "kvtier/service/dashboard").glob("*.*")}
    rest = {name for name in names if not name.endswith(".py") and ".dist-info/" not in name}
    built = {name for name in rest if name.endswith(".so")}
    assert {Path(name).name.partition(".")[0] for name in built} == EXTENSIONS
    assert rest - built == {f"{package}/py.typed" for package in PACKAGES} | {
        name for name in dashboard if not name.endswith(".py")
    }


def test_there_is_one_version(sdist: Path, compiled: tuple[Path, str]) -> None:
    version = kvtier.__version__
    assert sdist.name == f"kvtier-{version}.tar.gz"
    assert compiled[0].name.startswith(f"kvtier-{version}-")
    with zipfile.ZipFile(compiled[0]) as archive:
        metadata = email.message_from_bytes(archive.read(f"kvtier-{version}.dist-info/METADATA"))
    assert metadata["Version"] == version
    assert metadata["License-Expression"] == "Apache-2.0"


def test_without_a_compiler_the_wheel_is_complete_but_for_the_extensions_and_says_so(
    plain: tuple[Path, str], compiled: tuple[Path, str]
) -> None:
    wheel, said = plain
    for name in EXTENSIONS:
        assert f"kvtier.native.{name} was not built, the slower numpy path is used instead" in said
    assert "was not built" not in compiled[1]
    with zipfile.ZipFile(wheel) as without, zipfile.ZipFile(compiled[0]) as complete:
        missing = {name for name in complete.namelist() if not name.endswith(".so")} - set(without.namelist())
        assert missing == set()
        assert [name for name in without.namelist() if name.endswith(".so")] == []


IMPORTS = """
import sys
sys.modules.update(vllm=None, sglang=None)
import kvtier, kvtier_engine, kvtier_sglang, kvtier_transformers, kvtier_vllm
from importlib.metadata import entry_points, version
from kvtier import native
from kvtier.native import checksum
from pathlib import Path
here = Path(sys.prefix)
for module in (kvtier, kvtier_engine, kvtier_sglang, kvtier_transformers, kvtier_vllm):
    assert here in Path(module.__file__).parents, module.__file__
assert version("kvtier") == kvtier.__version__
assert [point.value for point in entry_points(group="vllm.general_plugins", name="kvtier")] == ["kvtier_vllm:register"]
print(native.available(), checksum.available())
"""


@pytest.mark.parametrize("kind", ["compiled", "plain"])
def test_what_is_installed_works_far_from_the_checkout(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    wheel = request.getfixturevalue(kind)[0]
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin/python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        str(wheel),
    ]
    subprocess.run(install, capture_output=True, timeout=150, check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # On the path, and yet no site directory: an editable kvtier in it stays unseen.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command: str) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVTIER", "PYTHON"))}
        done = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    native = kind == "compiled"
    assert run(str(python), "-c", IMPORTS) == f"{native} {native}\n"
    command = str(home / "bin/kvtier")
    assert run(command, "--version") == f"kvtier {kvtier.__version__}\n"
    assert "[tiering.host]" in run(command, "config")
    found = json.loads(run(command, "doctor", "--prefill-rate", "1000", "--json"))
    assert found["problems"] == 0
    (cpu,) = [finding for finding in found["findings"] if finding["check"] == "cpu"]
    assert ("the compiled codecs are not installed" in cpu["what"]) is not native
