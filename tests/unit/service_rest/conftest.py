from collections.abc import Iterator

import pytest
from rest_world import LAYOUT, RunningRest, running


@pytest.fixture(scope="module")
def rest() -> Iterator[RunningRest]:
    """One service for a module, without tokens; `plain` is a namespace of opaque blocks, `laid` one with a layout."""
    with running() as served:
        for name, layout in (("plain", None), ("laid", LAYOUT)):
            assert served.http.post("/v1/namespaces", json={"name": name, "layout": layout}).status_code == 201
        yield served


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "rest" in request.fixturenames:
        request.getfixturevalue("rest").at_rest()
