import asyncio
import time
from collections.abc import Iterator

import pytest
from tiny_model import TinyModel, tiny_model

from kvtier.engine import AsyncEngine, Engine, EngineOptions, RequestOutput, SamplingParams, async_engine
from kvtier.engine.models import LoadedModel
from kvtier.engine.outputs import Sampled
from kvtier.engine.plan import StepPlan
from kvtier.engine.rules import SchedulingRules
from kvtier.errors import KVTierError, ModelError, RequestError
from kvtier.hints import RequestHints
from kvtier.keys import Chain, salted

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny_model(), EngineOptions(block_size=4, num_blocks=128, max_running=4))


@pytest.fixture
def served(engine: Engine) -> Iterator[AsyncEngine]:
    served = AsyncEngine(engine)
    yield served
    served.close()


async def collect(served: AsyncEngine, prompt: list[int], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return [output async for output in served.generate(prompt, params)]


async def at_rest(engine: Engine) -> None:
    while engine.has_work:
        await asyncio.sleep(0.001)
    assert engine.stats().free_blocks == 128


def test_many_callers_get_what_the_engine_alone_says(engine: Engine, served: AsyncEngine) -> None:
    prompts = [[number + 1] * (number + 1) for number in range(10)]
    reference = Engine(tiny_model(), EngineOptions(block_size=4, num_blocks=128))
    for number, prompt in enumerate(prompts):
        reference.add(str(number), prompt, GREEDY)
    expected = {}
    while reference.has_work:
        expected |= {output.id: output.token_ids for output in reference.step()}

    async def scenario() -> None:
        streams = await asyncio.gather(*(collect(served, prompt) for prompt in prompts))
        for number, outputs in enumerate(streams):
            assert outputs[-1].token_ids == expected[str(number)]
            assert "".join(output.delta for output in outputs) == outputs[-1].text
            assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        await at_rest(engine)

    asyncio.run(scenario())


def test_hints_reach_the_engine(engine: Engine, served: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    hints, add, seen = RequestHints(priority=3.0), engine.add, []

    def listen(*arguments: object) -> None:
        seen.append(arguments[3])
        add(*arguments)

    monkeypatch.setattr(engine, "add", listen)

    async def scenario() -> None:
        assert [output async for output in served.generate([1, 2], GREEDY, hints)]
        with pytest.raises(RequestError, match="expected RequestHints"):
            assert [output async for output in served.generate([1, 2], GREEDY, "soon")]
        await at_rest(engine)

    asyncio.run(scenario())
    assert seen == [hints, "soon"]


def test_a_consumer_that_goes_away_aborts_its_request(engine: Engine, served: AsyncEngine) -> None:
    async def scenario() -> None:
        stream = served.generate([1, 2, 3], LONG)
        async for _ in stream:
            break
        await stream.aclose()
        started = asyncio.Event()

        async def consume() -> None:
            async for _ in served.generate([4, 5], LONG):
                started.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await at_rest(engine)
        assert len((await collect(served, [6]))[-1].token_ids) == 12

    asyncio.run(scenario())


def test_a_refused_request_raises_in_its_caller_alone(served: AsyncEngine) -> None:
    async def scenario() -> None:
        good, empty, unknown = await asyncio.gather(
            collect(served, [1]), collect(served, []), collect(served, [9999]), return_exceptions=True
        )
        assert good[-1].finish_reason == "length"
        assert isinstance(empty, RequestError)
        assert isinstance(unknown, RequestError)

    asyncio.run(scenario())


def test_a_failure_reaches_every_consumer_and_the_engine_serves_on(served: AsyncEngine, engine: Engine) -> None:
    model = engine._runner._model
    assert isinstance(model, TinyModel)

    async def scenario() -> None:
        model.fails = True
        results = await asyncio.gather(*(collect(served, [at + 1]) for at in range(6)), return_exceptions=True)
        model.fails = False
        assert all(isinstance(result, KVTierError) and "out of memory" in str(result) for result in results)
        assert all(isinstance(result.__cause__, RuntimeError) for result in results)
        await at_rest(engine)
        assert len((await collect(served, [1]))[-1].token_ids) == 12

    asyncio.run(scenario())


def test_close_ends_what_runs_and_refuses_what_comes(served: AsyncEngine) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(collect(served, [1, 2], LONG))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(served.close)
        assert (await task)[-1].finish_reason in ("abort", "length")
        with pytest.raises(KVTierError, match="closed"):
            await collect(served, [1])

    asyncio.run(scenario())
    served.close()
    assert not served._thread.is_alive()


def test_a_slow_consumer_gets_everything_in_fewer_pieces(served: AsyncEngine) -> None:
    async def scenario() -> list[RequestOutput]:
        outputs = []
        async for output in served.generate([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True)):
            outputs.append(output)  # it is slow
            await asyncio.sleep(0.05)
        return outputs

    outputs = asyncio.run(scenario())
    assert "".join(output.delta for output in outputs) == outputs[-1].text
    assert len(outputs[-1].token_ids) == 40
    assert len(outputs) < 40


def test_the_first_sequence_comes_first_however_slow_the_consumer(served: AsyncEngine) -> None:
    """It alone brings the prompt's log-probabilities, which belong before whatever the others say."""
    drawn = {"temperature": 1.0, "seed": 9, "stop_token_ids": frozenset(range(50))}
    params = SamplingParams(max_tokens=40, n=3, prompt_logprobs=0, **drawn)  # type: ignore[arg-type]

    async def scenario() -> list[RequestOutput]:
        task = asyncio.create_task(collect(served, [5, 6, 7], params))
        await asyncio.sleep(0)
        time.sleep(0.3)  # the loop has other things to do
        return await task

    outputs = asyncio.run(scenario())
    lengths = [len(output.token_ids) for output in outputs if output.finish_reason]
    assert len(outputs) < sum(lengths)
    assert outputs[0].index == 0
    assert lengths[0] > min(lengths)  # others were through while it went on
    assert outputs[0].prompt_logprobs is not None


POISON = 251


def poisoned() -> LoadedModel:
    """A model whose logits are no numbers wherever a certain token is read."""
    loaded = tiny_model()
    loaded.model.embedding[POISON] = float("nan")  # type: ignore[attr-defined]
    return loaded


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("kind", [{}, {"n": 2, "temperature": 1.0}, {"beam_width": 3}])
def test_a_request_of_nonsense_costs_itself_alone(pipelined: bool, kind: dict[str, float]) -> None:
    rules = SchedulingRules(pipelined=pipelined)
    engine = Engine(poisoned(), EngineOptions(block_size=4, num_blocks=128, max_running=8, scheduling=rules))
    served = AsyncEngine(engine)
    bad = SamplingParams(max_tokens=4, ignore_eos=True, **kind)  # type: ignore[arg-type]

    async def scenario() -> None:
        expected = (await collect(served, [1, 2, 3]))[-1].token_ids
        good = asyncio.create_task(collect(served, [1, 2, 3], LONG))
        for _ in range(3):
            with pytest.raises(KVTierError, match="not finite") as caught:
                await collect(served, [POISON] * 9, bad)
            assert isinstance(caught.value.__cause__, ModelError)
        outputs = await good
        assert len(outputs[-1].token_ids) == 200
        assert outputs[-1].token_ids[:12] == expected
        assert "".join(output.delta for output in outputs) == outputs[-1].text
        await at_rest(engine)

    try:
        asyncio.run(scenario())
    finally:
        served.close()
    chain = Chain(4, salted(None))
    chain.extend([POISON] * 9)
    assert engine._blocks.leading(chain.keys, exact=False) == 0  # what it computed has no name


def test_a_step_that_fails_costs_nobody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_model(), EngineOptions(block_size=4, num_blocks=128, max_running=1))
    compute, failures = engine._runner.compute, iter([RuntimeError("out of memory")])

    def fails_once(plan: StepPlan) -> list[Sampled]:
        for error in failures:
            raise error
        return compute(plan)

    monkeypatch.setattr(engine._runner, "compute", fails_once)
    served = AsyncEngine(engine)

    async def scenario() -> None:
        results = await asyncio.gather(*(collect(served, [at + 1]) for at in range(4)), return_exceptions=True)
        assert sum(isinstance(result, KVTierError) for result in results) == 1
        assert sum(isinstance(result, list) and len(result[-1].token_ids) == 12 for result in results) == 3

    try:
        asyncio.run(scenario())
    finally:
        served.close()


def test_an_engine_that_fails_for_ever_tells_everybody(
    served: AsyncEngine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails() -> list[RequestOutput]:
        calls.append(1)
        raise RuntimeError("torn")

    monkeypatch.setattr(engine, "step", fails)
    monkeypatch.setattr(async_engine, "_RETRY_SECONDS", 0.001)

    async def scenario() -> None:
        results = await asyncio.gather(*(collect(served, [at + 1]) for at in range(3)), return_exceptions=True)
        assert all(isinstance(result, KVTierError) and "torn" in str(result) for result in results)

    asyncio.run(scenario())
    assert len(calls) >= async_engine._MOST_FRUITLESS


def test_whatever_adding_a_request_raises_is_its_own(
    served: AsyncEngine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = engine.add

    def picky(request_id: str, prompt: list[int], *rest: object) -> None:
        if prompt == [7]:
            raise ZeroDivisionError("seven")
        add(request_id, prompt, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "add", picky)

    async def scenario() -> None:
        good, bad = await asyncio.gather(collect(served, [1], LONG), collect(served, [7]), return_exceptions=True)
        assert isinstance(bad, KVTierError)
        assert isinstance(good, list)
        assert good[-1].finish_reason == "length"

    asyncio.run(scenario())
