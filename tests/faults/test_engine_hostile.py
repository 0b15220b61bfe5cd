"""Requests that try to hurt others: right outputs for everybody else, no block lost, an end for each that waits."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from kvtier_engine import connect
from tiny_model import TinyModel, tiny_model

from kvtier.cpu import HostTier
from kvtier.engine import AsyncEngine, Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.draft_model import DraftModel
from kvtier.engine.drafting import PromptLookup, Proposer
from kvtier.engine.models import LoadedModel
from kvtier.engine.models.base import DenseAttention
from kvtier.engine.plan import StepPlan
from kvtier.engine.rules import SchedulingRules
from kvtier.engine.runner import Runner
from kvtier.engine.sparse import Sparse
from kvtier.errors import RequestError
from kvtier.gpu import BlockCopy, DevicePool
from kvtier.hooks import Completed, Match, RequestView, Step, TransferPlan, TransferResults
from kvtier.store import TieredStore

BLOCK = 4
PROMPT = [(7 * at) % 200 + 1 for at in range(60)]
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def engine_of(
    loaded: LoadedModel, *, proposer: Proposer | None = None, rules: SchedulingRules | None = None, **options: int
) -> Engine:
    sizes = {"block_size": BLOCK, "num_blocks": 128} | options
    return Engine(loaded, EngineOptions(**sizes, scheduling=rules or SchedulingRules()), proposer=proposer)


def finish(engine: Engine, limit: int = 5000) -> dict[tuple[str, int], RequestOutput]:
    outputs: dict[tuple[str, int], RequestOutput] = {}
    for _ in range(limit):
        if not (engine.has_work or engine.busy):
            break
        outputs |= {(output.id, output.index): output for output in engine.step()}
    else:
        raise AssertionError(f"no end in sight: {engine.stats()}")
    engine._blocks.check()
    assert engine.stats().free_blocks == engine.stats().num_blocks
    return outputs


def dense(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy by the definition: the whole sequence anew for every token, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        ids = torch.tensor(tokens)
        logits = loaded.model.forward(ids, torch.arange(len(ids)), DenseAttention(), torch.tensor([len(ids) - 1]))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


# ---- ids


@pytest.mark.parametrize("params", [SamplingParams(n=2, max_tokens=9), SamplingParams(beam_width=2, max_tokens=9)])
def test_an_id_that_looks_like_another_requests_sequence_is_refused(
    loaded: LoadedModel, params: SamplingParams
) -> None:
    engine = engine_of(loaded)
    engine.add("r", PROMPT, params)
    with pytest.raises(RequestError, match="'r#1': '#'"):
        engine.add("r#1", PROMPT[::-1], GREEDY)
    finish(engine)


def test_an_id_stays_in_use_until_the_last_sequence_has_ended(loaded: LoadedModel) -> None:
    drawn = {"n": 2, "max_tokens": 9, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    engine = engine_of(loaded)
    engine.add("r", PROMPT, SamplingParams(**drawn))  # type: ignore[arg-type]
    second = finish(engine)["r", 0].token_ids[1]
    engine.add("s", PROMPT, SamplingParams(**drawn, stop_token_ids=frozenset({second})))  # type: ignore[arg-type]
    outputs: list[RequestOutput] = []
    while not any(output.finish_reason for output in outputs):
        outputs = engine.step()
    assert engine.has_work
    with pytest.raises(RequestError, match="'s' is in use"):
        engine.add("s", PROMPT[::-1], GREEDY)
    finish(engine)
    engine.add("t", PROMPT[::-1], GREEDY)
    assert list(finish(engine)["t", 0].token_ids) == dense(loaded, PROMPT[::-1], 6)


# ---- params that no arithmetic survives


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e300),
        ("temperature", 10**400),
        ("repetition_penalty", 1e-300),
        ("presence_penalty", -1e300),
        ("frequency_penalty", 1e308),
        ("length_penalty", 1000.0),
        ("length_penalty", -1000.0),
        ("ttft_target", 1e308),
        ("tpot_target", 1e308),
        ("top_p", 10**400),
    ],
)
def test_numbers_that_would_overflow_are_refused(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{name}="):
        SamplingParams(**{name: value})


EXTREMES = {
    "hot": SamplingParams(max_tokens=6, temperature=1e30, min_tokens=5, seed=1),
    "cold": SamplingParams(max_tokens=6, temperature=1e-300, min_tokens=5, seed=1, top_p=1e-300),
    "rare": SamplingParams(max_tokens=6, repetition_penalty=0.01, ignore_eos=True),
    "fond": SamplingParams(max_tokens=6, presence_penalty=-100.0, frequency_penalty=-100.0, ignore_eos=True),
    "long": SamplingParams(max_tokens=30, beam_width=3, n=3, length_penalty=10.0, ignore_eos=True),
    "short": SamplingParams(max_tokens=30, beam_width=3, n=3, length_penalty=-10.0, ignore_eos=True),
    "late": SamplingParams(max_tokens=30, tpot_target=86_400.0, ttft_target=1e-300, ignore_eos=True),
    "ending": SamplingParams(max_tokens=6, stop_token_ids=frozenset(range(257))),
    "many": SamplingParams(max_tokens=2, n=64, temperature=1.0, top_k=10**30, seed=2**64 - 1),
    "wide": SamplingParams(max_tokens=2, beam_width=200, n=200, ignore_eos=True),
    "biased": SamplingParams(max_tokens=6, logit_bias=dict.fromkeys(range(257), -100.0), logprobs=300, min_p=1.0),
    "classy": SamplingParams(max_tokens=6, priority=-(2**64) + 1, ignore_eos=True),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_that_are_allowed_hurt_nobody(loaded: LoadedModel, name: str) -> None:
    engine = engine_of(loaded, num_blocks=64, rules=SchedulingRules(order="priority"))
    engine.add("bystander", PROMPT[::-1], GREEDY)
    engine.add(name, PROMPT[:20], EXTREMES[name])
    outputs = finish(engine)
    assert list(outputs["bystander", 0].token_ids) == dense(loaded, PROMPT[::-1], 6)
    assert sum(key[0] == name and output.finish_reason is not None for key, output in outputs.items()) == (
        EXTREMES[name].n
    )


def test_min_tokens_where_every_token_is_an_end_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        engine_of(loaded).add(
            "r", PROMPT, SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=frozenset(range(257)))
        )


# ---- beams


def test_what_beam_search_does_not_report_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs=1 with beam_width=2"):
        SamplingParams(beam_width=2, prompt_logprobs=1)


def test_beams_are_not_guessed_for(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, proposer=PromptLookup())
    engine.add("b", [1, 2, 3, 4] * 6, SamplingParams(beam_width=3, max_tokens=10, ignore_eos=True))
    finish(engine)
    assert (engine.stats().draft_tokens, engine.stats().accepted_tokens) == (0, 0)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_an_aborted_search_ends_as_many_outputs_as_were_asked_for(loaded: LoadedModel, steps: int) -> None:
    engine = engine_of(loaded)
    engine.add("b", PROMPT, SamplingParams(beam_width=4, n=3, max_tokens=50, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    outputs = engine.abort("b")
    assert [(output.index, output.finish_reason) for output in outputs] == [(at, "abort") for at in range(3)]
    assert engine.stats().free_blocks == engine.stats().num_blocks


def test_closing_the_engine_ends_the_stream_of_a_search(loaded: LoadedModel) -> None:
    """Before the search has as many beams as outputs were asked for."""

    async def closed() -> list[RequestOutput]:
        serving = AsyncEngine(engine_of(loaded, token_budget=1))
        params = SamplingParams(beam_width=4, n=4, max_tokens=100, ignore_eos=True)

        async def consume() -> list[RequestOutput]:
            return [output async for output in serving.generate(PROMPT * 2, params)]

        consumer = asyncio.create_task(consume())
        await asyncio.sleep(0)
        await asyncio.to_thread(serving.close)
        return await asyncio.wait_for(consumer, 10)

    assert [output.finish_reason for output in asyncio.run(closed())] == ["abort"] * 4


@pytest.fixture
def swapping(loaded: LoadedModel) -> Iterator[Engine]:
    rules = SchedulingRules(preemption="swap", watermark=0.0, residency=0)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(TieredStore(HostTier(1 << 20))))
        connection = connect(store, loaded, loaded.model.layout(BLOCK), 16, recompute_gate=False)
        stack.enter_context(contextlib.closing(connection))
        options = EngineOptions(block_size=BLOCK, num_blocks=22, max_running=8, token_budget=16, scheduling=rules)
        yield Engine(loaded, options, (connection.scheduler, connection.worker))


def test_a_beam_that_was_swapped_out_may_come_to_nothing(loaded: LoadedModel, swapping: Engine) -> None:
    params = SamplingParams(beam_width=4, n=4, max_tokens=20, ignore_eos=True)
    plain = engine_of(loaded)
    for number in range(3):
        for engine in (plain, swapping):
            engine.add(f"b{number}", PROMPT[number : number + 21], params)
    expected, outputs = finish(plain), finish(swapping)
    assert swapping._scheduler.counters.swaps > 0
    assert {key: output.token_ids for key, output in outputs.items()} == {
        key: output.token_ids for key, output in expected.items()
    }


@pytest.mark.parametrize(("width", "blocks", "length"), [(4, 8, 5), (6, 8, 5), (8, 7, 1), (8, 9, 9)])
def test_a_search_on_hardly_more_blocks_than_one_beam_ends(
    loaded: LoadedModel, width: int, blocks: int, length: int
) -> None:
    """Its paused beams hold all blocks together, most of them shared: they give way to those that must catch up."""
    params = SamplingParams(beam_width=width, n=width, max_tokens=24, ignore_eos=True)
    plain, tight = engine_of(loaded), engine_of(loaded, num_blocks=blocks)
    for engine in (plain, tight):
        engine.add("b", PROMPT[:length], params)
    expected, outputs = finish(plain), finish(tight)
    assert {key: output.token_ids for key, output in outputs.items()} == {
        key: output.token_ids for key, output in expected.items()
    }


# ---- a draft model whose guesses were not computed


def test_guesses_that_found_no_place_in_a_step_are_made_again(loaded: LoadedModel) -> None:
    """More requests guess than the step has tokens: what was not computed is all still to be said."""
    draft = DraftModel(loaded.model, 1 << 20, BLOCK, 64)
    engine = engine_of(loaded, proposer=draft, token_budget=3, draft_tokens=8)
    prompts = [PROMPT[number : number + 9] for number in range(5)]
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    outputs = finish(engine)
    assert engine.stats().accepted_tokens > 0
    for number, prompt in enumerate(prompts):
        assert list(outputs[str(number), 0].token_ids) == dense(loaded, prompt, 20)


# ---- sparse requests


@pytest.mark.parametrize("budget", [1, 2, 7, 59, 64])
@pytest.mark.parametrize("kind", ["streaming", "h2o", "quest"])
def test_a_sparse_requests_prompt_is_exact_however_it_is_cut(loaded: LoadedModel, kind: str, budget: int) -> None:
    """A chunk of one token is still a part of the prompt, whose blocks are published as exact."""
    engine = engine_of(loaded, token_budget=budget)
    sparse = SamplingParams(max_tokens=6, ignore_eos=True, sparse=Sparse(kind, 0.1, 1, 1))  # type: ignore[arg-type]
    engine.add("sparse", PROMPT, sparse)
    assert finish(engine)["sparse", 0].token_ids[0] == dense(loaded, PROMPT, 1)[0]
    grown = [*PROMPT, 9, 9, 9, 9, 9]
    engine.add("dense", grown, GREEDY)
    output = finish(engine)["dense", 0]
    assert output.metrics.cached_tokens == len(PROMPT)
    assert list(output.token_ids) == dense(loaded, grown, 6)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_sparse_request_that_ended_leaves_nothing_behind(loaded: LoadedModel, pipelined: bool) -> None:
    """Also when the next step was planned with it already."""
    engine = engine_of(loaded, rules=SchedulingRules(pipelined=pipelined))
    first = dense(loaded, PROMPT, 4)[3]
    params = SamplingParams(
        max_tokens=40, ignore_eos=True, stop_token_ids=frozenset({first}), sparse=Sparse("quest", 1.0)
    )
    engine.add("ends", PROMPT, params)
    engine.add("stays", PROMPT[::-1], GREEDY)
    finish(engine)
    engine.add("aborted", PROMPT, params)
    for _ in range(3):
        engine.step()
    engine.abort("aborted")
    finish(engine)
    engine.add("last", PROMPT[::-1], GREEDY)
    finish(engine)
    assert engine._runner._sparse is not None
    assert not engine._runner._sparse._choices


# ---- steps that fail


class SchedulerHalf:
    """Nothing is ever stored."""

    busy = False

    def match(self, request: RequestView, device_tokens: int) -> Match:
        return Match(0)

    def allocated(self, request: RequestView, block_ids: Sequence[int], external_tokens: int) -> None: ...

    def swap_out(self, request: RequestView, block_ids: Sequence[int], num_tokens: int, **kind: bool) -> bool:
        return False

    def prefetch(self, request: RequestView) -> None: ...

    def plan(self, step: Step) -> TransferPlan:
        return TransferPlan()

    def completed(self, results: TransferResults) -> Completed:
        return Completed()

    def observe_prefill(self, tokens: int, seconds: float, attended: int = 0) -> None: ...

    def finished(self, request_id: str, reason: str) -> bool:
        return False


class Silent:
    """A worker half with nothing to move."""

    def register_pool(self, *pools: torch.Tensor) -> None: ...

    def begin(self, plan: TransferPlan) -> None: ...

    def wait_layer(self, layer: int) -> None: ...

    def end(self) -> TransferResults:
        return TransferResults()


class FailingFence(Silent):
    """It reports all that it was told of, also when it raises."""

    def __init__(self) -> None:
        self.told: dict[int, int] = {}

    def begin(self, plan: TransferPlan) -> None:
        self.told |= dict.fromkeys((*plan.loads, *plan.saves, *plan.evacuations), 0)
        if plan.fences:
            raise OSError("the device is gone")

    def end(self) -> TransferResults:
        return TransferResults(failed=self.told)


def test_jobs_that_the_worker_never_heard_of_have_failed(loaded: LoadedModel) -> None:
    """Or a request would wait for its load for ever."""
    pool = DevicePool(loaded.model.layout(BLOCK), 4, loaded.model.device)
    runner = Runner(loaded.model, pool, frozenset(), FailingFence())
    transfers = TransferPlan(loads={5: ()}, saves={6: ()}, fences=frozenset({3}), evacuations={4: ()})
    with pytest.raises(OSError, match="the device is gone"):
        runner.begin(StepPlan(Step(0, (), frozenset()), (), (), (BlockCopy(1, 2),), transfers))
    assert runner.cancel(transfers).failed == {4: 0, 5: 0, 6: 0}


class RaisesOnce(SchedulerHalf):
    """Nothing is stored; the `nth` plan is a defect."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def plan(self, step: Step) -> TransferPlan:
        self.left -= 1
        if self.left == 0:
            raise OSError("a defect")
        return TransferPlan()


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_scheduler_half_that_raises_tears_no_output(loaded: LoadedModel, nth: int) -> None:
    """A copy-on-write whose plan was lost would leave its sequence with a block of nothing."""
    options = EngineOptions(block_size=BLOCK, num_blocks=64, token_budget=16)
    engine, plain = Engine(loaded, options, (RaisesOnce(nth), Silent())), engine_of(loaded)
    drawn = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=1, ignore_eos=True)
    for one in (engine, plain):
        one.add("torn", PROMPT[:30], drawn)
    outputs, expected = finish(engine), finish(plain)
    assert {key: output.token_ids for key, output in outputs.items()} == {
        key: output.token_ids for key, output in expected.items()
    }
    assert engine.stats().hook_errors == 1


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_failing_step_takes_only_its_own_requests(loaded: LoadedModel, pipelined: bool) -> None:
    model = loaded.model
    assert isinstance(model, TinyModel)
    engine = engine_of(loaded, max_running=2, rules=SchedulingRules(pipelined=pipelined))
    prompts = {str(number): PROMPT[number : number + 20] for number in range(6)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, GREEDY)
    engine.step()
    model.fails = True
    try:
        with pytest.raises(RuntimeError, match="out of memory"):  # noqa: PT012  one of the next two
            engine.step()
            engine.step()
    finally:
        model.fails = False
    outputs = finish(engine)
    assert {key[0] for key in outputs} == {"2", "3", "4", "5"}
    for (name, _), output in outputs.items():
        assert list(output.token_ids) == dense(loaded, prompts[name], 6)
