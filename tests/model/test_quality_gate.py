"""The quality gate of the KV formats, on the real model: natural text and recall."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kvtier.engine.models import load_model
from kvtier.errors import RequestError
from kvtier.formats import get
from kvtier.testing.quality import BOUNDS, Quality, QualityProbe, recall_window, violations

pytestmark = pytest.mark.model

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def probe(default_model: Path) -> QualityProbe:
    sys.path.insert(0, str(_BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("quality_bench", _BENCHMARKS / "quality.py")
        assert spec is not None
        assert spec.loader is not None
        bench = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(bench)
    finally:
        sys.path.remove(str(_BENCHMARKS))
    return bench.make_probe(load_model(default_model, torch.float32))


@pytest.mark.parametrize("format_id", BOUNDS)
def test_format_keeps_its_bounds(probe: QualityProbe, format_id: str) -> None:
    measured = probe.measure(format_id)
    assert set(measured) == {"natural", "recall"}
    assert violations(format_id, measured) == []
    if get(format_id).exact:
        assert all(quality.kl == 0 and quality.top1 == 1 for quality in measured.values())
    else:
        assert all(quality.kl > 0 for quality in measured.values()), "nothing was encoded"


def test_the_gate_can_fail() -> None:
    good, bad = Quality(100, 0.001, 0.0, 1.0), Quality(100, 0.02, 0.05, 0.90)
    assert violations("int4r", {"natural": good, "recall": good}) == []
    broken = violations("int4r", {"natural": bad, "recall": bad})
    assert len(broken) == 4
    assert "top-1 loss 0.10000 on recall text" in broken[-1]


def test_recall_plants_the_passage_it_asks_for() -> None:
    window = recall_window(range(100), range(500, 520), 64, 16)
    assert len(window.prefix) == 64
    assert window.continuation == tuple(range(500, 516))
    at = window.prefix.index(500)
    assert window.prefix[at : at + 20] == tuple(range(500, 520))
    with pytest.raises(RequestError, match="need at least 44 and 16"):
        recall_window(range(10), range(20), 64, 16)
