"""The generated pages are what the code says now, and they say all of it."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvtier.cli.lazy import COMMANDS
from kvtier.doctor.examine import CHECKS
from kvtier.errors import KVTierError

DOCS = Path(__file__).parents[2] / "docs"
FIRST = re.compile(r"^\| `(kvtier_\w+)` \|", re.MULTILINE)
NAMED = re.compile(r"\bkvtier_[a-z_]+[a-z]")
PREFIXES = ("kvtier_vllm", "kvtier_sglang", "kvtier_transformers", "kvtier_engine")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_all_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_no_generated_page_is_out_of_date(generate: ModuleType) -> None:
    stale = [name for name, make in generate.pages().items() if page(name) != make()]
    assert stale == [], "run `make docs`"


def test_a_page_that_is_out_of_date_is_found(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "HERE", tmp_path)
    monkeypatch.setattr(generate, "pages", lambda: {"one.md": lambda: "new", "other.md": lambda: "same"})
    (tmp_path / "one.md").write_text("old")
    (tmp_path / "other.md").write_text("same")
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 1
    assert "one.md; run" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    assert generate.main() == 0
    assert (tmp_path / "one.md").read_text() == "new"


def test_every_command_is_in_the_reference() -> None:
    text = page("reference/cli.md")
    assert [name for name in COMMANDS if f"## `kvtier {name}" not in text] == []


def test_metrics_that_pages_name_exist() -> None:
    known = set(FIRST.findall(page("reference/metrics.md")))
    assert len(known) > 70
    suffixed = known | {f"{name}{end}" for name in known for end in ("_bucket", "_count", "_sum")}
    strange = {
        f"{path.relative_to(DOCS)}: {name}"
        for path in DOCS.rglob("*.md")
        for name in NAMED.findall(path.read_text(encoding="utf-8"))
        if name not in suffixed and not name.startswith(PREFIXES)
    }
    assert strange == set()


def test_troubleshooting_knows_every_check_and_error() -> None:
    text = page("troubleshooting.md")
    silent = {"layout", "policy", "page_size"}  # they have no symptom of their own
    assert {name for name in CHECKS if f"`{name}`" not in text} - silent == set()
    family, found = [KVTierError], []
    while family:
        found += [one.__name__ for one in family]
        family = [below for one in family for below in one.__subclasses__() if below.__module__ == "kvtier.errors"]
    assert [name for name in found if f"`{name}`" not in text and name != "TierError"] == []
