from collections.abc import Iterator
from pathlib import Path

import pytest
from disaggregated_world import RunningPrefill, tiny_prefill_llm

from kvtier.disaggregated import PrefillClient


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RunningPrefill]:
    llm = tiny_prefill_llm(monkeypatch, tmp_path / "kv")
    running = RunningPrefill(llm, tmp_path / "prefill")
    yield running
    running.model.let(1 << 20)
    running.stop()
    llm.close()


@pytest.fixture
def client(prefill: RunningPrefill) -> Iterator[PrefillClient]:
    client = PrefillClient(prefill.path, prefill.identity)
    yield client
    client.close()
