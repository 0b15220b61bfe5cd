from collections.abc import Iterator

import pytest
from data_world import World, world


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("attacked")) as made:
        with made.client() as client:
            client.create_namespace("target", None)
        yield made


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Another one, that does not wait long."""
    with world(tmp_path_factory.mktemp("impatient"), idle_timeout=1.0) as made:
        with made.client() as client:
            client.create_namespace("target", None)
        yield made
