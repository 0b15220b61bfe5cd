"""Tenants: what one does, another neither sees nor suffers from. Tokens for some namespaces: likewise, within one."""

import threading

import pytest
from cache_world import BLOCK, OPAQUE, OWNER, blocks, caller, chain, data, open_cache, put, read, tenants_file
from patience import until

from kvtier.errors import CapacityError, ConfigError
from kvtier.service.cache import LOCAL, NamespaceSpec, PutOutcome, Scope, ServiceError

ALICE, BOB = caller("alice"), caller("bob")


@pytest.fixture
def cache(tmp_path):
    opened = open_cache(tmp_path, {"tenants": tenants_file(tmp_path, alice=32, bob=32)})
    for who in (ALICE, BOB):
        opened.create_namespace(who, OPAQUE)
    yield opened
    opened.close()


def test_the_same_keys_of_two_tenants_are_different_blocks(cache):
    keys = chain(4)
    put(cache, keys, ALICE, tag="alice")
    assert cache.match(BOB, "blocks", keys) == ()
    assert read(cache, keys, BOB, each=True) == []
    assert put(cache, keys, BOB, tag="bob") == [PutOutcome.STORED] * 4
    assert read(cache, keys, ALICE) == [data(key, tag="alice") for key in keys]
    assert read(cache, keys, BOB) == [data(key, tag="bob") for key in keys]
    assert cache.delete(BOB, "blocks", keys) == 4
    assert cache.match(ALICE, "blocks", keys) == ("host",) * 4


def test_a_tenant_that_fills_its_quota_evicts_its_own_blocks_only(cache):
    keys = chain(8)
    put(cache, keys, ALICE)
    for turn in range(12):
        put(cache, chain(30, str(turn)), BOB)
    assert cache.match(ALICE, "blocks", keys) == ("host",) * 8
    by_name = {tenant.name: tenant for tenant in cache.stats(BOB).tenants}
    assert by_name["bob"].tiers["host"]["evicted"] > 0
    assert by_name["alice"].tiers["host"]["evicted"] == 0
    assert by_name["bob"].tiers["host"]["bytes"] <= by_name["bob"].quotas["host"] == 32 * BLOCK


def test_a_tenant_that_holds_all_of_its_quota_blocks_nobody_else(cache):
    keys = chain(32)
    put(cache, keys, BOB)
    with cache.read(BOB, "blocks", keys, owner=OWNER).result(10) as reading:
        assert reading.found == 32
        assert put(cache, chain(2, "more"), BOB) == [PutOutcome.DROPPED] * 2
        assert put(cache, chain(32), ALICE) == [PutOutcome.STORED] * 32


def test_names_pins_prefetches_and_events_are_each_tenants_own(cache):
    put(cache, chain(2), ALICE)
    pin = cache.pin(ALICE, "blocks", chain(2), ttl=60)
    prefetch = cache.prefetch(ALICE, "blocks", chain(2))
    cache.create_namespace(ALICE, NamespaceSpec("hers", None))
    for call, code in (
        (lambda: cache.unpin(BOB, pin.id), "unknown_pin"),
        (lambda: cache.prefetched(BOB, prefetch.id), "unknown_prefetch"),
        (lambda: cache.cancel(BOB, prefetch.id), "unknown_prefetch"),
        (lambda: cache.namespace(BOB, "hers"), "unknown_namespace"),
        (lambda: cache.match(BOB, "hers", chain(1)), "unknown_namespace"),
    ):
        with pytest.raises(ServiceError) as caught:
            call()
        assert caught.value.code == code
    assert cache.events(BOB).since(0).events == []
    assert {one.namespace for one in cache.events(ALICE).since(0).events} == {"blocks"}
    # Both may have other namespaces of one name.
    cache.create_namespace(BOB, NamespaceSpec("hers", None, model="another"))
    assert [info.spec.name for info in cache.namespaces(BOB)] == ["blocks", "hers"]


def test_one_tenant_alone_is_told_of_itself_alone(cache):
    plain = caller("bob", frozenset({Scope.READ}))
    stats = cache.stats(plain)
    assert [tenant.name for tenant in stats.tenants] == ["bob"]
    assert stats.verbs == ()
    assert [tenant.name for tenant in cache.stats(BOB).tenants] == ["alice", "bob"]


def test_two_tenants_that_work_at_once_get_their_own_bytes(cache):
    failures: list[str] = []

    def work(who) -> None:
        for turn in range(15):
            keys = chain(8, str(turn % 5))
            put(cache, keys, who, tag=who.tenant)
            found = read(cache, keys, who)
            failures.extend(
                who.tenant for key, got in zip(keys, found, strict=False) if got != data(key, tag=who.tenant)
            )

    threads = [threading.Thread(target=work, args=(who,)) for who in (ALICE, BOB) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    until(lambda: all(tenant.leases == 0 for tenant in cache.stats(BOB).tenants))


def test_metrics_name_the_tenant(cache):
    put(cache, chain(2), ALICE)
    text = cache.metrics_text().decode()
    assert 'kvtier_put_blocks_total{outcome="stored",tenant="alice"} 2.0' in text
    assert 'kvtier_occupied_bytes{tenant="bob",tier="host"} 0.0' in text
    assert 'kvtier_service_calls_total{outcome="ok",tenant="alice",verb="put"} 1.0' in text
    assert text.count("# TYPE kvtier_put_blocks_total counter") == 1


# ---- tokens for some namespaces, and for some verbs


@pytest.fixture
def shared():
    opened = open_cache()
    for name in ("team-a", "team-b"):
        opened.create_namespace(LOCAL, NamespaceSpec(name, None))
    yield opened
    opened.close()


def test_a_token_for_some_namespaces_finds_no_others(shared):
    some = caller(namespaces=("team-a*", "lab"))
    put(shared, chain(2), ns="team-b")
    put(shared, chain(2), ns="team-a")
    assert [info.spec.name for info in shared.namespaces(some)] == ["team-a"]
    assert [row.name for row in shared.stats(some).tenants[0].namespaces] == ["team-a"]
    pin = shared.pin(LOCAL, "team-b", chain(2), ttl=60)
    for call, code in (
        (lambda: shared.match(some, "team-b", chain(2)), "unknown_namespace"),
        (lambda: shared.read(some, "team-b", chain(2), owner=OWNER).result(10), "unknown_namespace"),
        (lambda: shared.put(some, "team-b", blocks(chain(1))).result(10), "unknown_namespace"),
        (lambda: shared.clear_namespace(some, "team-b"), "unknown_namespace"),
        (lambda: shared.unpin(some, pin.id), "unknown_pin"),
        (lambda: shared.create_namespace(some, NamespaceSpec("other", None)), "forbidden"),
        (lambda: shared.regions(some), "forbidden"),
    ):
        with pytest.raises(ServiceError) as caught:
            call()
        assert caught.value.code == code
    shared.create_namespace(some, NamespaceSpec("lab", None))
    # An equal namespace of another name is another one.
    assert shared.match(some, "lab", chain(2)) == ()


READ, WRITE, ADMIN = (caller(scopes=frozenset({scope})) for scope in Scope)


@pytest.mark.parametrize(
    ("call", "allowed"),
    [
        (lambda cache, who: cache.namespaces(who), READ),
        (lambda cache, who: cache.match(who, "team-a", chain(1)), READ),
        (lambda cache, who: cache.read(who, "team-a", chain(1), owner=OWNER).result(10).close(), READ),
        (lambda cache, who: cache.prefetch(who, "team-a", chain(1)), READ),
        (lambda cache, who: cache.stats(who), READ),
        (lambda cache, who: cache.events(who), READ),
        (lambda cache, who: cache.regions(who), READ),
        (lambda cache, who: cache.put(who, "team-a", blocks(chain(1))).result(10), WRITE),
        (lambda cache, who: cache.delete(who, "team-a", chain(1)), WRITE),
        (lambda cache, who: cache.create_namespace(who, NamespaceSpec("new", None)), WRITE),
        (lambda cache, who: cache.clear_namespace(who, "team-a"), WRITE),
        (lambda cache, who: cache.drop_namespace(who, "team-a"), WRITE),
        (lambda cache, who: cache.end_session(who, "s"), WRITE),
        (lambda cache, who: cache.drain(who), ADMIN),
        (lambda cache, who: cache.resume(who), ADMIN),
        (lambda cache, who: cache.flush(who), ADMIN),
        (lambda cache, who: cache.compact(who), ADMIN),
        (lambda cache, who: cache.set_capacity(who, "default", "host", 1 << 16), ADMIN),
        (lambda cache, who: cache.set_policy(who, "default", "arc"), ADMIN),
    ],
)
def test_each_verb_needs_its_scope(shared, call, allowed):
    for who in (READ, WRITE, ADMIN):
        if who is allowed:
            continue
        with pytest.raises(ServiceError, match="has the scopes") as caught:
            call(shared, who)
        assert (caught.value.status, caught.value.code) == (403, "forbidden")
    call(shared, allowed)


def test_who_puts_may_know_what_blocks_are_to_be(shared):
    for who in (READ, WRITE):
        assert shared.namespace(who, "team-a").spec.name == "team-a"
    with pytest.raises(ServiceError) as caught:
        shared.namespace(ADMIN, "team-a")
    assert caught.value.code == "forbidden"


def test_a_token_of_a_tenant_that_is_gone_is_refused(shared):
    with pytest.raises(ServiceError, match="does not have") as caught:
        shared.namespaces(caller("gone"))
    assert caught.value.code == "forbidden"


# ---- the table of tenants


def test_quotas_beyond_the_tiers_are_refused_unless_overcommitted(tmp_path):
    table = tenants_file(tmp_path, alice=40, bob=40)
    with pytest.raises(CapacityError, match=r"host quotas add up to 327680 bytes.*overcommit"):
        open_cache(tmp_path, {"tenants": table})
    opened = open_cache(tmp_path, {"tenants": table, "overcommit": True})
    assert [tenant.quotas["host"] for tenant in opened.stats(ALICE).tenants] == [40 * BLOCK] * 2
    opened.close()
    with pytest.raises(CapacityError, match="the largest is"):
        open_cache(tmp_path, {"tenants": tenants_file(tmp_path, alice=65), "overcommit": True})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one tenant"),
        ("alice = 3", "alice"),
        ('[alice]\nhost = "1MB"\nroot = 1', "alice.root"),
        ('[alice]\nnvme = "1MB"', "alice.host"),
        ('["../alice"]\nhost = "64kB"', "a letter or digit first"),
        ("[alice", "not TOML"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_cache(tmp_path, {"tenants": path})


def test_without_a_table_there_is_one_tenant_with_all(tmp_path):
    opened = open_cache(tmp_path)
    (tenant,) = opened.stats(LOCAL).tenants
    assert (tenant.name, tenant.quotas) == ("default", {"host": 64 * BLOCK, "nvme": 8 << 20})
    assert (tmp_path / "nvme" / "default").is_dir()
    opened.close()
