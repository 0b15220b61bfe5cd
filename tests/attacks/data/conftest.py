from collections.abc import Iterator

import pytest
from data_world import World, world


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("attacked"), idle_timeout=0.6) as made:
        with made.client() as client:
            client.create_namespace("target", None)
        yield made
