"""Many callers at once, some of which die: nothing stays held, counters add up, and every byte is the right one."""

import random
import threading

from cache_world import OPAQUE, blocks, caller, chain, data, open_cache, tenants_file
from patience import until

from kvtier.errors import LeaseError
from kvtier.hints import RequestHints
from kvtier.service.cache import Cache, Caller, NamespaceSpec, PutOutcome, ServiceError

TENANTS = (caller("alice"), caller("bob"))
DECLARED = {"busy", "timeout", "unknown_namespace", "unknown_block", "unknown_pin", "quota_exceeded"}


class Client(threading.Thread):
    """Calls whatever comes to its mind, as one connection of a port would."""

    def __init__(self, cache: Cache, who: Caller, seed: int, turns: int) -> None:
        super().__init__()
        self.cache, self.who, self.turns = cache, who, turns
        self.owner = f"client-{seed}"
        self.random = random.Random(seed)
        self.wrong: list[str] = []
        self.stored = 0
        self.held = []

    def run(self) -> None:
        for _ in range(self.turns):
            verb = self.random.choice([self.put, self.put, self.read, self.read, self.each, self.other, self.die])
            try:
                verb()
            except ServiceError as error:
                if error.code not in DECLARED:
                    self.wrong.append(f"{verb.__name__}: {error}")
            except LeaseError:
                pass
        self.cache.release_owner(self.owner)

    def keys(self) -> list[bytes]:
        return chain(self.random.randrange(1, 12), str(self.random.randrange(12)))

    def put(self) -> None:
        outcomes = self.cache.put(self.who, "blocks", blocks(self.keys(), tag=self.who.tenant)).result(20)
        self.stored += outcomes.count(PutOutcome.STORED)

    def read(self, *, each: bool = False) -> None:
        keys = self.keys()
        reading = self.cache.read(self.who, "blocks", keys, owner=self.owner, each=each).result(20)
        for one in reading.blocks:
            if one.data != data(one.key, tag=self.who.tenant):
                self.wrong.append(f"{one.key.hex()} in {one.tier}")
        if self.random.random() < 0.7:
            reading.close()

    def each(self) -> None:
        self.read(each=True)

    def other(self) -> None:
        keys = self.keys()
        cache, who, name = self.cache, self.who, f"scratch-{self.random.randrange(3)}"
        self.random.choice(
            [
                lambda: cache.match(who, "blocks", keys),
                lambda: cache.delete(who, "blocks", keys[-1:]),
                lambda: cache.prefetch(who, "blocks", keys),
                lambda: cache.unpin(who, cache.pin(who, "blocks", keys, ttl=5).id),
                lambda: cache.hint(who, "blocks", keys, RequestHints(dead_from_depth=3)),
                lambda: cache.create_namespace(who, NamespaceSpec(name, None)),
                lambda: cache.drop_namespace(who, name),
                lambda: cache.stats(who),
                lambda: cache.clear_namespace(who, name),
            ]
        )()

    def die(self) -> None:
        if self.random.random() < 0.3:
            # A read is under way when its connection breaks.
            future = self.cache.read(self.who, "blocks", self.keys(), owner=self.owner)
            self.cache.release_owner(self.owner)
            error = future.exception(20)
            if error is None:
                self.cache.release_owner(self.owner)


def test_nothing_is_left_of_many_that_came_and_went(tmp_path):
    limits = {
        "tenants": tenants_file(tmp_path, alice=32, bob=32),
        "inflight_bytes": "1MiB",
        "max_batch": "256kB",
        "max_block": "64kB",
    }
    cache = open_cache(tmp_path, limits)
    for who in TENANTS:
        cache.create_namespace(who, OPAQUE)
    clients = [Client(cache, TENANTS[seed % 2], seed, turns=80) for seed in range(6)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(100)
    assert [client.wrong for client in clients] == [[]] * len(clients)
    until(lambda: cache.underway == 0)
    cache.flush()
    # A prefetch that nobody waits for lets go a little later.
    until(lambda: not any(tenant.tiers["host"]["leases"] for tenant in cache.stats(TENANTS[0]).tenants))
    stats = {tenant.name: tenant for tenant in cache.stats(TENANTS[0]).tenants}
    for who in TENANTS:
        tenant = stats[who.tenant]
        assert (tenant.leases, tenant.inflight_bytes, tenant.pins) == (0, 0, 0)
        assert (tenant.tiers["store"]["leases"], tenant.tiers["store"]["waiting_bytes"]) == (0, 0)
        assert (tenant.tiers["host"]["leases"], tenant.tiers["host"]["reservations"]) == (0, 0)
        assert tenant.tiers["host"]["corrupt"] == 0
        assert tenant.tiers["host"]["bytes"] <= tenant.quotas["host"]
        (row,) = [row for row in tenant.namespaces if row.name == "blocks"]
        assert row.stored == sum(client.stored for client in clients if client.who == who)
        assert row.host_blocks <= tenant.tiers["host"]["blocks"]
    calls = {verb.verb: sum(verb.outcomes.values()) for verb in cache.stats(TENANTS[0]).verbs}
    assert calls["put"] > 0
    assert not any("error" in verb.outcomes for verb in cache.stats(TENANTS[0]).verbs if verb.verb != "read")
    cache.close()
