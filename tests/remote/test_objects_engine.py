"""Two engines on one object store; an engine whose object store does not answer."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtier_engine import connect
from tiny_model import tiny_model

from kvtier.config.remote import RemoteSettings
from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.metrics import Metrics
from kvtier.remote import open_remote
from kvtier.store import TieredStore

BLOCK, RUN = 4, 4
PROMPT = [(7 * at) % 200 + 1 for at in range(41)]
OTHER = [(5 * at) % 190 + 3 for at in range(9)]
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


class Machine:
    """An engine with a store of its own over the shared one."""

    def __init__(self, loaded: LoadedModel, settings: RemoteSettings) -> None:
        metrics = Metrics()
        self.remote = open_remote(settings, metrics)
        self.store = TieredStore(HostTier(1 << 20, metrics=metrics), [self.remote], metrics=metrics)
        self.connection = connect(self.store, loaded, loaded.model.layout(BLOCK), 64, recompute_gate=False)
        hooks = (self.connection.scheduler, self.connection.worker)
        self.engine = Engine(loaded, EngineOptions(block_size=BLOCK, num_blocks=64), hooks)

    def run(self, prompt: list[int]) -> RequestOutput:
        self.engine.add("r", prompt, GREEDY)
        outputs: list[RequestOutput] = []
        end = time.monotonic() + 30
        while self.engine.has_work or self.engine.busy:
            assert time.monotonic() < end, self.engine.stats()
            outputs += self.engine.step()
        self.store.flush()
        return outputs[-1]

    def close(self) -> None:
        self.connection.close()
        self.store.close()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture
def machines(loaded: LoadedModel, tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    settings = RemoteSettings(url=tmp_path.as_uri(), options=f"run={RUN}")
    with contextlib.closing(Machine(loaded, settings)) as one, contextlib.closing(Machine(loaded, settings)) as two:
        yield one, two


def test_what_one_engine_computed_the_other_loads(machines: tuple[Machine, Machine]) -> None:
    one, two = machines
    cold = one.run(PROMPT)
    # Ten blocks of the prompt and one of the output are full; runs of four went down.
    assert one.remote.stats()["blocks"] == 8
    warm = two.run(PROMPT)
    assert warm.token_ids == cold.token_ids
    assert two.store.metrics.value("hit_blocks_total", tier="remote") == 8
    assert two.store.metrics.value("put_blocks_total", outcome="stored") == 3
    # What was loaded is in host now, and once is enough.
    two.engine.clear_device_cache()
    assert two.run(PROMPT).token_ids == cold.token_ids
    assert two.store.metrics.value("hit_blocks_total", tier="remote") == 8


def test_the_engine_steps_on_while_a_look_up_hangs(machines: tuple[Machine, Machine]) -> None:
    one, two = machines
    cold = one.run(PROMPT)
    alone = one.run(OTHER)
    gate, asked = threading.Event(), threading.Event()
    exists = two.remote._backend.exists

    def held(names: list[bytes], deadline: float) -> list[bool]:
        asked.set()
        assert gate.wait(30)
        return exists(names, deadline)

    two.remote._backend.exists = held
    two.engine.add("waits", PROMPT, GREEDY)
    longest = 0.0
    while not asked.is_set():
        two.engine.step()
    for _ in range(20):
        start = time.perf_counter()
        assert two.engine.step() == []
        longest = max(longest, time.perf_counter() - start)
    assert longest < 10
    gate.set()
    outputs: list[RequestOutput] = []
    end = time.monotonic() + 30
    while two.engine.has_work or two.engine.busy:
        assert time.monotonic() < end
        outputs += two.engine.step()
    assert outputs[-1].token_ids == cold.token_ids
    assert two.run(OTHER).token_ids == alone.token_ids
