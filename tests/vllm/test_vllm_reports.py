"""What vLLM's own statistics, Prometheus metrics and KV events say of the tiers, against what the store says."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_llama import BLOCK_BYTES
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm_world import BLOCK, Vllm, tiers, tokens_of, whole_blocks

PROMPTS = [tokens_of(1200 + each, 5 * BLOCK + 3) for each in range(3)]
MEDIUM = {"host": "CPU", "nvme": "STORAGE"}


class Listener:
    """What a subscriber of the events believes: medium -> hashes of the blocks that are there."""

    def __init__(self, vllm: Vllm) -> None:
        self.there: dict[str, set[bytes | int]] = {}
        self.tokens: dict[bytes | int, list[int]] = {}
        self.parents: dict[bytes | int, bytes | int | None] = {}
        publisher = vllm.scheduler.kv_event_publisher
        publisher.publish = lambda batch: [self.take(event) for event in batch.events]

    def take(self, event: object) -> None:
        match event:
            case BlockStored():
                assert event.block_size == BLOCK
                self.there.setdefault(event.medium, set()).update(event.block_hashes)
                parent = event.parent_block_hash
                for at, name in enumerate(event.block_hashes if event.token_ids else ()):
                    self.tokens[name] = event.token_ids[at * BLOCK : (at + 1) * BLOCK]
                    self.parents[name] = parent
                    parent = name
            case BlockRemoved():
                self.there[event.medium] -= set(event.block_hashes)
            case AllBlocksCleared():
                self.there.pop("GPU", None)
            case _:
                raise AssertionError(event)

    def prefix(self, name: bytes | int) -> list[int]:
        """The tokens that a block's name stands for."""
        parent = self.parents[name]
        return ([] if parent is None else self.prefix(parent)) + self.tokens[name]


@pytest.fixture(scope="module")
def vllm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with Vllm(tiny, tiers(tmp_path_factory.mktemp("reports") / "nvme"), kv_events_config=events) as vllm:
        yield vllm


@pytest.fixture(scope="module")
def listener(vllm: Vllm) -> Listener:
    return Listener(vllm)


def drain(vllm: Vllm) -> None:
    """Let the events of what has settled be taken: by a step, as vLLM does."""
    vllm.settle()
    vllm.tokens([[3, 4, 5]], 2)


def test_events_say_what_each_tier_holds(vllm, listener):
    vllm.tokens(PROMPTS)
    drain(vllm)
    for tier, medium in MEDIUM.items():
        held = listener.there[medium]
        assert len(held) == vllm.store.stats()[tier]["blocks"] == 5 * len(PROMPTS)
        assert {tuple(listener.prefix(name)) for name in held} == {
            tuple(prompt[: end * BLOCK]) for prompt in PROMPTS for end in range(1, 6)
        }
    vllm.store.clear("host")
    drain(vllm)
    assert listener.there["CPU"] == set()
    assert len(listener.there["STORAGE"]) == 5 * len(PROMPTS)
    vllm.forget()
    vllm.tokens(PROMPTS[:1])
    drain(vllm)
    assert len(listener.there["CPU"]) == 5 == vllm.store.stats()["host"]["blocks"]
    assert vllm.llm.reset_prefix_cache(reset_connector=True)
    drain(vllm)
    assert {medium: len(listener.there[medium]) for medium in MEDIUM.values()} == {"CPU": 0, "STORAGE": 0}


def test_prometheus_counts_what_was_loaded(vllm, reference):
    vllm.tokens(PROMPTS)
    for tier in ("host", "nvme"):
        vllm.only(tier)
        before = vllm.metric("vllm:kvtier_loaded_bytes", tier=tier)
        vllm.tokens(PROMPTS)
        vllm.tokens([[3, 4, 5]], 2)
        loaded = vllm.metric("vllm:kvtier_loaded_bytes", tier=tier) - before
        assert loaded == whole_blocks(PROMPTS) * BLOCK_BYTES
        assert vllm.metric("vllm:kvtier_loaded_bytes", tier=tier) == vllm.loaded()[tier]


def test_hits_are_counted_as_external(vllm):
    """vLLM's own figures of the connector's hits."""
    vllm.tokens(PROMPTS)
    vllm.only("host")
    before = vllm.metric("vllm:external_prefix_cache_hits")
    answers = vllm.generate(PROMPTS)
    assert [answer.cached for answer in answers] == [5 * BLOCK] * len(PROMPTS)
    assert vllm.metric("vllm:external_prefix_cache_hits") - before == 5 * BLOCK * len(PROMPTS)
