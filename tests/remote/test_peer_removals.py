"""A cache service over another one, a process of its own: what goes here goes there, and what does not is told."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_world import OPAQUE, blocks, chain, data, open_cache, put, read
from daemon_world import Daemon, nursery
from patience import came_true

from kvtier.client.errors import Invalid
from kvtier.remote.peer.link import Link
from kvtier.service.cache import LOCAL, Cache, NamespaceSpec, PutOutcome, ServiceError

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


def test_a_namespace_is_cleared_and_dropped_and_others_under_the_prefix_stay(cache: Cache) -> None:
    other = NamespaceSpec("other", None)
    cache.create_namespace(LOCAL, other)
    lossy = [block._replace(exact=False) for block in blocks(chain(2, "lossy"))]
    many = chain(100, "many")
    for removal in (cache.clear_namespace, cache.drop_namespace):
        assert cache.put(LOCAL, OPAQUE.name, lossy).result(10) == [PutOutcome.STORED] * 2
        for at in range(0, 100, 10):
            put(cache, many[at : at + 10])
            cache.flush()
        put(cache, KEYS, ns=other.name)
        cache.flush()
        assert cache.match(LOCAL, OPAQUE.name, many[:1]) == ("remote",)
        removal(LOCAL, OPAQUE.name)
        cache.create_namespace(LOCAL, OPAQUE)
        for keys in (KEYS, many, many[90:], chain(2, "lossy")):
            assert cache.match(LOCAL, OPAQUE.name, keys, lossy=True) == ()
        assert read(cache, KEYS, ns=other.name) == [data(key) for key in KEYS]


def test_what_is_deleted_by_key_goes(cache: Cache) -> None:
    assert read(cache, KEYS) == [data(key) for key in KEYS]
    assert cache.delete(LOCAL, OPAQUE.name, KEYS) == 3
    assert read(cache, KEYS) == []


def test_an_older_peer_that_lists_nothing_is_told(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> list[bytes]:
        raise Invalid("opcode 21 with flags 0: no request of version 1", 400, "invalid", None)

    monkeypatch.setattr(Link, "listed", refuse)
    for removal in (cache.clear_namespace, cache.drop_namespace):
        with pytest.raises(ServiceError, match=r"blocks remain in remote .* no request of version 1") as caught:
            removal(LOCAL, OPAQUE.name)
        assert (caught.value.code, caught.value.status) == ("unavailable", 503)
        # Not gone, and not said to be.
        assert [info.spec.name for info in cache.namespaces(LOCAL)] == [OPAQUE.name]
    assert read(cache, KEYS) == [data(key) for key in KEYS]


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
