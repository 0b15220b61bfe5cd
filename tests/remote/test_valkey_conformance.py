"""The remote tier over a real Valkey server, and over a cluster of three, passes the public suite."""

import pytest
from valkey_world import PREFIX, Server, open_tier

from kvtier.metrics import Metrics
from kvtier.remote import ENVELOPE_BYTES, RemoteTier, record_name
from kvtier.remote.valkey.routing import slot_of
from kvtier.testing import OpenTierSuite
from kvtier.tiers import Tier


class TestValkeyTier(OpenTierSuite):
    bounded = False
    eager_closure = False
    scheme = "valkey"

    @pytest.fixture
    def servers(self, valkey_server: Server) -> list[Server]:
        return [valkey_server]

    @pytest.fixture(autouse=True)
    def _empty(self, servers: list[Server]) -> None:
        self._servers = servers
        for one in servers:
            with one.client() as client:
                client.flushall()

    def make_tier(self, capacity_bytes: int, metrics: Metrics) -> RemoteTier:
        places = ",".join(f"127.0.0.1:{one.port}" for one in self._servers)
        return open_tier(f"{self.scheme}://{places}", metrics)

    def corrupt(self, tier: Tier, key: bytes) -> None:
        name = PREFIX + record_name(key, exact=True)
        with self._owner(name).client() as client:
            at = ENVELOPE_BYTES + 1000
            byte = client.getrange(name, at, at)[0]
            client.setrange(name, at, bytes([byte ^ 1]))

    def _owner(self, name: bytes) -> Server:
        return self._servers[0]


class TestClusterTier(TestValkeyTier):
    scheme = "valkey+cluster"

    @pytest.fixture
    def servers(self, valkey_cluster: list[Server]) -> list[Server]:
        return valkey_cluster

    def _owner(self, name: bytes) -> Server:
        return self._servers[slot_of(name) // -(-16384 // len(self._servers))]
