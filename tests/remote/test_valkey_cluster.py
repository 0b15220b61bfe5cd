"""The remote tier over a cluster whose slots move and whose servers die."""

import contextlib
from collections.abc import Iterator

import pytest
import valkey
from patience import until
from valkey_world import PREFIX, Server, open_tier

from kvtier.errors import TierError, TierUnavailable
from kvtier.metrics import Metrics
from kvtier.remote import RemoteTier, record_name
from kvtier.remote.valkey.routing import slot_of
from kvtier.testing.blocks import chain_refs, content, load, put, run_length
from kvtier.tiers import BlockRef, Status

BLOCK = 8192


@pytest.fixture
def nodes(valkey_cluster: list[Server]) -> list[Server]:
    return valkey_cluster


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def tier(nodes: list[Server], metrics: Metrics) -> Iterator[RemoteTier]:
    # Two seeds, the first of which nobody listens at.
    opened = open_tier(f"valkey+cluster://127.0.0.1:1,127.0.0.1:{nodes[1].port}", metrics)
    opened.clear().wait(30)
    yield opened
    opened.close()


def redirects(metrics: Metrics) -> int:
    return int(metrics.value("remote_outcomes_total", tier="remote", reason="redirect"))


def assert_loads(tier: RemoteTier, refs: list[BlockRef]) -> None:
    for ref, (status, data) in zip(refs, load(tier, [ref.key for ref in refs]), strict=True):
        assert status is Status.OK
        assert data == content(ref, BLOCK)


def name_of(ref: BlockRef) -> bytes:
    return PREFIX + record_name(ref.key, exact=True)


def test_slots_are_those_of_an_independent_client() -> None:
    for ref in chain_refs(50):
        assert slot_of(name_of(ref)) == valkey.crc.key_slot(name_of(ref))
    for key in (b"{a}b", b"x{a}{b}", b"{}a", b"{a", b"a}{b}", b"}{", b""):
        assert slot_of(key) == valkey.crc.key_slot(key)


def test_records_lie_on_every_server(nodes: list[Server], tier: RemoteTier) -> None:
    refs = chain_refs(60)
    put(tier, refs, BLOCK)
    assert_loads(tier, refs)
    sizes = []
    for node in nodes:
        with node.client() as client:
            sizes.append(client.dbsize())
    assert sum(sizes) == tier.stats()["blocks"] == 60
    assert min(sizes) > 0
    tier.clear(refs[0].ns).wait(30)
    assert tier.stats()["blocks"] == 0


class Migration:
    """One slot on its way from one server to another, step by step, as a resharding does it."""

    def __init__(self, nodes: list[Server], slot: int) -> None:
        share = -(-16384 // len(nodes))
        at = slot // share
        self.slot = slot
        self.source, self.target = nodes[at], nodes[(at + 1) % len(nodes)]
        self._nodes = nodes
        self._ids = {node.port: self._call(node, "CLUSTER", "MYID").decode() for node in nodes}

    @staticmethod
    def _call(node: Server, *words: object) -> object:
        with node.client() as client:
            return client.execute_command(*words)

    def begin(self) -> None:
        self._call(self.target, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", self._ids[self.source.port])
        self._call(self.source, "CLUSTER", "SETSLOT", self.slot, "MIGRATING", self._ids[self.target.port])

    def move_keys(self) -> int:
        keys = self._call(self.source, "CLUSTER", "GETKEYSINSLOT", self.slot, 100)
        for key in keys:
            self._call(self.source, "MIGRATE", "127.0.0.1", self.target.port, key, 0, 5000)
        return len(keys)

    def end(self) -> None:
        for node in (self.target, self.source, *self._nodes):
            self._call(node, "CLUSTER", "SETSLOT", self.slot, "NODE", self._ids[self.target.port])

    def undo(self) -> None:
        back = Migration.__new__(Migration)
        back.slot, back.source, back.target = self.slot, self.target, self.source
        back._nodes, back._ids = self._nodes, self._ids
        back.begin()
        back.move_keys()
        back.end()


def test_a_slot_that_moves_is_followed_at_every_step(nodes: list[Server], tier: RemoteTier, metrics: Metrics) -> None:
    refs = chain_refs(30)
    put(tier, refs, BLOCK)
    moving = Migration(nodes, slot_of(name_of(refs[4])))
    before = redirects(metrics)
    moving.begin()
    try:
        assert_loads(tier, refs)
        assert moving.move_keys() >= 1
        # The old server has the slot, but not the key: ASK.
        assert_loads(tier, refs)
        assert redirects(metrics) > before
        tier.remove([refs[4].key]).wait(30)
        put(tier, refs[4:5], BLOCK)
        assert_loads(tier, refs)
        with moving.target.client() as client:
            assert client.execute_command("CLUSTER", "COUNTKEYSINSLOT", moving.slot) >= 1
    finally:
        moving.end()
    try:
        # Another server has it now: MOVED, once.
        assert_loads(tier, refs)
        after = redirects(metrics)
        assert_loads(tier, refs)
        assert redirects(metrics) == after
        put(tier, chain_refs(30, seed=1), BLOCK)
        assert_loads(tier, chain_refs(30, seed=1))
    finally:
        moving.undo()
    assert_loads(tier, refs)


def test_a_server_that_dies_makes_misses_and_comes_back(
    nodes: list[Server], tier: RemoteTier, metrics: Metrics
) -> None:
    refs = chain_refs(30)
    put(tier, refs, BLOCK)
    nodes[2].kill()
    with contextlib.suppress(TierUnavailable):
        assert len(tier.acquire([ref.key for ref in refs], "o").wait(30).handles) < len(refs)
    tier.release_owner("o")
    nodes[2].start()  # with its node table, without its data

    def again() -> bool:
        try:
            put(tier, refs, BLOCK)
            return run_length(tier, refs) == len(refs)
        except TierError:
            return False

    until(again, "the cluster does not serve again")
    assert_loads(tier, refs)
    assert int(metrics.value("remote_outcomes_total", tier="remote", reason="reconnect")) >= 1


def test_who_does_not_say_cluster_is_told_so(nodes: list[Server]) -> None:
    # The other servers do not have the slot of the first key that is asked for.
    slot = slot_of(PREFIX + bytes(17))
    other = nodes[0 if slot >= -(-16384 // 3) else 1]
    with pytest.raises(TierUnavailable, match=r"part of a cluster: use valkey\+cluster://"):
        open_tier(other.url)
