"""Namespaces come and go: what was dropped is forgotten, and what nobody uses makes room."""

import contextlib
import shutil
from pathlib import Path

import pytest
from cache_world import BLOCK, LAYOUT, OPAQUE, caller, chain, config_of, data, open_cache, put, read, tenants_file

from kvtier.errors import FormatMismatch
from kvtier.keys import namespace_digest
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.service.cache import LOCAL, Cache, NamespaceSpec, Scope, ServiceError
from kvtier.service.cache.quotas import Quota
from kvtier.service.cache.state import StateDirectory
from kvtier.service.cache.tenant import Tenant
from kvtier.tiers import BlockRef

PATIENCE = 20.0
IDLE = 100.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tenant(tmp_path: Path, clock: Clock):
    """One without its service; its state is in a directory that can be taken away."""
    config = config_of(service={"state": tmp_path / "state", "request_timeout": PATIENCE / 2, "max_namespaces": 2})
    state = StateDirectory(tmp_path / "state")
    opened = Tenant("default", Quota(64 * BLOCK, None), config.service, config.tiering, state, clock)
    yield opened
    opened.close()
    state.close()


def is_known(index: int) -> bool:
    try:
        namespace_digest(index)
    except IndexError:
        return False
    return True


def put_late(tenant: Tenant, index: int) -> None:
    """As a call does that began before its namespace was dropped."""
    ref = BlockRef(bytes(16), index, 0, None, True)
    assert tenant.store.put([(ref, memoryview(bytes(BLOCK)))]).result(10).stored == 1


# ---- what was dropped


def test_names_without_end_are_forgotten(tenant: Tenant, clock: Clock) -> None:
    seen: list[int] = []
    for at in range(60):
        space = tenant.create(NamespaceSpec(f"made-up-{at}", LAYOUT))
        assert not set(seen) & set(space.indices)
        seen += space.indices
        tenant.drop(space)
        clock.now += 1
    known = [index for index in seen if is_known(index)]
    assert known == seen[-len(known) :]
    assert len(known) <= (PATIENCE + 1) * LAYOUT.parts
    # What they are called is known for as long, and of their events as long as these are kept.
    assert (tenant.names(), set(tenant.parts)) == ([], set(known))
    events = tenant.events.since(0).events
    assert [event.ns for event in events] == seen
    assert [event.whose[0].spec.name for event in events[:: LAYOUT.parts]] == [f"made-up-{at}" for at in range(60)]


def test_a_namespace_that_comes_again_in_time_stays_what_it_was(tenant: Tenant, clock: Clock) -> None:
    spec = NamespaceSpec("again", LAYOUT)
    before = tenant.create(spec).indices
    tenant.drop(tenant.space("again"))
    clock.now += PATIENCE / 2
    assert tenant.create(spec).indices == before
    clock.now += PATIENCE
    tenant.drop(tenant.create(NamespaceSpec("other", None)))
    assert all(map(is_known, before))


def test_what_came_late_is_removed_first(tenant: Tenant, clock: Clock) -> None:
    space = tenant.create(OPAQUE)
    (index,) = space.indices
    tenant.drop(space)
    put_late(tenant, index)
    clock.now += PATIENCE
    tenant.drop(tenant.create(NamespaceSpec("other", None)))
    assert tenant.store.host.usage() == {}
    assert is_known(index)
    clock.now += PATIENCE
    tenant.create(NamespaceSpec("other", None))
    assert not is_known(index)
    with pytest.raises(FormatMismatch, match="expected an index that"):
        put_late(tenant, index)


def test_what_could_not_be_made_is_forgotten_and_bounded(tenant: Tenant, clock: Clock, tmp_path: Path) -> None:
    kept = tenant.create(OPAQUE)
    shutil.rmtree(tmp_path / "state")
    layout = Layout(1, (LayerGroup(GroupKind.GQA, (0,), planes=2, kv_heads=1, head_dim=2),), shards=4096)
    messages = []
    for at in range(17):
        with pytest.raises(ServiceError) as caught:
            tenant.create(NamespaceSpec(f"wide-{at}", layout))
        assert caught.value.code == "busy"
        messages.append(str(caught.value))
    assert all("service.state" in message for message in messages[:16])
    assert "faster than they can be forgotten" in messages[16]
    assert tenant.names() == [kept.spec.name]
    (tmp_path / "state").mkdir()
    clock.now += PATIENCE
    assert tenant.create(NamespaceSpec("second", None)).parts == 1
    assert all(map(is_known, kept.indices))


def test_blocks_on_disk_are_found_in_a_namespace_that_was_forgotten(tmp_path: Path, clock: Clock) -> None:
    cache = open_cache(tmp_path, {"request_timeout": PATIENCE / 2}, clock=clock)
    try:
        for turn in range(2):
            cache.create_namespace(LOCAL, OPAQUE)
            put(cache, chain(3))
            for name in ("others", "more"):
                cache.flush()
                put(cache, chain(40, name))
            assert cache.match(LOCAL, OPAQUE.name, chain(3)) == ("nvme",) * 3
            assert read(cache, chain(3)) == [data(key) for key in chain(3)]
            held = cache.stats(LOCAL).tenants[0].tiers["host"]["blocks"]
            assert cache.namespace(LOCAL, OPAQUE.name).host_blocks == held
            cache.drop_namespace(LOCAL, OPAQUE.name)
            clock.now += PATIENCE
            cache.create_namespace(LOCAL, NamespaceSpec(f"between-{turn}", None))
    finally:
        cache.close()


# ---- what nobody uses


@pytest.fixture
def cache(tmp_path: Path, clock: Clock):
    opened = open_cache(tmp_path, {"max_namespaces": 2, "namespace_idle": IDLE}, clock=clock)
    for name in ("first", "second"):
        opened.create_namespace(LOCAL, NamespaceSpec(name, None))
    yield opened
    opened.close()


def names(cache: Cache) -> list[str]:
    return [info.spec.name for info in cache.namespaces(LOCAL)]


def refused(cache: Cache) -> bool:
    with pytest.raises(ServiceError) as caught:
        cache.create_namespace(LOCAL, NamespaceSpec("third", None))
    return caught.value.code == "quota_exceeded"


def test_the_one_that_was_unused_longest_makes_room(cache: Cache, clock: Clock) -> None:
    clock.now += IDLE - 1
    assert refused(cache)
    cache.match(LOCAL, "first", chain(1))
    clock.now += 1
    cache.create_namespace(LOCAL, NamespaceSpec("third", None))
    assert names(cache) == ["first", "third"]
    with pytest.raises(ServiceError) as caught:
        put(cache, chain(1), ns="second")
    assert caught.value.code == "unknown_namespace"


def test_one_that_holds_blocks_stays(cache: Cache, clock: Clock, tmp_path: Path) -> None:
    put(cache, chain(2), ns="first")
    put(cache, chain(2), ns="second")
    cache.flush()
    clock.now += IDLE
    assert refused(cache)
    cache.close()
    # Now on disk only, and by another process's numbers.
    again = open_cache(tmp_path, {"max_namespaces": 2, "namespace_idle": IDLE}, clock=clock)
    try:
        assert refused(again)
        again.delete(LOCAL, "first", chain(2))
        clock.now += IDLE
        again.create_namespace(LOCAL, NamespaceSpec("third", None))
        assert names(again) == ["second", "third"]
        assert read(again, chain(2), ns="second") == [data(key) for key in chain(2)]
    finally:
        again.close()


def test_to_be_listed_is_no_use(cache: Cache, clock: Clock) -> None:
    clock.now += IDLE
    assert names(cache) == ["first", "second"]
    cache.stats(LOCAL)
    cache.create_namespace(LOCAL, NamespaceSpec("third", None))
    assert names(cache) == ["second", "third"]


def test_none_means_never(clock: Clock) -> None:
    cache = open_cache(service={"max_namespaces": 1, "namespace_idle": None}, clock=clock)
    cache.create_namespace(LOCAL, OPAQUE)
    clock.now += 1e9
    assert refused(cache)
    cache.close()


def test_the_limit_is_each_tenants_own(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, {"tenants": tenants_file(tmp_path, alice=16, bob=16), "max_namespaces": 1})
    cache.create_namespace(caller("alice"), OPAQUE)
    with pytest.raises(ServiceError, match="1 namespaces: at most so many"):
        cache.create_namespace(caller("alice"), NamespaceSpec("more", None))
    assert cache.create_namespace(caller("bob"), OPAQUE).spec == OPAQUE
    cache.close()


def test_what_a_namespace_has_is_listed_from_all_tiers(tmp_path: Path) -> None:
    with contextlib.closing(open_cache(tmp_path, nvme={"write": "through"})) as cache:
        for name in (OPAQUE.name, "other"):
            cache.create_namespace(LOCAL, NamespaceSpec(name, None))
        keys = chain(100)
        for at in range(0, 100, 10):
            put(cache, keys[at : at + 10])
            cache.flush()
        put(cache, chain(3, "other"), ns="other")
        assert "nvme" in cache.match(LOCAL, OPAQUE.name, keys)

        def listed(ns: str) -> set[bytes]:
            return {key for some in cache.listed(LOCAL, ns) for key in some}

        assert listed(OPAQUE.name) == {key[:16] for key in keys}
        assert listed("other") == {key[:16] for key in chain(3, "other")}
        cache.clear_namespace(LOCAL, OPAQUE.name)
        assert listed(OPAQUE.name) == set()
        with pytest.raises(ServiceError, match="needs write"):
            next(cache.listed(caller(scopes=frozenset({Scope.READ})), OPAQUE.name))
