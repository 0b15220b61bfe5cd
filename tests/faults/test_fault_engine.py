"""The bundled engine over a store of which every part fails: the same tokens, no idle engine, nothing left behind."""

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fault_world import World
from kvtier_engine import connect, namespace_of
from patience import turns
from tiny_model import tiny_model

from kvtier.engine import Engine, EngineOptions, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.engine.models.base import DenseAttention
from kvtier.keys import Chain, store_keys
from kvtier.testing import Fault, Kind
from kvtier.testing.faults import VERBS

SIZE = 4
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
PROMPTS = [[(7 * at + 11 * number) % 200 + 1 for at in range(33)] for number in range(8)]
SHARED = [[*PROMPTS[0][:24], *PROMPTS[number][24:]] for number in range(4)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> dict[tuple[int, ...], list[int]]:
    """Greedy by the definition: the whole sequence anew for every token, without a cache."""

    def dense(prompt: Sequence[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(GREEDY.max_tokens or 0):
            ids = torch.tensor(tokens)
            logits = loaded.model.forward(ids, torch.arange(len(ids)), DenseAttention(), torch.tensor([len(ids) - 1]))
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]

    return {tuple(prompt): dense(prompt) for prompt in [*PROMPTS, *SHARED]}


class Stack:
    """An engine on a `World`; ids of requests are never used twice."""

    def __init__(self, loaded: LoadedModel, world: World, *, salt: str = "", **options: int) -> None:
        layout = loaded.model.layout(SIZE)
        self.world = world
        self.connection = connect(world.store, loaded, layout, 64, salt=salt, recompute_gate=False)
        self.mask = namespace_of(loaded, layout, salt).mask()
        chosen = EngineOptions(**{"block_size": SIZE, "num_blocks": 96} | options)
        self.engine = Engine(loaded, chosen, (self.connection.scheduler, self.connection.worker))
        self.blocks = chosen.num_blocks
        self.slots = self.connection.staging[0].free_slots
        self.requests = 0

    def run(self, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
        """Output tokens and loaded tokens of each prompt, all of them at once."""
        names = [f"r{self.requests + at}" for at in range(len(prompts))]
        self.requests += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add(name, list(prompt), GREEDY)
        outputs = {}
        for _ in turns():
            if not (self.engine.has_work or self.engine.busy):
                break
            outputs |= {output.id: output for output in self.engine.step()}
        else:
            raise AssertionError(f"no end in sight: {self.engine.stats()}")
        loads = [outputs[name].metrics.loaded_tokens for name in names]
        return [list(outputs[name].token_ids) for name in names], loads

    def only_below(self) -> None:
        self.engine.clear_device_cache()
        self.world.down()

    def stored(self, prompt: Sequence[int]) -> int:
        chain = Chain(SIZE)
        chain.extend(prompt)
        return len(self.world.store.match(store_keys(chain.keys, self.mask)).tiers)

    def check(self) -> None:
        self.world.check()
        assert self.engine.stats().free_blocks == self.blocks
        assert self.connection.staging[0].free_slots == self.slots


@pytest.fixture
def stack(loaded: LoadedModel, tmp_path: Path) -> Iterator[Stack]:
    block = loaded.model.layout(SIZE).block_bytes()
    options = {"load_deadline": 2.0, "breaker_timeouts": 3, "breaker_pause": 0.1}
    with contextlib.closing(World(tmp_path, block=block, nvme_blocks=512, host_blocks=64, **options)) as world:
        stack = Stack(loaded, world)
        yield stack
        stack.check()
        stack.connection.close()


Expected = dict[tuple[int, ...], list[int]]


def agree(outputs: list[list[int]], prompts: Sequence[Sequence[int]], expected: Expected) -> None:
    assert outputs == [expected[tuple(prompt)] for prompt in prompts]


def test_a_damaged_block_is_a_miss_once_and_does_not_loop(stack: Stack, expected: Expected) -> None:
    agree(stack.run(PROMPTS[:1])[0], PROMPTS[:1], expected)
    stack.only_below()
    stack.world.below.inject(Fault("read", Kind.ROT, nth=1, first_item=3))
    # A request takes a look-up, a load, a recomputation and five tokens: some dozens of steps that have work, and
    # idle ones while the disk reads.
    outputs, loads = stack.run(PROMPTS[:1])
    agree(outputs, PROMPTS[:1], expected)
    assert loads == [3 * SIZE]
    assert stack.world.total("kvtier_corrupt_blocks_total", "nvme") >= 1
    # It was computed again and stored again: the next one loads all.
    stack.only_below()
    outputs, loads = stack.run(PROMPTS[:1])
    agree(outputs, PROMPTS[:1], expected)
    assert loads == [32]


def test_sharers_of_a_failed_prefix_decode_what_the_first_recomputes(stack: Stack, expected: Expected) -> None:
    agree(stack.run(SHARED[:1])[0], SHARED[:1], expected)
    for first in (0, 2, 5):
        stack.only_below()
        stack.world.below.inject(Fault("read", Kind.CORRUPT, nth=1, first_item=first))
        agree(stack.run(SHARED)[0], SHARED, expected)
        stack.world.heal()


def test_eight_clients_on_small_pools_with_every_fault_at_random(
    loaded: LoadedModel, tmp_path: Path, expected: Expected
) -> None:
    block = loaded.model.layout(SIZE).block_bytes()
    kinds = (Kind.UNAVAILABLE, Kind.EIO, Kind.CORRUPT, Kind.SHORT, Kind.VANISH, Kind.ROT, Kind.ENOSPC, Kind.REFUSE)
    plan = [
        Fault(verb, kind)
        for kind in kinds
        for verb in sorted(VERBS - {"stats", "flush", "clear", "remove", "coldest", "duplicate", "abort"})
        if Fault("*", kind).fits(verb)
    ]
    with contextlib.closing(World(tmp_path, block=block, nvme_blocks=256, host_blocks=24)) as world:
        stack = Stack(loaded, world, num_blocks=24, max_running=8, token_budget=24)
        dice = random.Random(2)
        for tier in (world.host, world.below):
            tier.inject(*(replace(fault, probability=0.03, seed=dice.randrange(99)) for fault in plan))
        for _ in range(6):
            prompts = [dice.choice([*PROMPTS, *SHARED]) for _ in range(8)]
            agree(stack.run(prompts)[0], prompts, expected)
        assert world.host.injected.total() > 10
        stack.check()
        stack.connection.close()


@pytest.mark.parametrize("verb", ["reserve", "write", "seal", "commit", "acquire"])
def test_a_host_that_always_fails_only_costs_time(stack: Stack, expected: Expected, verb: str) -> None:
    stack.world.host.inject(Fault(verb, Kind.UNAVAILABLE))
    for _ in range(2):
        agree(stack.run(PROMPTS[:3])[0], PROMPTS[:3], expected)
        stack.engine.clear_device_cache()
    stack.world.heal()
    agree(stack.run(PROMPTS[:3])[0], PROMPTS[:3], expected)


@pytest.mark.parametrize("fault", [Fault("read", Kind.HANG), Fault("acquire", Kind.LOST)], ids=["hang", "lost"])
def test_a_disk_that_does_not_answer_does_not_stop_the_engine(stack: Stack, expected: Expected, fault: Fault) -> None:
    agree(stack.run(PROMPTS[:2])[0], PROMPTS[:2], expected)
    stack.only_below()
    stack.world.below.inject(fault)
    outputs, loads = stack.run(PROMPTS[:2])
    agree(outputs, PROMPTS[:2], expected)
    assert loads == [0, 0]
    stack.world.heal()


def test_tenants_on_one_store_share_nothing(loaded: LoadedModel, stack: Stack, expected: Expected) -> None:
    agree(stack.run(PROMPTS[:1])[0], PROMPTS[:1], expected)
    stack.world.store.flush()
    other = Stack(loaded, stack.world, salt="other tenant")
    assert other.stored(PROMPTS[0]) == 0
    outputs, loads = other.run(PROMPTS[:1])
    agree(outputs, PROMPTS[:1], expected)
    assert loads == [0]
    other.connection.close()


def test_another_block_size_or_dtype_finds_nothing(loaded: LoadedModel, stack: Stack, expected: Expected) -> None:
    agree(stack.run(PROMPTS[:1])[0], PROMPTS[:1], expected)
    stack.world.store.flush()
    for size, dtype in ((8, "float32"), (4, "bfloat16"), (16, "float16")):
        layout = replace(loaded.model.layout(size), groups=loaded.config.layer_groups(dtype))
        chain = Chain(size)
        chain.extend(PROMPTS[0])
        assert stack.world.found_keys(store_keys(chain.keys, namespace_of(loaded, layout).mask())) == ()


@pytest.mark.parametrize("budget", [1, 3, 5, 7, 64])
def test_any_split_of_a_prefill_stores_every_block(
    loaded: LoadedModel, tmp_path: Path, expected: Expected, budget: int
) -> None:
    block = loaded.model.layout(SIZE).block_bytes()
    with contextlib.closing(World(tmp_path, block=block)) as world:
        stack = Stack(loaded, world, token_budget=budget)
        agree(stack.run(PROMPTS[:2])[0], PROMPTS[:2], expected)
        world.store.flush()
        assert [stack.stored(prompt) for prompt in PROMPTS[:2]] == [8, 8]
        stack.only_below()
        outputs, loads = stack.run(PROMPTS[:2])
        agree(outputs, PROMPTS[:2], expected)
        assert loads == [32, 32]
        stack.check()
        stack.connection.close()
