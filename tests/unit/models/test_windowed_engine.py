"""Models with a sliding window in all layers: the tokens of transformers, from the blocks of the window alone."""

import pytest
import torch
from family_reference import CASES
from windowed_runs import GREEDY, MOST, PROMPTS, SIZE, WINDOW, Windowed, agree, amid_aborts, run

from kvtier.engine import RequestOutput, SamplingParams
from kvtier.engine.rules import SchedulingRules
from kvtier.engine.sparse import Sparse
from kvtier.errors import RequestError


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    return Windowed(tmp_path_factory.mktemp("mistral"), CASES["mistral-window"])


def test_a_sequence_holds_its_window_alone(windowed: Windowed) -> None:
    engine = windowed.engine(64)
    prompt = PROMPTS["3"]
    engine.add("r", prompt, GREEDY)
    held, outputs = 0, {}
    while engine.has_work:
        outputs |= {output.id: output for output in engine.step()}
        held = max(held, 64 - engine.stats().free_blocks)
    agree(windowed, outputs, {"r": prompt})
    assert held <= MOST
    # 224 tokens of context fit into a pool of 11 blocks, 44 tokens.
    small = windowed.engine(MOST)
    agree(windowed, run(small, {"r": prompt}), {"r": prompt})


@pytest.mark.parametrize("pipelined", [False, True])
def test_batches_in_a_pool_of_their_windows(windowed: Windowed, pipelined: bool) -> None:
    engine = windowed.engine(3 * MOST, SchedulingRules(pipelined=pipelined))
    agree(windowed, run(engine, PROMPTS), PROMPTS)
    assert engine.stats().kv_waste_total < 0.35


def test_preempted_and_computed_again(windowed: Windowed) -> None:
    engine = windowed.engine(14, SchedulingRules(watermark=0.0))
    prompts = {name: prompt[:7] for name, prompt in PROMPTS.items()}
    agree(windowed, run(engine, prompts), prompts)
    assert engine.stats().preemptions


def test_a_cached_prefix_needs_its_last_window_alone(windowed: Windowed) -> None:
    engine = windowed.engine(40)
    prompt = PROMPTS["0"]
    agree(windowed, run(engine, {"first": prompt}), {"first": prompt})
    # Others push the oldest blocks out: the beginning of the prompt is gone from the device.
    run(engine, {"other": PROMPTS["5"][:40]}, SamplingParams(max_tokens=1, ignore_eos=True))
    pool, request = engine._blocks, [*prompt, *windowed.expected(prompt)[:-1], 5, 6]
    outputs = run(engine, {"longer": request})
    assert outputs["longer"].metrics.cached_tokens >= len(prompt) - SIZE
    assert list(outputs["longer"].token_ids) == windowed.expected(request)
    assert pool.cached_blocks < len(request) // SIZE


def test_forks_and_beams_share_the_window(windowed: Windowed) -> None:
    engine = windowed.engine(96)
    engine.add("n", PROMPTS["0"], SamplingParams(max_tokens=12, n=3, temperature=0.0, ignore_eos=True))
    sequences: dict[int, RequestOutput] = {}
    while engine.has_work:
        sequences |= {output.index: output for output in engine.step()}
    assert [list(sequences[at].token_ids) for at in range(3)] == [windowed.expected(PROMPTS["0"], 12)] * 3
    beams = SamplingParams(max_tokens=6, beam_width=2, n=2, ignore_eos=True)
    found = []
    for blocks in (96, 2 * MOST):
        searching = windowed.engine(blocks)
        searching.add("beams", PROMPTS["2"], beams)
        found.append({})
        while searching.has_work:
            found[-1] |= {output.index: output.token_ids for output in searching.step()}
    assert found[0] == found[1]
    with torch.inference_mode():
        out = windowed.reference.generate(
            torch.tensor([PROMPTS["2"]]), attention_mask=torch.ones(1, 71, dtype=torch.long), max_new_tokens=6,
            num_beams=2, do_sample=False, eos_token_id=None,
            pad_token_id=0, use_cache=False,
        )  # fmt: skip
    assert list(found[0][0]) == out[0, len(PROMPTS["2"]) :].tolist()


def test_only_the_window_is_loaded(windowed: Windowed) -> None:
    prompt = PROMPTS["3"]
    with windowed.tiered(32) as (engine, store):
        agree(windowed, run(engine, {"first": prompt}), {"first": prompt})
        engine.clear_device_cache()
        before = store.metrics.value("loaded_bytes_total", tier="host")
        outputs = run(engine, {"again": prompt})
        agree(windowed, outputs, {"again": prompt})
        assert outputs["again"].metrics.loaded_tokens == (len(prompt) - 1) // SIZE * SIZE
        moved = store.metrics.value("loaded_bytes_total", tier="host") - before
        assert moved == -(-(WINDOW - 1) // SIZE) * windowed.model.model.layout(SIZE).block_bytes()


def test_a_window_that_fails_to_load_is_computed(windowed: Windowed, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = PROMPTS["3"]
    with windowed.tiered(32) as (engine, _):
        run(engine, {"first": prompt})
        engine.clear_device_cache()
        hook = engine._hook
        assert hook is not None
        completed, failures = hook._hook.completed, []

        def some(results):  # type: ignore[no-untyped-def]
            done = completed(results)
            failures.extend(done.loaded)
            return type(done)(dict.fromkeys(done.loaded, (160, True)), frozenset(done.loaded), done.released)

        monkeypatch.setattr(hook._hook, "completed", some)
        outputs = run(engine, {"again": prompt})
        assert failures == ["again"]
        agree(windowed, outputs, {"again": prompt})
        assert outputs["again"].metrics.computed_tokens == len(prompt)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_swapped_amid_aborts(windowed: Windowed, preemption: str) -> None:
    rules = SchedulingRules(preemption=preemption, watermark=0.0)  # type: ignore[arg-type]
    with windowed.tiered(MOST + 8, rules) as (engine, _):
        amid_aborts(windowed, engine, preemption)


def test_sparse_requests_are_refused_before_anything_changes(windowed: Windowed) -> None:
    engine = windowed.engine(32)
    with pytest.raises(RequestError, match="sparse='quest': not with this model"):
        engine.add("r", PROMPTS["0"], SamplingParams(sparse=Sparse("quest")))
    assert not engine.has_work
    agree(windowed, run(engine, {"r": PROMPTS["2"]}), {"r": PROMPTS["2"]})


def test_a_pool_that_holds_no_window_refuses_what_outgrows_it(windowed: Windowed) -> None:
    engine = windowed.engine(5)
    assert engine.max_model_len == 20
    with pytest.raises(RequestError, match="context of 20"):
        engine.add("long", PROMPTS["0"], GREEDY)
    assert windowed.engine(MOST).max_model_len == windowed.model.config.max_positions
