"""History: curves that outlive a page, in memory that does not grow; and the counts that they are made of."""

import contextlib
from itertools import pairwise

import numpy as np
import pytest
from cache_world import BLOCK, EVERYTHING, OPAQUE, blocks, caller, chain, open_cache, put, read, tenants_file
from patience import until

from kvtier.service.cache import LOCAL, LONGEST_SECONDS, Cache, Scope, ServiceError
from kvtier.service.cache.history import STEP_SECONDS, History, _Ring

READ_ONLY = frozenset({Scope.READ})


def history_of(cache: Cache, now: list[float]) -> History:
    """One that samples when it is told to."""
    return History(cache._tenants, cache.telemetry.moved_bytes, lambda: now[0])


def test_counts_are_those_of_the_calls():
    keys, strangers = chain(4), chain(3, "strangers")
    with contextlib.closing(open_cache()) as cache:
        cache.create_namespace(LOCAL, OPAQUE)
        put(cache, keys)
        assert len(read(cache, [*keys, *strangers])) == 4
        cache.match(LOCAL, OPAQUE.name, [*keys[:2], *strangers])
        (tenant,) = cache.stats(LOCAL).tenants
        traffic = tenant.traffic
        assert (traffic.stored, traffic.stored_bytes) == (4, 4 * BLOCK)
        assert (traffic.hits, traffic.misses, traffic.matched, traffic.unmatched) == (4, 3, 2, 3)
        assert (tenant.in_bytes, tenant.out_bytes) == (4 * BLOCK, 4 * BLOCK)
        (space,) = tenant.namespaces
        assert (space.hits, space.misses, space.matched, space.unmatched) == (4, 3, 2, 3)
        assert tenant.flows["host"].written_bytes == 4 * BLOCK
        cache.drop_namespace(LOCAL, OPAQUE.name)
        (tenant,) = cache.stats(LOCAL).tenants
        assert (tenant.namespaces, tenant.traffic.hits) == ((), 4)


def test_evictions_are_told_by_reason():
    with contextlib.closing(open_cache()) as cache:
        cache.create_namespace(LOCAL, OPAQUE)
        for at in range(10):
            put(cache, chain(16, str(at)))
        (tenant,) = cache.stats(LOCAL).tenants
        assert tenant.flows["host"].evicted == {"capacity": tenant.tiers["host"]["evicted"]}
        assert tenant.flows["host"].evicted["capacity"] >= 160 - 64


def test_samples_follow_the_counts_and_end_with_this_moment():
    now = [1000.0]
    with contextlib.closing(open_cache()) as cache:
        cache.create_namespace(LOCAL, OPAQUE)
        history = history_of(cache, now)
        for at in range(3):
            history.sample()
            put(cache, chain(2, str(at)))
            now[0] += STEP_SECONDS
        told = history.since(3600, ["default"])
        assert told.times == [1000.0, 1005.0, 1010.0, 1015.0]
        assert told.in_bytes == [0, 2 * BLOCK, 4 * BLOCK, 6 * BLOCK]
        assert told.tiers["host"].bytes == told.tiers["host"].written_bytes == told.in_bytes
        assert set(told.tiers["host"].capacity_bytes) == {64 * BLOCK}
        assert history.since(12, ["default"]).times == [1005.0, 1010.0, 1015.0]
        assert history.since(1, ["default"]).times == [1015.0]


def test_a_day_fits_into_what_an_hour_took():
    now = [0.0]
    with contextlib.closing(open_cache()) as cache:
        history = history_of(cache, now)
        held = [ring._rows.nbytes for ring in history._rings]
        for _ in range(3000):
            history.sample()
            now[0] += STEP_SECONDS
        assert [ring._rows.nbytes for ring in history._rings] == held
        hour = history.since(3600, ["default"]).times
        day = history.since(LONGEST_SECONDS, ["default"]).times
        assert now[0] - 3600 <= hour[0] < now[0] - 3580
        assert day[0] == 0.0
        for times in (hour, day):
            assert times == sorted(times)
            assert 100 < len(times) <= 241
            assert len({round(b - a, 6) for a, b in pairwise(times[:-1])}) == 1


def test_a_ring_keeps_the_latest_and_thins_by_number():
    ring = _Ring(10, (2, 1))
    for at in range(37):
        ring.add(float(at), np.array([[at], [100 * at]], np.float64))
    times, rows = ring.since(0, [0, 1])
    assert times.tolist() == list(range(27, 37))
    assert rows[:, 0].tolist() == [101 * at for at in range(27, 37)]
    assert ring.since(30.5, [1])[1][:, 0].tolist() == [100 * at for at in range(31, 37)]
    assert ring.since(99, [0])[0].tolist() == []


def test_the_thread_samples_from_the_first_moment_and_ends_with_the_cache():
    cache = open_cache()
    until(lambda: len(cache.history(LOCAL, 60).times) >= 2)
    thread = cache._figures._history._thread
    assert thread.is_alive()
    cache.close()
    assert not thread.is_alive()


def test_a_tenant_sees_its_own_alone(tmp_path):
    service = {"tenants": tenants_file(tmp_path, a=16, b=16), "overcommit": True}
    with contextlib.closing(open_cache(tmp_path, service)) as cache:
        for name, count in (("a", 2), ("b", 3)):
            who = caller(name)
            cache.create_namespace(who, OPAQUE)
            cache.put(who, OPAQUE.name, blocks(chain(count))).result(10)
        reader = caller("a", READ_ONLY)
        assert cache.history(reader, 60).in_bytes[-1] == 2 * BLOCK
        assert cache.history(reader, 60, "a").in_bytes[-1] == 2 * BLOCK
        for other in ("b", "nobody"):
            with pytest.raises(ServiceError, match=r"tenant: expected one of a$") as refused:
                cache.history(reader, 60, other)
            assert refused.value.status == 404
        admin = caller("b", EVERYTHING)
        assert cache.history(admin, 60).in_bytes[-1] == 5 * BLOCK
        assert cache.history(admin, 60, "a").in_bytes[-1] == 2 * BLOCK
        with pytest.raises(ServiceError, match="write"):
            cache.history(caller("a", frozenset({Scope.WRITE})), 60)
