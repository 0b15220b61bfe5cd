"""An engine whose device pool is coded: the same tokens whatever happens to its blocks, and nothing read as raw."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from kvtier_engine import Connection, connect
from patience import came_true, turns
from tiny_model import tiny_model

from kvtier import AsyncLLM, api
from kvtier.cpu import HostTier
from kvtier.disaggregated.identity import Side
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.core import kv_layout, pool_size
from kvtier.engine.drafting import Wish
from kvtier.engine.models import LoadedModel
from kvtier.engine.rules import SchedulingRules
from kvtier.engine.sparse import Sparse
from kvtier.errors import ConfigError, FormatMismatch, RequestError
from kvtier.gpu import DevicePool
from kvtier.gpu.coded import CodedAttention
from kvtier.gpu.storage import size_pool, stored_layout
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.nvme import NvmeOptions, NvmeTier
from kvtier.store import StoreOptions, TieredStore
from kvtier.store.lookup import present

Outputs: TypeAlias = dict[str, tuple[int, ...]]

BLOCK = 4
CODED = ["int8", "fp8", "int4r"]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = {f"r{number}": [(11 * at + 29 * number) % 200 + 1 for at in range(9 + 2 * number)] for number in range(6)}
PROMPT = [(7 * at) % 200 + 1 for at in range(41)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def options(kv_format: Any, **changes: Any) -> EngineOptions:
    return EngineOptions(**({"block_size": BLOCK, "num_blocks": 64, "kv_format": kv_format} | changes))


def outputs_of(engine: Engine) -> list[RequestOutput]:
    """The last output of each sequence."""
    last: dict[tuple[str, int], RequestOutput] = {}
    for _ in turns():
        if not (engine.has_work or engine.busy):
            return list(last.values())
        last |= {(output.id, output.index): output for output in engine.step()}
    raise AssertionError(f"no progress: {engine.stats()}")


def run(engine: Engine, prompts: dict[str, list[int]]) -> Outputs:
    for name, prompt in prompts.items():
        engine.add(name, prompt, PARAMS)
    return {output.id: output.token_ids for output in outputs_of(engine)}


@pytest.fixture(scope="module", params=CODED)
def kv_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(loaded: LoadedModel, kv_format: Any) -> Outputs:
    return {name: run(Engine(loaded, options(kv_format)), {name: prompt})[name] for name, prompt in PROMPTS.items()}


@contextlib.contextmanager
def stack(loaded: LoadedModel, *tiers: Any, **changes: Any) -> Iterator[Engine]:
    """An engine over host and what is below; all blocks are free again in the end."""
    chosen = options(**changes)
    store = TieredStore(HostTier(1 << 20), list(tiers), options=StoreOptions())
    connection: Connection = connect(store, loaded, kv_layout(loaded, chosen), 64, recompute_gate=False)
    engine = Engine(loaded, chosen, (connection.scheduler, connection.worker))
    with contextlib.closing(store), contextlib.closing(connection):
        yield engine
        assert engine.stats().free_blocks == engine.stats().num_blocks
        assert engine.stats().hook_errors == 0
        store.flush()


# ---- what happens to blocks changes no token


def test_blocks_are_coded(loaded: LoadedModel, kv_format: Any) -> None:
    engine = Engine(loaded, options(kv_format))
    pool = engine._runner._pool
    assert type(engine._runner._attention) is CodedAttention
    assert pool.as_bytes().shape == (64, kv_layout(loaded, engine.options).block_bytes())
    assert pool.as_bytes().shape[1] < loaded.model.layout(BLOCK).block_bytes() / 2


@pytest.mark.parametrize("budget", [8, 512])
def test_requests_say_together_what_they_say_alone(
    loaded: LoadedModel, kv_format: Any, undisturbed: Outputs, budget: int
) -> None:
    assert run(Engine(loaded, options(kv_format, token_budget=budget)), PROMPTS) == undisturbed


def test_a_prefix_on_the_device_is_found(loaded: LoadedModel, kv_format: Any, undisturbed: Outputs) -> None:
    engine = Engine(loaded, options(kv_format))
    assert run(engine, PROMPTS) == undisturbed
    assert engine.stats().device_hit_tokens == 0
    assert run(engine, {f"again {name}": prompt for name, prompt in PROMPTS.items()}) == {
        f"again {name}": tokens for name, tokens in undisturbed.items()
    }
    assert engine.stats().device_hit_tokens == sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS.values())


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_who_lost_its_blocks_goes_on(
    loaded: LoadedModel, kv_format: Any, undisturbed: Outputs, preemption: Any, *, pipelined: bool
) -> None:
    rules = SchedulingRules(preemption=preemption, pipelined=pipelined)
    with stack(loaded, kv_format=kv_format, num_blocks=20, max_running=4, scheduling=rules) as engine:
        assert run(engine, PROMPTS) == undisturbed
        assert engine.stats().preemptions > 0
        assert (engine.stats().swaps > 0) == (preemption == "swap")


@pytest.mark.parametrize("overlapped", [False, True])
def test_blocks_come_back_after_a_restart(
    loaded: LoadedModel, kv_format: Any, undisturbed: Outputs, tmp_path: Path, *, overlapped: bool
) -> None:
    rules = SchedulingRules(overlap_loads=overlapped)
    for restarted in (False, True):
        below = NvmeTier(tmp_path, 1 << 24, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0))
        with stack(loaded, below, kv_format=kv_format, scheduling=rules) as engine:
            for name, prompt in PROMPTS.items():
                assert run(engine, {name: prompt}) == {name: undisturbed[name]}
            prompts = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS.values())
            assert engine.stats().loaded_tokens == (prompts if restarted else 0)


@pytest.mark.parametrize("windows", [(6, 6), (None, 6)])
def test_layers_with_a_window_say_the_same_whatever_happens(
    kv_format: Any, windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    model = tiny_model(windows)
    alone = {name: run(Engine(model, options(kv_format)), {name: prompt})[name] for name, prompt in PROMPTS.items()}
    assert run(Engine(model, options(kv_format, token_budget=8)), PROMPTS) == alone
    for preemption in ("recompute", "swap"):
        rules = SchedulingRules(preemption=preemption, watermark=0.0)
        with stack(
            model, kv_format=kv_format, num_blocks=13, max_running=6, token_budget=8, scheduling=rules
        ) as engine:
            assert run(engine, PROMPTS) == alone
            # Where all layers have a window, a sequence holds no more blocks in the end than at first.
            assert (engine.stats().preemptions > 0) == (None in windows)
    for restarted in (False, True):
        below = NvmeTier(tmp_path, 1 << 24, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0))
        with stack(model, below, kv_format=kv_format) as engine:
            assert run(engine, PROMPTS) == alone
            assert (engine.stats().loaded_tokens > 0) == restarted


def test_forks_copy_the_block_that_they_write(loaded: LoadedModel, kv_format: Any, undisturbed: Outputs) -> None:
    for name, prompt in PROMPTS.items():
        engine = Engine(loaded, options(kv_format))
        engine.add(name, prompt, replace(PARAMS, n=3))
        said = {output.index: output.token_ids for output in outputs_of(engine)}
        assert said == dict.fromkeys(range(3), undisturbed[name])


def test_beams_are_the_same_however_they_are_computed(loaded: LoadedModel, kv_format: Any) -> None:
    found = []
    for budget in (8, 512):
        engine = Engine(loaded, options(kv_format, token_budget=budget))
        engine.add("r", PROMPTS["r5"], SamplingParams(max_tokens=12, beam_width=3, n=3, ignore_eos=True))
        found.append({output.index: output.token_ids for output in outputs_of(engine)})
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 3


def test_guessed_tokens_change_nothing(loaded: LoadedModel, kv_format: Any) -> None:
    circle = {"r": [5, 6, 7, 8] * 8}
    plain = run(Engine(loaded, options(kv_format)), circle)
    engine = Engine(loaded, options(kv_format), proposer=_Said(plain["r"]))
    assert run(engine, circle) == plain
    assert 0 < engine.stats().accepted_tokens < engine.stats().draft_tokens


class _Said:
    """Guesses what is known to come, and then a wrong token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        return [self._guess(wish) for wish in wishes]

    def _guess(self, wish: Wish) -> tuple[int, ...]:
        done = wish.request.num_tokens - wish.request.prompt_len
        return (*self._tokens[done : done + wish.length - 1], 1)[: wish.length]

    def forget(self, request_id: str) -> None:
        """Knows nothing of single requests."""


# ---- nothing is read as what it is not


@pytest.mark.parametrize(("first", "second"), [("raw", "int8"), ("int8", "raw"), ("int8", "fp8"), ("int8", "int8r")])
def test_blocks_of_another_kv_format_are_not_found(
    loaded: LoadedModel, tmp_path: Path, first: Any, second: Any
) -> None:
    found = []
    for kv_format in (first, second, first):
        below = NvmeTier(tmp_path, 1 << 24, NvmeOptions(segment_bytes=1 << 20, min_free_bytes=0))
        with stack(loaded, below, kv_format=kv_format) as engine:
            run(engine, {"r": PROMPT})
            found.append(engine.stats().loaded_tokens)
    assert found == [0, 0, 40]


def test_engines_that_share_a_directory_name_coded_blocks_as_such(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_load", lambda config: loaded)
    tiering = {"nvme": {"path": str(tmp_path), "capacity": "1MiB", "segment_size": "1MiB", "min_free": 0}}
    sides = []
    for kv_format in ("raw", "int8"):
        with contextlib.closing(AsyncLLM(tiering=tiering, num_blocks=64, block_size=BLOCK, kv_format=kv_format)) as llm:
            side = Side.of(llm)
            assert asyncio.run(answered(llm)).metrics.loaded_tokens == 0
            assert came_true(lambda side=side: all(present(side.directory, side.keys(PROMPT), 5.0, exact=True)))
            sides.append(side)
    assert sides[0].identity.layout != sides[1].identity.layout
    assert not {*sides[0].keys(PROMPT)} & {*sides[1].keys(PROMPT)}


async def answered(llm: AsyncLLM) -> RequestOutput:
    return [output async for output in llm.generate(PROMPT, PARAMS)][-1]


def test_a_connection_for_raw_blocks_moves_no_coded_ones(loaded: LoadedModel) -> None:
    """A wrong layout given to `connect` costs the tiers, and no token."""
    expected = run(Engine(loaded, options("int8")), {"r": PROMPT})
    with contextlib.closing(TieredStore(HostTier(1 << 20))) as store:
        connection = connect(store, loaded, loaded.model.layout(BLOCK), 64, recompute_gate=False)
        with contextlib.closing(connection):
            engine = Engine(loaded, options("int8"), (connection.scheduler, connection.worker))
            for _ in range(2):
                assert run(engine, {"r": PROMPT}) == expected
                engine.clear_device_cache()
            assert engine.stats().loaded_tokens == 0


# ---- refused, before anything is made


def test_what_cannot_be_coded_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="kv_format='int8' is not for this model"):
        pool_size(loaded, options("int8", block_size=12))
    with pytest.raises(ConfigError, match="expected one of raw, int8, int8r, fp8, int4r"):
        options("int3")


def test_latents_are_refused() -> None:
    latents = Layout(16, (LayerGroup(GroupKind.MLA, (0,), 1, 1, 16, rope_dim=8),))
    with pytest.raises(FormatMismatch, match="one GQA layer group"):
        stored_layout(latents, "int8")


def test_sparse_attention_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(RequestError, match="coded pool"):
        Engine(loaded, options("int8")).add("r", PROMPT, SamplingParams(sparse=Sparse("h2o")))


def test_a_format_of_a_tier_is_not_for_coded_blocks(loaded: LoadedModel) -> None:
    chosen = options("int8")
    with (
        contextlib.closing(
            TieredStore(HostTier(1 << 20), options=StoreOptions(accept_lossy=True, formats={"host": "int8"}))
        ) as store,
        pytest.raises(ConfigError, match="cannot take the device's blocks"),
    ):
        connect(store, loaded, kv_layout(loaded, chosen), 64)


# ---- sizes


@pytest.mark.parametrize(("coding", "times"), [("int8", 1.93), ("int8r", 1.93), ("fp8", 1.93), ("int4r", 3.55)])
def test_the_same_memory_holds_more_blocks(coding: str, times: float) -> None:
    raw = Layout(16, (LayerGroup(GroupKind.GQA, tuple(range(4)), 2, 2, 64, dtype="bfloat16"),))
    plain, coded = (size_pool(layout, 1 << 24).blocks for layout in (raw, stored_layout(raw, coding)))
    assert times <= coded / plain < times + 0.02
    pool = DevicePool(raw, coded, "cpu", coding)
    assert pool.as_bytes().numel() <= 1 << 24
