"""Models of which some layers have a sliding window and some have none: the tokens of transformers, in every mode.

The layers without a window keep all blocks of a sequence, the others those of the window.
"""

from pathlib import Path

import pytest
import torch
from family_reference import Case
from tiny_model import tiny_tokenizer
from windowed_runs import BUDGET, GREEDY, MOST, PROMPTS, SIZE, TOKENS, WINDOW, Windowed, agree, amid_aborts, run

from kvtier import LLM
from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.core import pool_size
from kvtier.engine.draft_model import DraftModel
from kvtier.engine.drafting import PromptLookup
from kvtier.engine.rules import SchedulingRules
from kvtier.engine.sparse import Sparse
from kvtier.errors import CapacityError, ConfigError, FormatMismatch, RequestError
from kvtier.gpu.mixed import MixedBlockPool
from kvtier.gpu.storage import DevicePool, PoolSize, make_pool, size_pool
from kvtier.layout import Layout

SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
MIXED = {
    # The last layer has a window; the first and the last one have.
    "qwen2": Case("qwen2", SLIDING | {"max_window_layers": 2}),
    "qwen3": Case(
        "qwen3",
        SLIDING | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Windowed]:
    return {name: Windowed(tmp_path_factory.mktemp(name), case) for name, case in MIXED.items()}


@pytest.fixture
def mixed(models: dict[str, Windowed]) -> Windowed:
    return models["qwen3"]


def books(engine: Engine) -> MixedBlockPool:
    pool = engine._blocks
    assert isinstance(pool, MixedBlockPool)
    return pool


def ended(engine: Engine) -> None:
    books(engine).check()
    assert books(engine).used_slots == 0


@pytest.mark.parametrize("name", MIXED)
def test_a_sequence_holds_all_blocks_and_a_window_of_the_windowed_ones(models: dict[str, Windowed], name: str) -> None:
    model, prompt = models[name], PROMPTS["3"]
    engine = model.engine(64)
    engine.add("r", prompt, GREEDY)
    slots = blocks = 0
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.id: output for output in engine.step()}
        slots, blocks = max(slots, books(engine).used_slots), max(blocks, books(engine).used_blocks)
    agree(model, outputs, {"r": prompt})
    assert slots <= MOST
    assert blocks == (len(prompt) + TOKENS - 1) // SIZE + 1
    ended(engine)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("pipelined", [False, True])
def test_batches(models: dict[str, Windowed], name: str, pipelined: bool) -> None:
    engine = models[name].engine(120, SchedulingRules(pipelined=pipelined))
    agree(models[name], run(engine, PROMPTS), PROMPTS)
    ended(engine)


@pytest.mark.parametrize("blocks", [58, 70])
def test_preempted_and_computed_again(mixed: Windowed, blocks: int) -> None:
    engine = mixed.engine(blocks, SchedulingRules(watermark=0.0))
    agree(mixed, run(engine, PROMPTS), PROMPTS)
    assert engine.stats().preemptions
    ended(engine)


def test_a_prefix_is_found_as_far_as_both_groups_have_it(mixed: Windowed) -> None:
    # One sequence at a time, so that windowed blocks are few.
    engine = mixed.engine(200, running=1)
    prompt, pool = PROMPTS["0"], books(engine)
    agree(mixed, run(engine, {"first": prompt}), {"first": prompt})
    outputs = run(engine, {"again": prompt})
    assert outputs["again"].metrics.cached_tokens == (len(prompt) - 1) // SIZE * SIZE
    agree(mixed, outputs, {"again": prompt})
    # Others take the windowed parts; the blocks themselves are all there.
    cached = pool.cached_blocks
    run(engine, {"other": PROMPTS["3"]}, SamplingParams(max_tokens=1, ignore_eos=True))
    assert pool.cached_blocks == cached + len(PROMPTS["3"]) // SIZE
    outputs = run(engine, {"back": prompt})
    assert outputs["back"].metrics.cached_tokens < len(prompt) // 2
    agree(mixed, outputs, {"back": prompt})
    outputs = run(engine, {"there": prompt})
    assert outputs["there"].metrics.cached_tokens == (len(prompt) - 1) // SIZE * SIZE
    agree(mixed, outputs, {"there": prompt})
    ended(engine)


@pytest.mark.parametrize("name", MIXED)
def test_forks_and_beams(models: dict[str, Windowed], name: str) -> None:
    model = models[name]
    engine = model.engine(150)
    engine.add("n", PROMPTS["0"], SamplingParams(max_tokens=12, n=3, temperature=0.0, ignore_eos=True))
    sequences: dict[int, RequestOutput] = {}
    while engine.has_work:
        sequences |= {output.index: output for output in engine.step()}
    assert [list(sequences[at].token_ids) for at in range(3)] == [model.expected(PROMPTS["0"], 12)] * 3
    ended(engine)
    with torch.inference_mode():
        out = model.reference.generate(
            torch.tensor([PROMPTS["2"]]), attention_mask=torch.ones(1, 71, dtype=torch.long), max_new_tokens=6,
            num_beams=3, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=False,
        )  # fmt: skip
    # In the smaller pool beams give way to each other, and go on from what is left of their prefix.
    for blocks in (150, 24):
        searching, best = model.engine(blocks), []
        searching.add("beams", PROMPTS["2"], SamplingParams(max_tokens=6, beam_width=3, n=1, ignore_eos=True))
        while searching.has_work:
            best = [output.token_ids for output in searching.step() if output.index == 0] or best
        assert list(best[-1]) == out[0, len(PROMPTS["2"]) :].tolist()
        ended(searching)


@pytest.mark.parametrize("guesser", ["lookup", "model"])
def test_guessed_tokens(mixed: Windowed, guesser: str) -> None:
    # A draft that agrees, of a mixed model too, and one that hardly ever does.
    draft = DraftModel(mixed.model.model, 1 << 20, SIZE, 64) if guesser == "model" else PromptLookup()
    engine = mixed.engine(120, proposer=draft)
    repeated = {name: (prompt[:20] * 8)[: len(prompt)] for name, prompt in PROMPTS.items()}
    for prompts in (PROMPTS, repeated):
        agree(mixed, run(engine, prompts), prompts)
    stats = engine.stats()
    assert stats.draft_tokens > 5
    assert stats.accepted_tokens or guesser == "lookup"
    ended(engine)


# ---- other tiers


def test_all_blocks_are_loaded_and_a_window_of_the_windowed_parts(mixed: Windowed) -> None:
    prompt, layout = PROMPTS["3"], mixed.model.model.layout(SIZE)
    with mixed.tiered(80) as (engine, store):
        agree(mixed, run(engine, {"first": prompt}), {"first": prompt})
        engine.clear_device_cache()
        outputs = run(engine, {"again": prompt})
        agree(mixed, outputs, {"again": prompt})
        blocks = (len(prompt) - 1) // SIZE
        assert outputs["again"].metrics.loaded_tokens == blocks * SIZE
        window = -(-(WINDOW - 1) // SIZE)
        moved = store.metrics.value("loaded_bytes_total", tier="host")
        assert moved == blocks * layout.block_bytes(0) + window * layout.block_bytes(1)
        ended(engine)


def test_what_is_beyond_the_device_is_loaded(mixed: Windowed) -> None:
    prompt = PROMPTS["3"]
    with mixed.tiered(80) as (engine, _):
        run(engine, {"first": prompt})
        engine.clear_device_cache()
        run(engine, {"start": prompt[:61]}, SamplingParams(max_tokens=1, ignore_eos=True))
        outputs = run(engine, {"again": prompt})
        agree(mixed, outputs, {"again": prompt})
        metrics = outputs["again"].metrics
        assert (metrics.cached_tokens, metrics.loaded_tokens) == (60, 136)
        ended(engine)


@pytest.mark.parametrize("good", [0, 120, 160])
def test_what_fails_to_load_is_computed(mixed: Windowed, monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    prompt = PROMPTS["3"]
    with mixed.tiered(80) as (engine, _):
        run(engine, {"first": prompt})
        engine.clear_device_cache()
        hook = engine._hook
        assert hook is not None
        completed, failures = hook._hook.completed, []

        def some(results):  # type: ignore[no-untyped-def]
            done = completed(results)
            failures.extend(done.loaded)
            return type(done)(dict.fromkeys(done.loaded, (good, True)), frozenset(done.loaded), done.released)

        monkeypatch.setattr(hook._hook, "completed", some)
        outputs = run(engine, {"again": prompt})
        assert failures == ["again"]
        agree(mixed, outputs, {"again": prompt})
        ended(engine)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_swapped_amid_aborts(mixed: Windowed, preemption: str) -> None:
    rules = SchedulingRules(preemption=preemption, watermark=0.0)  # type: ignore[arg-type]
    with mixed.tiered(66, rules) as (engine, _):
        amid_aborts(mixed, engine, preemption)
        ended(engine)


@pytest.mark.parametrize("fmt", ["raw", "bitsplit"])
def test_identical_from_host_and_from_nvme_after_a_restart(
    models: dict[str, Windowed], tmp_path: Path, fmt: str
) -> None:
    model = models["qwen2"]
    tiny_tokenizer().backend.save(str(model.directory / "tokenizer.json"))
    prompts = list(PROMPTS.values())
    wanted = [model.expected(prompt) for prompt in prompts]
    tiers = {
        "host": {"capacity": "16MiB"},
        "nvme": {"path": str(tmp_path / "nvme"), "capacity": "64MiB", "min_free": "0", "format": fmt},
        "recompute_gate": False,
    }
    for source in ("computed", "nvme"):
        settings = {"model": {"dtype": "float32"}}
        with LLM(model.directory, tiering=tiers, config=settings, num_blocks=256, block_size=SIZE) as llm:
            outputs = llm.generate(prompts, GREEDY)
            assert [list(output.token_ids) for output in outputs] == wanted
            if source == "nvme":
                loaded = [output.metrics.loaded_tokens for output in outputs]
                assert loaded == [(len(prompt) - 1) // SIZE * SIZE for prompt in prompts]
                assert llm.loaded_bytes()["nvme"] > 0
            llm.flush()


def test_exclusive_copies_are_refused(models: dict[str, Windowed]) -> None:
    model = models["qwen3"]
    tiny_tokenizer().backend.save(str(model.directory / "tokenizer.json"))
    tiers = {"host": {"capacity": "16MiB", "copies": "exclusive"}}
    with pytest.raises(ConfigError, match="choose copies = 'inclusive'"):
        LLM(model.directory, tiering=tiers, num_blocks=64, block_size=SIZE)


# ---- sizes


def test_memory_is_split_so_that_neither_group_waits_for_the_other(mixed: Windowed) -> None:
    layout = mixed.model.model.layout(SIZE)
    own, windowed = layout.block_bytes(0), layout.block_bytes(1)
    assert windowed == 2 * own
    options = EngineOptions(block_size=SIZE, memory_bytes=400 * (own + windowed), max_running=4, token_budget=BUDGET)
    size, context = pool_size(mixed.model, options)
    # Twice the windows of all that run, and the rest for the others: 2.7 times the context that 400 whole blocks hold.
    assert size.windowed == 2 * (4 * 6 + BUDGET // SIZE)
    assert size.blocks == 400 + 2 * (400 - size.windowed - 1)
    assert size.blocks * own + (size.windowed + 1) * windowed <= options.memory_bytes  # type: ignore[operator]
    assert context == mixed.model.config.max_positions
    # Where that is little, both have as many.
    assert size_pool(layout, 20 * (own + windowed) + windowed, 4, BUDGET) == PoolSize(20, 20)
    assert size_pool(layout, 20 * (own + windowed) + windowed) == PoolSize(20, 20)
    with pytest.raises(CapacityError, match=f"one block of {SIZE} tokens takes {own + windowed}"):
        size_pool(layout, own + windowed)
    engine = Engine(mixed.model, options)
    assert [len(memory.tensor) for memory in engine._runner._pool.memories] == [size.blocks, size.windowed + 1]


def test_a_context_as_long_as_the_blocks(mixed: Windowed) -> None:
    assert mixed.engine(50).max_model_len == 50 * SIZE
    with pytest.raises(ConfigError, match="choose at most 200"):
        Engine(mixed.model, EngineOptions(block_size=SIZE, num_blocks=50, max_model_len=201))
    engine = mixed.engine(56)
    agree(mixed, run(engine, {"r": PROMPTS["3"]}), {"r": PROMPTS["3"]})


def test_sparse_requests_are_refused_before_anything_changes(mixed: Windowed) -> None:
    engine = mixed.engine(64)
    with pytest.raises(RequestError, match="sparse='quest': not with this model"):
        engine.add("r", PROMPTS["0"], SamplingParams(sparse=Sparse("quest")))
    assert not engine.has_work


def test_other_groups_are_refused(mixed: Windowed) -> None:
    layout = mixed.model.model.layout(SIZE)
    for groups in (layout.groups[::-1], layout.groups[:1] * 2, layout.groups[1:] * 2):
        with pytest.raises(FormatMismatch, match="expected one without a window"):
            make_pool(Layout(SIZE, groups), PoolSize(8, 8), "cpu")
    with pytest.raises(FormatMismatch, match="2 layer groups: a device pool takes one"):
        DevicePool(layout, 8, "cpu")


def test_logits_are_those_of_transformers(mixed: Windowed) -> None:
    """The model itself, over the paged memory of both groups, chunk by chunk."""
    model, prompt = mixed.model.model, PROMPTS["0"]
    with torch.inference_mode():
        wanted = mixed.reference(torch.tensor([prompt]), use_cache=False).logits[0].float()
    engine = mixed.engine(64)
    taken: list[torch.Tensor] = []
    forward = model.forward

    def whole(ids: torch.Tensor, positions: torch.Tensor, attention: object, rows: torch.Tensor) -> torch.Tensor:
        logits = forward(ids, positions, attention, torch.arange(len(ids)))  # type: ignore[arg-type]
        taken.append(logits)
        return logits[rows]

    engine._runner._model = type("Whole", (), {"forward": staticmethod(whole), "device": model.device})()  # type: ignore[assignment]
    run(engine, {"r": prompt}, SamplingParams(max_tokens=1, ignore_eos=True))
    torch.testing.assert_close(torch.cat(taken), wanted, atol=2e-4, rtol=1e-4)
