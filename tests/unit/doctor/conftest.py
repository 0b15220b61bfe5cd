import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import load_config
from kvtier.doctor import Finding, Level, ModelFacts, Subject, examine
from kvtier.layout import GroupKind, LayerGroup, Layout

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration but the test's own."""
    for name in list(os.environ):
        if name.startswith(("KVTIER_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def facts() -> ModelFacts:
    """Two layers of two heads: 1 KiB of KV per token, 16 KiB per block."""
    group = LayerGroup(GroupKind.GQA, (0, 1), 2, 2, 64, dtype="float16")
    return ModelFacts("tiny", Layout(16, (group,)), "float16", 4096)


@pytest.fixture
def subject(tmp_path: Path, facts: ModelFacts) -> Callable[..., Subject]:
    """A sound subject, with some settings changed: `subject(nvme={"capacity": "1GiB"})`."""

    def build(
        *,
        host: Any = (),
        nvme: Any = (),
        remote: Any = None,
        lossy: bool = False,
        model: ModelFacts | None = facts,
        rate: float | None = 1e4,
    ) -> Subject:
        tiers = {
            "host": None if host is None else {"capacity": 64 * MIB} | dict(host),
            "nvme": None
            if nvme is None
            else {"path": str(tmp_path / "nvme"), "capacity": 256 * MIB, "min_free": 0} | dict(nvme),
        }
        tiering = tiers | {"remote": remote, "accept_lossy": lossy}
        config = load_config({"tiering": tiering}, environ={}, search=False).config
        return Subject(config, model, rate)

    return build


@pytest.fixture
def found() -> Callable[[str, Subject], list[Finding]]:
    """What one check says of a subject."""
    return lambda name, subject: list(examine(subject, [name]))


@pytest.fixture
def worst() -> Callable[[str, Subject], Finding]:
    """The gravest finding of one check; it has a remedy unless all is well, and each text is one line."""

    def run(name: str, subject: Subject) -> Finding:
        findings = list(examine(subject, [name]))
        for finding in findings:
            assert "\n" not in finding.what + finding.remedy
            assert bool(finding.remedy) == (finding.level is not Level.OK)
        return max(findings, key=lambda finding: list(Level).index(finding.level))

    return run
