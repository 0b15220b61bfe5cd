"""A cache service over another one, a process of its own, that cannot do what is asked of it."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_world import OPAQUE, chain, data, open_cache, put, read
from daemon_world import Daemon, nursery
from patience import came_true

from kvtier.service.cache import LOCAL, Cache, ServiceError

KEYS = chain(3)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with nursery() as made:
        yield Daemon(made, tmp_path_factory.mktemp("peer"))


@pytest.fixture
def cache(daemon: Daemon, tmp_path: Path) -> Iterator[Cache]:
    remote = {"url": f"kvtier://{daemon.address}", "timeout": 2, "absent_ttl": 0}
    with contextlib.closing(open_cache(None, {"state": tmp_path / "state"}, remote=remote)) as cache:
        cache.create_namespace(LOCAL, OPAQUE)
        put(cache, KEYS)
        cache.flush()
        assert cache.left_above() == (0, 0)
        yield cache


def test_what_a_peer_cannot_clear_is_said_and_what_it_can_delete_goes(cache: Cache) -> None:
    for removal in (cache.clear_namespace, cache.drop_namespace):
        with pytest.raises(ServiceError, match=r"blocks remain in remote .* clear the namespaces tier\.\w+") as caught:
            removal(LOCAL, OPAQUE.name)
        assert (caught.value.code, caught.value.status) == ("unavailable", 503)
        # Not gone, and not said to be.
        assert [info.spec.name for info in cache.namespaces(LOCAL)] == [OPAQUE.name]
        assert cache.match(LOCAL, OPAQUE.name, KEYS) == ("remote",) * 3
    assert read(cache, KEYS) == [data(key) for key in KEYS]
    assert cache.delete(LOCAL, OPAQUE.name, KEYS) == 3
    assert read(cache, KEYS) == []


def test_what_a_frozen_peer_keeps_is_told(cache: Cache, daemon: Daemon) -> None:
    daemon.signal(signal.SIGSTOP)
    try:
        with pytest.raises(ServiceError, match="blocks remain in remote") as caught:
            cache.delete(LOCAL, OPAQUE.name, KEYS)
        assert (caught.value.code, caught.value.status) == ("timeout", 504)
        # What is put now is acknowledged, and is nowhere but here.
        put(cache, chain(2, "later"))
        cache.flush()
        assert cache.left_above() == (0, 2)
    finally:
        daemon.signal(signal.SIGCONT)

    def deleted() -> bool:
        with contextlib.suppress(ServiceError):
            cache.delete(LOCAL, OPAQUE.name, KEYS)
            return True
        return False

    assert came_true(deleted)
    assert read(cache, KEYS) == []
