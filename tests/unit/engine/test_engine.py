"""The engine as its users see it, on a tiny model that really attends over paged memory."""

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from tiny_model import EOS, TinyModel, tiny_model

from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.engine.models.base import DenseAttention
from kvtier.engine.plan import StepPlan
from kvtier.engine.request import Request
from kvtier.engine.runner import Runner
from kvtier.errors import CapacityError, ConfigError, RequestError
from kvtier.gpu import BlockCopy, DevicePool
from kvtier.hints import RequestHints
from kvtier.hooks import Completed, Match, Step, TransferPlan, TransferResults

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def engine_of(loaded: LoadedModel, **options: int) -> Engine:
    return Engine(loaded, EngineOptions(**{"block_size": 4, "num_blocks": 64} | options))


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_work:
        outputs |= {output.id: output for output in engine.step()}
    return outputs


def dense(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy by the definition: the whole sequence anew for every token, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        ids = torch.tensor(tokens)
        logits = loaded.model.forward(ids, torch.arange(len(ids)), DenseAttention(), torch.tensor([len(ids) - 1]))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


PROMPTS = [[(7 * at + 3 * number) % 200 + 1 for at in range(length)] for number, length in enumerate((1, 4, 9, 30, 41))]


@pytest.mark.parametrize("budget", [1, 3, 5, 7, 64])
@pytest.mark.parametrize("blocks", [16, 64])
def test_greedy_is_what_a_model_without_a_cache_says(loaded: LoadedModel, budget: int, blocks: int) -> None:
    engine = engine_of(loaded, token_budget=budget, num_blocks=blocks, max_running=3)
    for number, prompt in enumerate(PROMPTS):
        engine.add(str(number), prompt, GREEDY)
    outputs = finish(engine)
    assert [list(outputs[str(number)].token_ids) for number in range(len(PROMPTS))] == [
        dense(loaded, prompt, 12) for prompt in PROMPTS
    ]
    assert engine.stats().free_blocks == blocks


def test_output_carries_what_happened(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    for name in ("cold", "warm"):
        engine.add(name, PROMPTS[3], GREEDY)
        finish(engine)
    engine.add("again", PROMPTS[3], GREEDY)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [len(output.token_ids) for output in outputs] == list(range(1, 13))
    assert "".join(output.delta for output in outputs) == outputs[-1].text
    assert [output.finish_reason for output in outputs] == [None] * 11 + ["length"]
    last = outputs[-1]
    assert (last.prompt_tokens, last.metrics.cached_tokens, last.metrics.computed_tokens) == (30, 28, 2)
    assert last.metrics.ttft > 0
    assert last.metrics.tpot > 0
    assert math.isnan(engine.stats().kv_waste) is False
    assert outputs[0].metrics.output_tokens == 1
    assert engine.clear_device_cache() > 0
    assert engine.clear_device_cache() == 0


def test_end_of_sequence_and_stop_tokens_end_the_output_without_text(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    whole = dense(loaded, PROMPTS[2], 30)
    stop = whole[5]
    engine.add("stop", PROMPTS[2], SamplingParams(max_tokens=30, stop_token_ids=(stop,), ignore_eos=True))
    output = finish(engine)["stop"]
    ended = whole[: whole.index(stop) + 1]
    assert (list(output.token_ids), output.finish_reason) == (ended, "stop")
    assert output.text == loaded.tokenizer.decode(ended[:-1])
    # With every token an end of sequence, only `ignore_eos` gets past the first.
    engine._tokenizer = type(loaded.tokenizer)(loaded.tokenizer.backend, {}, frozenset(range(257)), None)
    engine.add("eos", PROMPTS[2], SamplingParams(max_tokens=3))
    engine.add("ignored", PROMPTS[2], SamplingParams(max_tokens=3, ignore_eos=True))
    outputs = finish(engine)
    assert (len(outputs["eos"].token_ids), outputs["eos"].finish_reason) == (1, "stop")
    assert (len(outputs["ignored"].token_ids), outputs["ignored"].finish_reason) == (3, "length")
    assert EOS in loaded.tokenizer.eos_ids


def test_the_context_ends_the_output(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, max_model_len=20)
    engine.add("r", PROMPTS[2], SamplingParams(max_tokens=None, ignore_eos=True))
    output = finish(engine)["r"]
    assert (len(output.token_ids), output.finish_reason) == (11, "length")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty prompt"),
        ([1] * 20, "prompt of 20 tokens; with a context of 20 it may have 19"),
        ([1, 257], "token id 257: expected 0..256"),
        ([-1], "token id -1"),
        (["a"], "expected a prompt of integers"),
        ([1.5], "expected a prompt of integers"),
    ],
)
def test_bad_prompts_are_refused_before_anything_changes(loaded: LoadedModel, prompt: list, message: str) -> None:
    engine = engine_of(loaded, max_model_len=20)
    with pytest.raises(RequestError, match=message):
        engine.add("r", prompt)
    assert not engine.has_work
    engine.add("r", [1])
    with pytest.raises(RequestError, match="'r' is in use"):
        engine.add("r", [1])


def test_bad_sizes_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="max_model_len=300: the model takes 256 tokens"):
        engine_of(loaded, max_model_len=300)
    with pytest.raises(ConfigError, match="device pool 16; choose at most 16"):
        engine_of(loaded, max_model_len=17, num_blocks=4)
    with pytest.raises(CapacityError):
        Engine(loaded, EngineOptions(memory_bytes=10))


def test_abort_returns_what_there_is(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    engine.add("r", PROMPTS[2], GREEDY)
    seen = [output.delta for _ in range(3) for output in engine.step()]
    (output,) = engine.abort("r")
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 3)
    assert "".join(seen) + output.delta == output.text
    assert engine.abort("r") == []
    assert not engine.has_work
    assert engine.stats().free_blocks == 64


def test_requests_without_a_seed_differ_but_the_engine_repeats_itself(loaded: LoadedModel) -> None:
    def outputs(seed: int) -> list[tuple[int, ...]]:
        engine = engine_of(loaded, seed=seed)
        for name in ("a", "b"):
            engine.add(name, PROMPTS[2], SamplingParams(max_tokens=20, temperature=2.0, ignore_eos=True))
        return [output.token_ids for output in finish(engine).values()]

    first = outputs(1)
    assert first[0] != first[1]
    assert first == outputs(1)
    assert first != outputs(2)


class Recorder:
    """Both hook halves: saves one block in every step that computes, and notes what it is told."""

    busy = False

    def __init__(self) -> None:
        self.begun: list[TransferPlan] = []
        self.results: list[TransferResults] = []
        self.layers: list[int] = []
        self.finishes: list[tuple[str, str]] = []
        self.pool: torch.Tensor | None = None
        self.prefills: list[int] = []

    def match(self, request: object, device_tokens: int) -> Match:
        return Match(0)

    def allocated(self, request: object, block_ids: object, external_tokens: int) -> None: ...

    def swap_out(self, request: object, block_ids: object, num_tokens: int, *, exact: bool, forced: bool) -> bool:
        return False

    def prefetch(self, request: object) -> None: ...

    def plan(self, step: Step) -> TransferPlan:
        return TransferPlan(saves={step.index: ()}) if step.spans else TransferPlan()

    def completed(self, results: TransferResults) -> Completed:
        self.results.append(results)
        return Completed()

    def observe_prefill(self, tokens: int, seconds: float, attended: int = 0) -> None:
        self.prefills.append(tokens)

    def finished(self, request_id: str, reason: str) -> bool:
        self.finishes.append((request_id, reason))
        return False

    def register_pool(self, pool: torch.Tensor) -> None:
        self.pool = pool

    def begin(self, plan: TransferPlan) -> None:
        self.begun.append(plan)

    def wait_layer(self, layer: int) -> None:
        self.layers.append(layer)

    def end(self) -> TransferResults:
        return TransferResults()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def failing(loaded: LoadedModel) -> Iterator[TinyModel]:
    model = loaded.model
    assert isinstance(model, TinyModel)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, model, "fails", False)
        yield model


def test_the_hook_sees_every_layer_and_the_pool(loaded: LoadedModel, recorder: Recorder) -> None:
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=8), (recorder, recorder))
    assert recorder.pool is not None
    assert recorder.pool.shape == (8, 2 * 2 * 2 * 4 * 8 * 4)
    engine.add("r", PROMPTS[2], SamplingParams(max_tokens=2, ignore_eos=True))
    finish(engine)
    assert recorder.layers == [0, 1] * 2
    assert [sorted(plan.saves) for plan in recorder.begun] == [[], [0], [], [1]]
    assert recorder.prefills == [9]
    assert recorder.finishes == [("r", "length")]


def test_blocks_are_copied_behind_fences_and_before_loads(loaded: LoadedModel) -> None:
    layout = loaded.model.layout(4)
    pool = DevicePool(layout, 4, loaded.model.device)
    rows = pool.as_bytes()
    rows[1] = 7

    class Worker(Recorder):
        def begin(self, plan: TransferPlan) -> None:
            super().begin(plan)
            if plan.fences:
                assert not rows[2].any()  # a save still reads what the copy will write
            if plan.loads:
                rows[1] = 9  # the block was given up, and a load has it now

    worker = Worker()
    runner = Runner(loaded.model, pool, frozenset(), worker)
    transfers = TransferPlan(loads={5: ()}, fences=frozenset({3}))
    runner.begin(StepPlan(Step(0, (), frozenset()), (), (), (BlockCopy(1, 2),), transfers))
    assert rows[2].eq(7).all()
    assert rows[1].eq(9).all()
    assert [(set(plan.fences), set(plan.loads)) for plan in worker.begun] == [({3}, set()), (set(), {5})]


def test_hints_and_the_opt_in_reach_the_hook(loaded: LoadedModel) -> None:
    seen: list[tuple[object, object]] = []

    class Hook(Recorder):
        def match(self, request: Request, device_tokens: int) -> Match:
            seen.append((request.hints, request.lossy))
            return Match(0)

    hook = Hook()
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=16), (hook, hook))
    hints = RequestHints(priority=2.0, session="s")
    engine.add("r", PROMPTS[2], SamplingParams(max_tokens=1, accept_lossy=True), hints)
    finish(engine)
    assert seen == [(hints, True)]
    with pytest.raises(RequestError, match="expected RequestHints"):
        engine.add("bad", PROMPTS[2], None, {"priority": 2})  # type: ignore[arg-type]


def test_a_salt_keeps_prompts_apart_and_changes_no_output(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, num_blocks=64)
    found, outputs = [], []
    for number, salt in enumerate([None, "a", "b", None, "a"]):
        engine.add(str(number), PROMPTS[3], SamplingParams(max_tokens=4, cache_salt=salt))
        output = finish(engine)[str(number)]
        found.append(output.metrics.cached_tokens > 0)
        outputs.append(output.token_ids)
    assert found == [False, False, False, True, True]
    assert len(set(map(tuple, outputs))) == 1


def test_sequences_of_one_request_and_those_of_one_batch_share_under_a_salt(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, num_blocks=64)
    salted = SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=3, cache_salt="a")
    requests = [Request(str(at), PROMPTS[3], salted, 1, block_size=4, limit=64) for at in range(2)]
    assert requests[0].chain == requests[1].chain == requests[0].sibling("other", salted, 2).chain
    assert requests[0].chain[0] != Request("p", PROMPTS[3], GREEDY, 1, block_size=4, limit=64).chain[0]
    engine.add("r", PROMPTS[3], salted)
    assert len(finish(engine)["r"].token_ids) == 4


def test_a_failed_step_saves_nothing_and_the_engine_goes_on(
    loaded: LoadedModel, recorder: Recorder, failing: TinyModel
) -> None:
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=64, max_running=1), (recorder, recorder))
    engine.add("fails", PROMPTS[2], GREEDY)
    engine.add("waits", PROMPTS[3], GREEDY)
    failing.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    failing.fails = False
    assert not any(plan.saves for plan in recorder.begun)
    assert recorder.finishes == [("fails", "error")]
    assert engine.abort("fails") == []
    output = finish(engine)["waits"]
    assert recorder.results[1].failed == {0: 0}
    assert list(output.token_ids) == dense(loaded, PROMPTS[3], 12)
    assert engine.stats().free_blocks == 64
