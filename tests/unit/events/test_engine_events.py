"""A whole engine publishes what its device and its store hold: the stream adds up to the truth."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from events_world import View
from patience import until
from tiny_model import tiny_model

from kvtier import LLM, SamplingParams, api
from kvtier.errors import ConfigError
from kvtier.events.subscriber import Subscriber
from kvtier.keys import namespace_index, store_keys

BLOCK = 4


class Engine:
    def __init__(self, place: Path, **events: Any) -> None:
        endpoints = {"endpoint": f"ipc://{place}/pub", "replay_endpoint": f"ipc://{place}/replay"} | events
        nvme = {"path": str(place / "nvme"), "capacity": "4MiB", "min_free": "1B", "segment_size": "1MiB"}
        self.llm = LLM(
            tiering={"host": {"capacity": "64KiB"}, "nvme": nvme, "recompute_gate": False},
            config={"events": endpoints},
            num_blocks=24,
            block_size=BLOCK,
        )
        self.view = View()
        self.subscriber = Subscriber(endpoints["endpoint"], self.view, replay_endpoint=endpoints["replay_endpoint"])

    def generate(self, first: int, tokens: int = 40) -> None:
        self.llm.generate([[first + 1, *range(2, tokens + 1)]], SamplingParams(max_tokens=3))

    def device(self) -> set[bytes]:
        return {key[:16] for key in self.llm.engine._blocks._published}

    def tier(self, at: int) -> set[bytes]:
        """The known heads that a tier has."""
        heads = sorted(self.known())
        keys = store_keys(heads, self.space.mask())
        tier = self.llm.store.tiers[at]
        found = tier.contains(keys).wait(10).statuses
        return {head for head, status in zip(heads, found, strict=True) if status.name == "OK"}

    @property
    def space(self) -> Any:
        return api.namespace_of(self.llm.model, self.llm.model.model.layout(BLOCK))

    def known(self) -> set[bytes]:
        return set(self.llm._stack.publisher._source._blocks)

    def adds_up(self) -> None:
        until(lambda: self.view.hashes() == self.device())
        until(lambda: self.view.hashes("CPU") == self.tier(0))
        until(lambda: self.view.hashes("STORAGE") == self.tier(1))

    def close(self) -> None:
        self.subscriber.close()
        self.llm.close()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    loaded = tiny_model()
    monkeypatch.setattr(api, "_load", lambda config: loaded)
    running = Engine(tmp_path)
    yield running
    running.close()


def test_device_host_and_nvme_are_told_and_add_up(engine: Engine) -> None:
    for first in range(8):
        engine.generate(first)
    engine.llm.flush()
    engine.adds_up()
    assert engine.view.hashes("STORAGE") - engine.view.hashes(), "what left the device is told below it"
    engine.generate(0)
    engine.llm.clear_device_cache()
    engine.adds_up()
    assert engine.view.hashes() == set()
    engine.llm.clear_tier("host")
    engine.adds_up()
    assert engine.view.hashes("CPU") == set()
    engine.generate(1)
    engine.adds_up()
    engine.llm.clear_tier(None)
    engine.adds_up()


def test_tokens_and_parents_are_those_of_the_prompt(engine: Engine) -> None:
    engine.generate(3, tokens=13)
    until(lambda: len(engine.view.hashes()) == 3)
    held = engine.view.media["GPU"]
    root = next(name for name, (parent, _) in held.items() if parent is None)
    assert held[root] == (None, (4, 2, 3, 4))
    child = next(name for name, (parent, _) in held.items() if parent == root)
    assert held[child] == (root, (5, 6, 7, 8))


def test_another_namespace_in_the_same_store_is_not_told(engine: Engine) -> None:
    engine.generate(1)
    engine.llm.flush()
    engine.adds_up()
    assert {event.ns for event in engine.llm.store.events.since(0).events} == {namespace_index(engine.space.digest)}


def test_replay_without_publishing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model()
    monkeypatch.setattr(api, "_load", lambda config: loaded)
    with pytest.raises(ConfigError, match=r"events.replay_endpoint = 'ipc:///x': nothing is published"):
        LLM(config={"events": {"replay_endpoint": "ipc:///x"}}, tiering={"host": None}, num_blocks=8, block_size=4)
