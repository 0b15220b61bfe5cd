"""Many clients at once, four times the capacity, connections that die at random: every byte right, nothing left."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from data_world import NOTHING, World, blocks, chain, content, world

from kvtier.client.data import DataClient
from kvtier.client.errors import Busy, ClientError, Interrupted, Refused
from kvtier.client.results import PutOutcome

CLIENTS = 9
STEPS = 40
CHAINS = 24
LENGTH = 12
SIZE = 256 << 10  # 24 chains of 12 blocks are 72 MiB, in a quota of 16


class Client:
    """One client's random walk; counts what it was told."""

    def __init__(self, service: World, number: int) -> None:
        self.random = random.Random(number)
        self.way = ("tcp", "unix", "shared")[number % 3]
        self.service = service
        self.counts = {"stored": 0, "exists": 0, "dropped": 0, "found": 0, "busy": 0, "killed": 0}
        self.client = service.client(self.way, staging=2 << 20)

    def run(self) -> dict[str, int]:
        for _ in range(STEPS):
            keys = chain(LENGTH, f"mixture{self.random.randrange(CHAINS)}")[: self.random.randint(1, LENGTH)]
            try:
                self.step(keys)
            except Busy:
                self.counts["busy"] += 1
            except Interrupted:
                assert self.client._pipeline is None or self.client._pipeline.broken
        self.client.close()
        return self.counts

    def step(self, keys: list[bytes]) -> None:
        verb = self.random.choice(("put", "put", "get", "get", "match", "lease", "delete", "kill"))
        if verb == "put":
            for outcome in self.client.put_many("mixture", blocks(keys, SIZE)):
                self.counts[outcome] += 1
        elif verb == "get":
            self.check(self.client.get_many("mixture", keys), keys)
        elif verb == "match":
            assert len(self.client.match("mixture", keys).tiers) <= len(keys)
        elif verb == "lease" and self.way == "shared":
            with self.client.lease("mixture", keys) as lease:
                self.check(lease.blocks, keys)
        elif verb == "delete" and self.random.random() < 0.2:
            self.client.delete("mixture", keys[-1:])
        elif verb == "kill":
            self.kill(keys)

    def kill(self, keys: list[bytes]) -> None:
        """A connection that is cut in the middle of a put, or with its answers unread."""
        doomed = self.service.client(self.way, timeout=5, staging=2 << 20)
        doomed.connect()
        cut = self.random.random() * 0.01
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(doomed.put_many, "mixture", blocks(keys, SIZE))
            try:
                future.exception(cut)
            except TimeoutError:
                doomed.close()
            error = future.exception(10)
            assert error is None or isinstance(error, ClientError)
        doomed.close()
        self.counts["killed"] += 1

    def check(self, found: list, keys: list[bytes]) -> None:  # type: ignore[type-arg]
        assert [item.key for item in found] == keys[: len(found)]
        for item in found:
            assert item.data == content(item.key, SIZE)
        self.counts["found"] += len(found)


def test_a_mixture_of_everything(tmp_path: Path) -> None:
    with world(tmp_path) as service:
        with service.client() as client:
            client.create_namespace("mixture", None)
        with ThreadPoolExecutor(CLIENTS) as pool:
            told = list(pool.map(lambda number: Client(service, number).run(), range(CLIENTS)))
        assert service.settled() == NOTHING
        total = {name: sum(counts[name] for counts in told) for name in told[0]}
        assert min(total["stored"], total["found"], total["killed"]) > 0, total
        with service.client() as client:
            counts = client.namespace("mixture").counts
            assert counts["stored"] >= total["stored"]
            client.delete("mixture", [chain(1, f"mixture{number}")[0] for number in range(CHAINS)])
            assert set(client.put_many("mixture", blocks(chain(LENGTH, "after"), SIZE))) == {PutOutcome.STORED}
        assert service.settled() == NOTHING
        for tenant in service.cache._tenants.values():
            tenant.store.host.check()  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
def test_refusals_leave_a_connection_usable(tmp_path: Path, way: str) -> None:
    with world(tmp_path) as service, service.client(way) as client:
        assert isinstance(client, DataClient)
        client.create_namespace("usable", None)
        for _ in range(30):
            with pytest.raises(Refused):
                client.get_many("absent", chain(20))
            with pytest.raises(Refused):
                client.put_many("absent", blocks(chain(3)))
        pipeline = client._pipeline
        client.put_many("usable", blocks(chain(3)))
        assert len(client.get_many("usable", chain(3))) == 3
        assert client._pipeline is pipeline
