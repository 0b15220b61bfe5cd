"""What admins do while the service runs: drain, flush, compact, capacity, policy; each leaves a line."""

import logging
import threading
import time

import pytest
from cache_world import BLOCK, OPAQUE, OWNER, blocks, caller, chain, data, open_cache, put, read, tenants_file
from patience import until

from kvtier.service.cache import LOCAL, PROCESS, PutOutcome, ServiceError

CHOSEN = caller()


@pytest.fixture
def cache(tmp_path):
    opened = open_cache(tmp_path, {"host_limit": 128 * BLOCK})
    opened.create_namespace(LOCAL, OPAQUE)
    yield opened
    opened.close()


# ---- draining


def test_a_draining_service_ends_what_runs_and_takes_nothing_new(cache):
    put(cache, chain(2))
    reading = cache.read(LOCAL, "blocks", chain(2), owner=OWNER).result(10)
    pin = cache.pin(LOCAL, "blocks", chain(2), ttl=60)
    cache.drain(CHOSEN)
    assert cache.draining
    for call in (
        lambda: cache.match(LOCAL, "blocks", chain(2)),
        lambda: cache.read(LOCAL, "blocks", chain(2), owner=OWNER),
        lambda: cache.put(LOCAL, "blocks", blocks(chain(1))),
        lambda: cache.namespaces(LOCAL),
        lambda: cache.pin(LOCAL, "blocks", chain(2), ttl=1),
    ):
        with pytest.raises(ServiceError) as caught:
            call()
        assert (caught.value.status, caught.value.code) == (503, "draining")
        assert caught.value.retry_after is not None
    assert [bytes(view) for view in reading.views] == [data(key) for key in chain(2)]
    assert cache.underway == 1
    reading.close()
    cache.unpin(LOCAL, pin.id)
    assert cache.underway == 0
    assert cache.stats(LOCAL).draining
    cache.resume(CHOSEN)
    assert cache.match(LOCAL, "blocks", chain(2)) == ("host",) * 2


def test_after_close_every_verb_is_refused_as_draining(cache):
    put(cache, chain(2))
    reading = cache.read(LOCAL, "blocks", chain(2), owner=OWNER).result(10)
    cache.close()
    cache.close()
    assert reading.closed
    with pytest.raises(ServiceError) as caught:
        cache.match(LOCAL, "blocks", chain(2))
    assert caught.value.code == "draining"


def test_flush_brings_what_was_put_to_the_disk(cache):
    put(cache, chain(5))
    cache.flush(CHOSEN)
    assert cache.stats(LOCAL).tenants[0].tiers["nvme"]["blocks"] == 5
    assert cache.left_above() == (0, 0)


def test_compact_drops_what_is_damaged_on_disk(cache, tmp_path):
    put(cache, chain(5))
    cache.flush()
    nothing = ("dropped_damaged", "dropped_corrupt", "dropped_overlapping", "reclaimed_pages", "restored_rows")
    assert cache.compact(CHOSEN) == {"default": dict.fromkeys(nothing, 0)}
    (segment, *_) = sorted((tmp_path / "nvme" / "default").glob("seg-*.kv"))
    held = segment.read_bytes()
    at = held.index(data(chain(5)[2])[:64])
    with segment.open("r+b") as file:
        file.seek(at)
        file.write(b"damaged!")
    assert cache.compact(CHOSEN)["default"]["dropped_corrupt"] == 1


# ---- capacity


def test_a_quota_shrinks_and_grows_at_run_time(cache):
    keys = chain(60)
    put(cache, keys)
    assert cache.set_capacity(CHOSEN, "default", "host", 16 * BLOCK + 1) == 16 * BLOCK
    assert cache.match(LOCAL, "blocks", keys)[:17].count("host") == 16
    stats = cache.stats(LOCAL).tenants[0]
    assert (stats.quotas["host"], stats.tiers["host"]["capacity_bytes"]) == (16 * BLOCK, 16 * BLOCK)
    with pytest.raises(ServiceError) as caught:
        cache.put(LOCAL, "blocks", [blocks(chain(1))[0]._replace(data=memoryview(bytes(17 * BLOCK)))])
    assert caught.value.code == "quota_exceeded"
    assert cache.set_capacity(CHOSEN, "default", "host", 128 * BLOCK) == 128 * BLOCK
    assert put(cache, chain(100, "new")) == [PutOutcome.STORED] * 100
    assert cache.match(LOCAL, "blocks", chain(100, "new")) == ("host",) * 100


@pytest.mark.parametrize(
    ("tenant", "tier", "nbytes", "code", "message"),
    [
        ("default", "host", 129 * BLOCK, (409, "conflict"), r"service\.host_limit"),
        ("default", "host", 0, (409, "conflict"), "expected 4096"),
        ("default", "host", -1, (409, "conflict"), "expected 4096"),
        ("default", "nvme", BLOCK, (400, "invalid"), "only host changes"),
        ("nobody", "host", BLOCK, (404, "unknown_tenant"), "no such tenant: expected one of default"),
    ],
)
def test_a_quota_that_cannot_be_is_refused(cache, tenant, tier, nbytes, code, message):
    with pytest.raises(ServiceError, match=message) as caught:
        cache.set_capacity(CHOSEN, tenant, tier, nbytes)
    assert (caught.value.status, caught.value.code) == code
    assert cache.stats(LOCAL).tenants[0].quotas["host"] == 64 * BLOCK


def test_quotas_that_are_raised_stay_within_the_machine(tmp_path):
    settings = {"tenants": tenants_file(tmp_path, alice=32, bob=32), "host_limit": 48 * BLOCK}
    alice = caller("alice")
    opened = open_cache(tmp_path, settings)
    with pytest.raises(ServiceError, match=r"131072 of the other tenants.*lower theirs first"):
        opened.set_capacity(alice, "alice", "host", 48 * BLOCK)
    opened.set_capacity(alice, "bob", "host", 16 * BLOCK)
    assert opened.set_capacity(alice, "alice", "host", 48 * BLOCK) == 48 * BLOCK
    opened.close()
    opened = open_cache(tmp_path, {**settings, "overcommit": True})
    assert opened.set_capacity(alice, "alice", "host", 48 * BLOCK) == 48 * BLOCK
    opened.close()


def test_readings_and_bytes_survive_a_quota_that_swings(cache):
    failures: list[str] = []
    stop = threading.Event()

    def work(name: str) -> None:
        turn = 0
        while not stop.is_set():
            keys = chain(10, f"{name}{turn % 4}")
            turn += 1
            put(cache, keys)
            with cache.read(LOCAL, "blocks", keys, owner=name).result(10) as reading:
                views = reading.views
                time.sleep(0.001)
                failures.extend(name for key, view in zip(keys, views, strict=False) if view != data(key))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    try:
        for turn in range(40):
            cache.set_capacity(CHOSEN, "default", "host", [8, 128, 1, 64][turn % 4] * BLOCK)
            cache.set_policy(CHOSEN, "default", ["lru", "arc", "s3fifo", "clock2"][turn % 4])
            time.sleep(0.002)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    cache.set_capacity(CHOSEN, "default", "host", 8 * BLOCK)

    def rests() -> bool:
        stats = cache.stats(LOCAL).tenants[0]
        held = (stats.leases, stats.tiers["host"]["leases"], stats.inflight_bytes)
        # What was still leased then leaves when it is let go.
        return held == (0, 0, 0) and stats.tiers["host"]["bytes"] <= 8 * BLOCK

    until(rests)


# ---- policy


def test_a_policy_changes_at_run_time():
    cache = open_cache()
    cache.create_namespace(LOCAL, OPAQUE)
    often = chain(4, "often")
    put(cache, often)
    cache.set_policy(CHOSEN, "default", "s3fifo")
    for _ in range(3):
        assert read(cache, often) == [data(key) for key in often]
    # A scan of what is used once leaves what is used often alone, as tail-first LRU would not.
    for turn in range(20):
        put(cache, chain(20, str(turn)))
    assert cache.match(LOCAL, "blocks", often) == ("host",) * 4
    cache.set_policy(CHOSEN, "default", "lru")
    for turn in range(4):
        put(cache, chain(20, f"more{turn}"))
    assert cache.match(LOCAL, "blocks", often) == ()
    cache.close()


@pytest.mark.parametrize("policy", ["nothing", "os:system", "kvtier.policies.lru:LruPolicy", ""])
def test_a_policy_that_is_none_is_refused(cache, policy):
    with pytest.raises(ServiceError) as caught:
        cache.set_policy(CHOSEN, "default", policy)
    assert caught.value.code == "invalid"


# ---- the audit log


def test_admin_verbs_leave_a_line_with_who_what_and_how_it_ended(cache, caplog):
    caplog.set_level(logging.INFO, "kvtier.audit")
    cache.set_capacity(CHOSEN, "default", "host", 32 * BLOCK)
    cache.flush()
    with pytest.raises(ServiceError):
        cache.set_policy(CHOSEN, "nobody", "lru")
    weak = caller(scopes=frozenset())
    with pytest.raises(ServiceError):
        cache.drain(weak)
    rows = [(r.getMessage(), r.tenant, r.token, r.result) for r in caplog.records if r.name == "kvtier.audit"]
    assert rows[:2] == [("set_capacity", "default", "token-default", "ok"), ("flush", "", "process", "ok")]
    assert rows[2][:3] == ("set_policy", "default", "token-default")
    assert rows[2][3].startswith("no such tenant")
    assert rows[3][0] == "drain"
    assert "has the scopes none" in rows[3][3]
    (line, *_) = caplog.records
    assert (line.of, line.tier, line.nbytes) == ("default", "host", 32 * BLOCK)
    assert PROCESS.token == "process"


def test_figures_count_calls_by_how_they_ended(cache):
    for _ in range(3):
        cache.match(LOCAL, "blocks", chain(1))
    with pytest.raises(ServiceError):
        cache.match(LOCAL, "nothing", chain(1))
    (verb,) = [one for one in cache.stats(LOCAL).verbs if one.verb == "match"]
    assert verb.outcomes == {"ok": 3, "unknown_namespace": 1}
    assert 0 < verb.p50 <= verb.p99
    text = cache.metrics_text().decode()
    assert 'kvtier_service_calls_total{outcome="unknown_namespace",tenant="default",verb="match"} 1.0' in text
    assert 'kvtier_service_seconds_count{verb="match"} 4.0' in text
