from collections.abc import Iterator

import pytest
from server_world import RunningServer, isolated, tiny_llm


@pytest.fixture(autouse=True, scope="module")
def _isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No configuration but the test's own."""
    with isolated(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One server for a module."""
    with pytest.MonkeyPatch.context() as patch:
        running = RunningServer(tiny_llm(patch))
        yield running
        running.stop()
