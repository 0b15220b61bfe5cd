"""What shared memory must not allow, and when holds end."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from data_world import BLOCK, NOTHING, PLAIN, World, blocks, chain, content, world
from patience import PATIENCE

from kvtier.attach import HUGE
from kvtier.client.errors import Busy, Conflict, Forbidden, Interrupted, Refused
from kvtier.client.results import Block, PutOutcome
from kvtier.cpu.region import MemoryRegion
from kvtier.layout import Span
from kvtier.service.cache import Scope
from kvtier.wire import Opcode
from kvtier.wire import messages as wire

KEYS = chain(4, "shared")


@pytest.fixture
def filled(service: World) -> World:
    with service.client("shared") as client:
        client.create_namespace("memory", None)
        client.put_many("memory", blocks(KEYS))
    return service


def test_a_lease_shows_the_bytes_in_place(filled: World) -> None:
    with filled.client("shared") as client, client.lease("memory", KEYS) as lease:
        assert [bytes(item.data) for item in lease.blocks] == [content(key) for key in KEYS]
        assert all(item.data.readonly for item in lease.blocks)


@pytest.mark.parametrize("way", ["tcp", "unix", "shared"])
def test_a_block_that_rotted_in_host_is_a_miss_also_where_the_client_verifies(filled: World, way: str) -> None:
    host = filled.cache._tenants["red"].store.host
    memory = host._slab.region.array
    place = memory.tobytes().find(content(KEYS[2]))
    with filled.client(way) as client:
        into = [memoryview(bytearray(BLOCK)) for _ in KEYS]
        assert len(client.get_many("memory", KEYS, into=into)) == 4
        memory[place + 100] ^= 1
        before = host.stats()["corrupt"]
        found = client.get_many("memory", KEYS, into=into)
        assert [item.key for item in found] == KEYS[:2]
        assert [bytes(item.data) for item in found] == [content(key) for key in KEYS[:2]]
        # The service was told, and has dropped it with what hung from it.
        assert host.stats()["corrupt"] == before + 1
        assert len(client.match("memory", KEYS).tiers) == 2
        assert client.put_many("memory", blocks(KEYS))[2:] == [PutOutcome.STORED] * 2
        assert [bytes(item.data) for item in client.get_many("memory", KEYS)] == [content(key) for key in KEYS]
    assert filled.settled() == NOTHING


def test_the_kernel_refuses_writes_through_the_mapping(filled: World) -> None:
    process = leasing_process(
        filled,
        """
        import ctypes, numpy
        ctypes.memset(numpy.frombuffer(lease.blocks[0].data, numpy.uint8).ctypes.data, 0, 1)
        """,
    )
    assert process.wait(PATIENCE) == -signal.SIGSEGV
    with filled.client() as client:
        assert [bytes(item.data) for item in client.get_many("memory", KEYS)] == [content(key) for key in KEYS]
    assert filled.settled() == NOTHING


def test_leased_bytes_stay_while_everything_else_is_evicted(filled: World) -> None:
    with filled.client("shared") as client, filled.client() as other:
        lease = client.lease("memory", KEYS)
        for turn in range(6):
            other.put_many("memory", blocks(chain(100, f"flood{turn}")))
        assert [bytes(item.data) for item in lease.blocks] == [content(key) for key in KEYS]
        assert filled.holds()["leases"] > 0
        lease.close()
        lease.close()
        other.put_many("memory", blocks(chain(250, "flood")))
        assert len(client.match("memory", KEYS).tiers) < 4


def test_a_hold_outlasts_the_idle_time_and_dies_with_its_process(tmp_path: Path) -> None:
    with world(tmp_path, idle_timeout=1.0) as service:
        with service.client() as client:
            client.create_namespace("memory", None)
            client.put_many("memory", blocks(KEYS))
        process = leasing_process(service, "time.sleep(60)")
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "leased 4\n"
            time.sleep(2.2)
            held = service.holds()
            assert held["leases"] > 0
            assert held["buffers"] > 0  # its staging region
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)
            assert service.settled() == NOTHING
        finally:
            process.kill()
            process.wait(PATIENCE)


def leasing_process(service: World, then: str) -> "subprocess.Popen[str]":
    script = """
        import sys, time
        from kvtier.client.data import DataClient
        address, token, *keys = sys.argv[1:]
        client = DataClient(address, token)
        lease = client.lease("memory", [bytes.fromhex(key) for key in keys])
        print("leased", len(lease.blocks), flush=True)
    """
    code = textwrap.dedent(script) + textwrap.dedent(then)
    arguments = [sys.executable, "-c", code, service.unix, service.token["red"], *(key.hex() for key in KEYS)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_closing_tells_that_the_hold_was_lost(filled: World) -> None:
    client = filled.client("shared")
    lease = client.lease("memory", KEYS)
    client.close()
    with pytest.raises(Interrupted):
        lease.close()
    assert filled.settled() == NOTHING


def test_a_token_for_some_namespaces_maps_nothing_and_still_gets_its_blocks(filled: World) -> None:
    token = filled.tokens.create("red", (Scope.READ, Scope.WRITE), ["memory"])
    with filled.client("unix", shared=None) as client:
        client._token = token
        assert not client.connect().shared
        assert [bytes(item.data) for item in client.get_many("memory", KEYS)] == [content(key) for key in KEYS]
        assert not client.shares_memory
    insistent = filled.client("shared")
    insistent._token = token
    with pytest.raises(Forbidden, match="tenant of its own"):
        insistent.connect()
    insistent.close()


def test_blocks_that_lie_encoded_in_host_come_over_the_socket(tmp_path: Path) -> None:
    tiering = {"host": {"capacity": "32MiB", "format": "int8"}, "accept_lossy": True}
    with world(tmp_path, tiering=tiering) as service, service.client("shared") as client, service.client() as other:
        client.create_namespace("encoded", PLAIN)
        data = np.random.default_rng(0).normal(size=BLOCK // 4).astype(np.float32).tobytes()
        # Blocks of unknown depth would be kept raw.
        keys, parents = chain(4), [None, *chain(3)]
        client.put_many("encoded", [Block(keys[at], data, parent=parents[at], depth=at) for at in range(4)])
        with pytest.raises(Conflict, match="encoded"):
            client.lease("encoded", keys, lossy=True)
        found = client.get_many("encoded", keys, lossy=True)
        assert [item.exact for item in found] == [False] * 4
        assert [bytes(item.data) for item in found] == [
            bytes(item.data) for item in other.get_many("encoded", keys, lossy=True)
        ]
        assert np.allclose(np.frombuffer(found[3].data, np.float32), np.frombuffer(data, np.float32), atol=0.05)


def test_releases_of_what_is_not_held_are_refused(filled: World) -> None:
    with filled.client("shared") as client:
        client.connect()
        pipeline = client._pipeline
        assert pipeline is not None
        with pytest.raises(Refused, match="lease 77"):
            pipeline.call(Opcode.RELEASE, wire.Release([77]), wire.Done, time.monotonic() + PATIENCE)


@pytest.mark.parametrize("offset", [-1, 32 << 20, (32 << 20) - BLOCK + 1, 1 << 62])
def test_what_lies_outside_the_staging_region_is_refused(filled: World, offset: int) -> None:
    with filled.client("shared") as client:
        client.connect()
        pipeline = client._pipeline
        assert pipeline is not None
        (key,) = chain(1, "outside")
        asked = wire.Stage(ns="memory", keys=key[:16], sizes=[BLOCK], offsets=[offset])
        with pytest.raises(Refused):
            pipeline.call(Opcode.STAGE, asked, wire.Outcomes, time.monotonic() + PATIENCE)
        assert client.get("memory", key) is None


def test_threads_share_the_staging_region(service: World) -> None:
    with service.client("shared", staging=1 << 20) as client:
        client.create_namespace("threads", None)

        def work(name: str) -> None:
            for turn in range(5):
                keys = chain(8, f"{name}.{turn}")
                assert set(client.put_many("threads", blocks(keys))) == {PutOutcome.STORED}
                found = client.get_many("threads", keys)
                assert [bytes(item.data) for item in found] == [content(key) for key in keys]

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, [f"t{at}" for at in range(6)]))
    assert service.settled() == NOTHING


def test_staging_that_is_filled_again_and_again_gets_huge_pages(
    service: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[tuple[int, int]] = []
    expect = MemoryRegion.expect

    def told(region: MemoryRegion, offset: int, nbytes: int) -> None:
        if region.writable:
            wanted.append((offset, nbytes))
        expect(region, offset, nbytes)

    monkeypatch.setattr(MemoryRegion, "expect", told)
    monkeypatch.setattr("kvtier.service.data.session._FILLED", 1)
    with service.client("shared", staging=4 * HUGE) as client:
        client.create_namespace("filled", None)
        for turn, key in enumerate(chain(12, "filled")):
            assert client.put_many("filled", blocks([key], HUGE)) == [PutOutcome.STORED]
            assert bytes(client.get_many("filled", [key])[0].data) == content(key, HUGE)
            assert len(wanted) == max(0, turn - 3)
    assert set(wanted) == {(slot * 2 * HUGE, HUGE) for slot in range(2)}


def test_a_block_larger_than_a_slot_goes_over_the_socket(service: World) -> None:
    with service.client("shared", staging=64 << 10) as client:
        client.create_namespace("large", None)
        keys = chain(2, "large")
        assert client.put_many("large", blocks(keys, 100_000)) == [PutOutcome.STORED] * 2
        assert [bytes(item.data) for item in client.get_many("large", keys)] == [content(key, 100_000) for key in keys]


def test_a_refused_put_gives_its_slots_back(service: World) -> None:
    with service.client("shared", staging=1 << 20) as client:
        client.create_namespace("slots", None)
        for _ in range(9):
            with pytest.raises(Refused):
                client.put_many("absent", blocks(chain(12, "slots")))
        assert set(client.put_many("slots", blocks(chain(12, "slots")))) == {PutOutcome.STORED}


def test_leases_that_find_nothing_hold_nothing(filled: World) -> None:
    with filled.client("shared") as client:
        for _ in range(3):
            assert client.get_many("memory", chain(2, "absent")) == []
            assert client.lease("memory", chain(2, "absent")).blocks == []
        assert filled.holds()["readings"] == 0


def test_leases_of_one_connection_are_bounded(filled: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.data.session._MOST_LEASES", 3)
    with filled.client("shared") as client:
        held = [client.lease("memory", KEYS) for _ in range(3)]
        with pytest.raises(Busy, match="holds 3 leases"):
            client.lease("memory", KEYS)
        assert filled.holds()["readings"] == 3
        held.pop().close()
        client.lease("memory", KEYS).close()


def test_a_tenant_that_takes_all_the_memory_for_bodies_has_its_own(tmp_path: Path) -> None:
    with world(tmp_path, inflight_bytes="32MiB") as service:
        with service.client("shared") as hog, service.client("unix", shared=True) as second:
            hog.connect()
            with pytest.raises(Busy):
                second.connect()
            with service.client("shared", "blue") as other:
                other.create_namespace("own", None)
                assert other.put_many("own", blocks(KEYS)) == [PutOutcome.STORED] * 4
                assert other.shares_memory
        assert service.settled() == NOTHING


def test_where_no_staging_is_left_a_client_uses_the_socket(tmp_path: Path) -> None:
    with world(tmp_path, inflight_bytes="32MiB") as service:
        first = service.client("shared", shared=None)
        second = service.client("shared", shared=None)
        first.connect()
        second.connect()
        assert (first.shares_memory, second.shares_memory) == (True, False)
        second.create_namespace("socket", None)
        assert first.put_many("socket", blocks(KEYS)) == [PutOutcome.STORED] * 4
        assert len(second.get_many("socket", KEYS)) == 4
        first.close()
        second.close()


def test_a_staged_block_whose_bytes_are_changed_meanwhile_is_whole_or_a_miss(service: World) -> None:
    """Whatever a client does to its staging region: what is stored is what the checksum says, or is not handed out."""
    with service.client("shared") as client:
        client.create_namespace("changing", None)
        memory = client._connected(time.monotonic() + PATIENCE)[1]
        assert memory is not None
        staging = memory._staging
        assert staging is not None
        view = staging.view(Span(0, 0, 4 << 20))
        done = threading.Event()

        def scribble() -> None:
            while not done.is_set():
                view[:] = b"\xff" * (4 << 20)
                view[:] = bytes(4 << 20)

        scribbler = threading.Thread(target=scribble)
        scribbler.start()
        try:
            for number in range(12):
                key = number.to_bytes(16, "big")
                asked = wire.Stage(ns="changing", keys=key, sizes=[4 << 20], offsets=[0])
                client._pipeline.call(Opcode.STAGE, asked, wire.Outcomes, time.monotonic() + PATIENCE)  # type: ignore[union-attr]
                found = client.get("changing", key)
                assert found is None or len(found.data) == 4 << 20
        finally:
            done.set()
            scribbler.join()
