"""The engine under load while its remote server is killed, frozen, filled, emptied and lied to.

Its outputs are those of an engine without tiers, no request takes longer than the store's deadlines allow, and blocks
come back once the server does. What a store does without an engine is tested in `tests/faults`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from daemon_world import Nursery, nursery
from kvtier_engine import connect, namespace_of
from objects_world import ObjectServer, S3Server, SeaweedServer
from patience import until
from rigs_world import PATIENCE, SLACK, ObjectsRig, PeerRig, Rig, ValkeyRig
from tiny_model import tiny_model

from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.keys import Chain, store_keys
from kvtier.metrics import Metrics
from kvtier.remote import open_remote
from kvtier.store import StoreOptions, TieredStore

SIZE, DEVICE_BLOCKS, HOST_BLOCKS = 4, 64, 96
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
# Two families, each with a prefix of eight blocks, then four of its own; with their outputs, host has room for all.
PROMPTS = [
    [*((7 * at + family) % 200 + 1 for at in range(32)), *((5 * at + 31 * member) % 190 + 3 for at in range(17))]
    for family in range(2)
    for member in range(4)
]
# A look-up and a load, each over by its deadline.
LONGEST = 2 * PATIENCE + SLACK

Expected = list[tuple[int, ...]]


def drained(engine: Engine, step: Callable[[int], None] = lambda _: None) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_work or engine.busy:
        outputs |= {output.id: output for output in engine.step()}
        steps += 1
        step(steps)
    return outputs


class Machine:
    """An engine over a small host tier and a rig's server. Every batch that it runs is checked."""

    def __init__(self, loaded: LoadedModel, rig: Rig, expected: Expected) -> None:
        layout = loaded.model.layout(SIZE)
        self.rig = rig
        self.metrics = Metrics()
        self._expected = expected
        self._host = HostTier(HOST_BLOCKS * layout.block_bytes(), metrics=self.metrics)
        self.store = TieredStore(
            self._host,
            [open_remote(rig.settings, self.metrics)],
            metrics=self.metrics,
            options=StoreOptions(load_deadline=PATIENCE, breaker_pause=0.1),
        )
        self._connection = connect(self.store, loaded, layout, 64, recompute_gate=False)
        hooks = (self._connection.scheduler, self._connection.worker)
        self._engine = Engine(loaded, EngineOptions(block_size=SIZE, num_blocks=DEVICE_BLOCKS), hooks)
        self._slots = self._connection.staging[0].free_slots
        self._mask = namespace_of(loaded, layout).mask()
        self._batches = 0

    @property
    def keys(self) -> list[bytes]:
        """Of all blocks of all prompts, once each."""
        chains = [Chain(SIZE) for _ in PROMPTS]
        for chain, prompt in zip(chains, PROMPTS, strict=True):
            chain.extend(prompt)
        return list(dict.fromkeys(key for chain in chains for key in store_keys(chain.keys, self._mask)))

    def run(self, during: Callable[[], object] | None = None) -> int:
        """All prompts at once, with nothing in the device; `during` happens meanwhile.

        Returns the tokens that were loaded, if the remote tier handed out any block.
        """
        before = self.count("read_bytes_total")
        self._engine.clear_device_cache()
        self._batches += 1
        names = [f"{self._batches}.{at}" for at in range(len(PROMPTS))]
        for name, prompt in zip(names, PROMPTS, strict=True):
            self._engine.add(name, prompt, GREEDY)
        # Another thread: what it does takes as long as it takes, and the engine steps on.
        event = threading.Thread(target=during) if during is not None else None
        outputs = drained(self._engine, lambda step: event.start() if event is not None and step == 2 else None)
        if event is not None:
            event.join()
        assert [outputs[name].token_ids for name in names] == self._expected
        told = [outputs[name].metrics for name in names]
        assert max((one.latest_token or 0.0) - one.arrival for one in told) < LONGEST
        # Those of host alone are no hits of the remote tier, and blocks that came too late were not loaded.
        return sum(one.loaded_tokens for one in told) if self.count("read_bytes_total") > before else 0

    def only_below(self) -> None:
        self.store.flush()
        self.store.clear("host")

    def reload(self) -> int:
        """Tokens that come back from the remote tier."""
        self.only_below()
        return self.run()

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.value(name, tier="remote", **labels)

    def met(self, reason: str) -> float:
        return self.count("remote_outcomes_total", reason=reason)

    @property
    def timeouts(self) -> float:
        operations = ("match", "acquire", "read", "demote")
        return sum(self.count("timeouts_total", operation=operation) for operation in operations)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Batch after batch, each of which needs the remote tier."""

        def ran() -> object:
            self.store.clear("host")
            self.run()
            return condition()

        until(ran, what)

    def assert_recovers(self) -> None:
        """Blocks go down and come back, nothing is skipped any more, and nothing is held."""

        def settled() -> bool:
            skipped = self.count("skipped_lookups_total")
            return self.reload() > 0 and self.count("skipped_lookups_total") == skipped

        self.run()
        until(settled, "the remote tier does not come back")
        self.store.flush()
        stats = self.store.stats()
        assert not any(stats[name][what] for name in ("host", "remote") for what in ("leases", "reservations")), stats
        assert self._engine.stats().free_blocks == DEVICE_BLOCKS
        assert self._connection.staging[0].free_slots == self._slots
        self._host.check()

    def close(self) -> None:
        self._connection.close()
        self.store.close()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> Expected:
    """Of an engine without tiers, one prompt after the other."""
    engine = Engine(loaded, EngineOptions(block_size=SIZE, num_blocks=DEVICE_BLOCKS))

    def alone(prompt: Sequence[int]) -> tuple[int, ...]:
        engine.clear_device_cache()
        engine.add("r", list(prompt), GREEDY)
        return drained(engine)["r"].token_ids

    return [alone(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def daemons() -> Iterator[Nursery]:
    with nursery() as made:
        yield made


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    server = SeaweedServer(tmp_path_factory.mktemp("seaweedfs"))
    yield server
    server.kill()


@pytest.fixture(params=["valkey", "moto", "seaweedfs", "peer"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with contextlib.closing(_rig(request, tmp_path)) as made:
        yield made


def _rig(request: pytest.FixtureRequest, path: Path) -> ValkeyRig | ObjectsRig | PeerRig:
    if request.param == "valkey":
        return ValkeyRig(path)
    if request.param == "peer":
        return PeerRig(request.getfixturevalue("daemons"), path)
    server: ObjectServer = request.getfixturevalue(request.param)
    return ObjectsRig(server)


@pytest.fixture
def machine(loaded: LoadedModel, rig: Rig, expected: Expected) -> Iterator[Machine]:
    """Its blocks are in the remote tier, and have come back from there."""
    with contextlib.closing(Machine(loaded, rig, expected)) as machine:
        machine.run()
        until(machine.reload, "what was put does not come back")
        yield machine
        # A test that failed may have left it frozen, and closing waits for it.
        rig.thaw()


def test_killed_and_restarted_empty(machine: Machine) -> None:
    machine.run(machine.rig.kill)
    machine.until(lambda: machine.met("refused"), "nobody noticed")
    machine.run(machine.rig.start)
    machine.assert_recovers()
    assert machine.met("reconnect") >= 1


def test_frozen_for_a_while(machine: Machine) -> None:
    machine.run(machine.rig.freeze)
    machine.until(lambda: machine.count("breaker_trips_total"), "the breaker did not open")
    skipped, timeouts = machine.count("skipped_lookups_total"), machine.timeouts
    assert timeouts >= 3
    # Left alone, but for a trial now and then.
    machine.until(lambda: machine.count("skipped_lookups_total") > skipped, "nobody skips it")
    machine.until(lambda: machine.timeouts > timeouts, "nobody tries it")
    machine.run(machine.rig.thaw)
    machine.assert_recovers()


def test_full(machine: Machine) -> None:
    if not machine.rig.fills:
        pytest.skip("this kind of server has no limit of its own")
    machine.run(machine.rig.fill)
    # What was there stays readable; what is new is not taken.
    assert machine.reload() > 0
    machine.store.delete(machine.keys)
    machine.run()
    assert machine.reload() == 0
    assert machine.met("full") >= 1
    assert machine.count("dropped_blocks_total", reason="no_space_on_server") >= 1
    machine.run(machine.rig.drain)
    machine.assert_recovers()


def test_restarted_empty_between_two_batches(machine: Machine) -> None:
    machine.only_below()
    machine.rig.kill()
    machine.rig.start()
    assert machine.run() == 0
    machine.assert_recovers()


def test_values_corrupted(machine: Machine) -> None:
    machine.only_below()
    assert machine.rig.corrupt(machine.keys)
    assert machine.run() == 0
    assert machine.met("corrupt") >= 1
    assert machine.count("corrupt_blocks_total") >= 1
    machine.assert_recovers()


def test_values_corrupted_under_load(machine: Machine) -> None:
    for _ in range(3):
        machine.store.clear("host")
        machine.run(lambda: machine.rig.corrupt(machine.keys))
    machine.until(lambda: machine.met("corrupt"), "nobody read what was damaged")
    machine.assert_recovers()
