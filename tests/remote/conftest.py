"""Servers that the modules of this directory share; each test empties what it uses."""

from collections.abc import Iterator

import pytest
from valkey_world import Server, cluster, server


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("valkey")) as one:
        yield one


@pytest.fixture(scope="session")
def valkey_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes
