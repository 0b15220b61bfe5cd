"""Steps without anything to compute: looks at transfers, the rarer the longer these take."""

import contextlib
import time
from collections.abc import Iterator

import pytest
from kvtier_engine import connect
from tiny_model import tiny_model

from kvtier.connector import TierScheduler
from kvtier.cpu import HostTier
from kvtier.engine import Engine, EngineOptions, SamplingParams, core
from kvtier.hooks import Match, Pending, RequestView
from kvtier.store import TieredStore

PROMPT = [(7 * at) % 45 for at in range(18)]


class _Clock:
    """Time that passes in sleeps alone, but for what a look takes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        self.now += 0.0002
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        time.sleep(0.001)  # for the threads that move blocks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(core, "time", clock)
    return clock


@pytest.fixture
def store() -> Iterator[TieredStore]:
    with contextlib.closing(TieredStore(HostTier(1 << 20), [])) as store:
        yield store


@pytest.fixture
def engine(store: TieredStore) -> Iterator[Engine]:
    model, options = tiny_model(), EngineOptions(block_size=4, num_blocks=24, max_running=4, token_budget=32)
    layout = model.model.layout(options.block_size)
    with contextlib.closing(connect(store, model, layout, options.token_budget, recompute_gate=False)) as connection:
        yield Engine(model, options, (connection.scheduler, connection.worker))


def drained(engine: Engine) -> None:
    while engine.has_work or engine.busy:
        engine.step()


def test_looks_become_rarer_and_a_new_request_is_looked_at_soon(
    engine: Engine, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers, until = TierScheduler.match, [clock.now + 0.2]

    def late(half: TierScheduler, request: RequestView, tokens: int) -> Match | Pending:
        return offers(half, request, tokens) if clock.now >= until[0] else Pending()

    monkeypatch.setattr(TierScheduler, "match", late)
    engine.add("first", PROMPT, SamplingParams(max_tokens=1))
    while clock.now < until[0]:
        engine.step()
    slept = list(clock.slept)
    assert slept == sorted(slept)
    assert slept[0] == 0.0002
    assert slept[-1] == 0.002
    assert len(slept) < 130
    drained(engine)
    clock.now += 3600
    clock.slept.clear()
    until[0] = clock.now + 0.01
    engine.add("second", PROMPT[:9], SamplingParams(max_tokens=1))
    engine.step()
    assert clock.slept == [0.0002]
    drained(engine)
