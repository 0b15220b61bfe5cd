"""Guessing tokens ahead: never another output, and only where it pays."""

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from tiny_model import TinyModel, tiny_model

from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams, core
from kvtier.engine.draft_model import DraftModel, check_vocabulary
from kvtier.engine.drafting import PromptLookup, Proposer, Wish
from kvtier.engine.models import LoadedModel
from kvtier.engine.request import Request
from kvtier.engine.speculation import PayMeter, Speculation
from kvtier.errors import ConfigError

PROMPTS = [[(7 * at + 3 * number) % 200 + 1 for at in range(length)] for number, length in enumerate((1, 4, 9, 30, 41))]
CIRCLE = [1, 2, 3, 4, 5] * 6


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


class Oracle:
    """Guesses from the known output, now and then wrongly. Implements `Proposer`."""

    def __init__(self, outputs: dict[str, tuple[int, ...]], wrong_at: int = 0) -> None:
        self.outputs = outputs
        self.wrong_at = wrong_at
        self.forgotten: list[str] = []

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        return [self._proposed(wish) for wish in wishes]

    def _proposed(self, wish: Wish) -> tuple[int, ...]:
        first = wish.request.num_output
        guess = list(self.outputs[wish.request.id][first : first + wish.length])
        if self.wrong_at and len(guess) >= self.wrong_at:
            guess[self.wrong_at - 1] = (guess[self.wrong_at - 1] + 1) % 200
        return tuple(guess)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def always(speculation: Speculation) -> None:
    speculation._meter.pays = lambda requests: True  # type: ignore[method-assign]


def engine_of(loaded: LoadedModel, proposer: Proposer | None = None, **options: int) -> Engine:
    engine = Engine(loaded, EngineOptions(**{"block_size": 4, "num_blocks": 128} | options), proposer=proposer)
    if engine._speculation is not None:
        always(engine._speculation)
    return engine


def run(engine: Engine, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> dict[str, RequestOutput]:
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params)
    outputs = {}
    while engine.has_work:
        outputs |= {output.id: output for output in engine.step()}
    assert engine.stats().free_blocks == engine.stats().num_blocks
    return outputs


DRAWN = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
EVERY = [
    GREEDY,
    DRAWN,
    SamplingParams(max_tokens=24, temperature=0.7, min_tokens=5, seed=1, logprobs=2),
    SamplingParams(max_tokens=24, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=24, logit_bias={9: 3.0}, ignore_eos=True),
]


@pytest.mark.parametrize("params", EVERY)
@pytest.mark.parametrize("wrong_at", [0, 1, 3])
@pytest.mark.parametrize(("blocks", "budget"), [(128, 64), (22, 7)])
def test_the_output_is_the_one_without_guesses(
    loaded: LoadedModel, params: SamplingParams, wrong_at: int, blocks: int, budget: int
) -> None:
    plain = run(engine_of(loaded), params)
    oracle = Oracle({name: output.token_ids for name, output in plain.items()}, wrong_at)
    engine = engine_of(loaded, oracle, num_blocks=blocks, token_budget=budget)
    guessed = run(engine, params)
    for name, output in guessed.items():
        assert (output.token_ids, output.text, output.finish_reason) == (
            plain[name].token_ids, plain[name].text, plain[name].finish_reason,
        )  # fmt: skip
        assert [score.token for score in output.logprobs or ()] == [score.token for score in plain[name].logprobs or ()]
    assert sorted(set(oracle.forgotten)) == sorted(plain)
    if params.repetition_penalty != 1:
        assert engine.stats().draft_tokens == 0
    elif not wrong_at and blocks == 128:
        assert engine.stats().accepted_tokens == engine.stats().draft_tokens > 0
        assert engine.stats().steps < 24


def test_an_end_among_accepted_guesses_ends_the_output(loaded: LoadedModel) -> None:
    plain = run(engine_of(loaded), GREEDY)
    for name, output in plain.items():
        stop = output.token_ids[6]
        length = output.token_ids.index(stop) + 1
        params = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=frozenset({stop}))
        engine = engine_of(loaded, Oracle({"0": output.token_ids}))
        found = run(engine, params, [PROMPTS[int(name)]])["0"]
        assert found.token_ids == output.token_ids[:length]
        assert found.finish_reason == "stop"
        assert found.metrics.output_tokens == length


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_guesses_end_where_the_output_must(loaded: LoadedModel, most: int) -> None:
    plain = run(engine_of(loaded), GREEDY)
    engine = engine_of(loaded, Oracle({name: output.token_ids for name, output in plain.items()}))
    for name, output in run(engine, SamplingParams(max_tokens=most, ignore_eos=True)).items():
        assert output.token_ids == plain[name].token_ids[:most]
        assert output.finish_reason == "length"


def test_requests_may_opt_out(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, PromptLookup())
    run(engine, SamplingParams(max_tokens=24, ignore_eos=True, speculate=False), [CIRCLE])
    assert engine.stats().draft_tokens == 0


# ---- prompt lookup


def wish(tokens: list[int], length: int, name: str = "r") -> Wish:
    return Wish(Request(name, tokens, SamplingParams(), 0, block_size=4, limit=1000), length)


def test_lookup_finds_what_followed_the_latest_tokens() -> None:
    lookup = PromptLookup()
    assert lookup.propose([wish([9, 8, 1, 2, 3, 7, 6, 5, 1, 2], 3)]) == [(3, 7, 6)]
    assert lookup.propose([wish([9, 8, 1, 2, 3], 3, "other")]) == [()]
    assert lookup.propose([wish(CIRCLE, 12, "circle")]) == [tuple(([1, 2, 3, 4, 5] * 3)[:12])]


def test_the_longest_context_decides_and_then_the_latest() -> None:
    tokens = [5, 1, 2, 3, 40, 0, 9, 2, 3, 50, 0, 5, 1, 2, 3]
    assert PromptLookup().propose([wish(tokens, 1)]) == [(40,)]
    assert PromptLookup().propose([wish([1, 2, 30, 0, 1, 2, 40, 0, 1, 2], 1)]) == [(40,)]


def test_lookup_follows_a_growing_sequence() -> None:
    lookup, asked = PromptLookup(), wish([1, 2, 3, 4], 2)
    assert lookup.propose([asked]) == [()]
    for token, expected in ((1, ()), (2, (3, 4)), (3, (4, 1)), (9, ())):
        asked.request.append([token], 0.0)
        assert lookup.propose([asked]) == [expected]
    lookup.forget("r")
    lookup.forget("nobody")


def test_lookup_against_a_search_by_hand() -> None:
    dice = Random(0)
    found = 0
    for number in range(300):
        lookup, tokens = PromptLookup(), [dice.randrange(4) for _ in range(dice.randint(1, 12))]
        asked = wish(tokens, 1, str(number))
        for _ in range(20):
            tokens = list(asked.request.tokens)
            ends = [
                end
                for size in (4, 3, 2)
                for end in reversed(range(size, len(tokens)))
                if tokens[end - size : end] == tokens[-size:]
            ]
            assert lookup.propose([asked]) == [(tokens[ends[0]],) if ends else ()]
            found += bool(ends)
            asked.request.append([dice.randrange(4) for _ in range(dice.randint(1, 3))], 0.0)
    assert found > 3000


def test_lookup_holds_a_few_bytes_a_token() -> None:
    asked = wish(list(range(50_000)), 1)
    tracemalloc.start()
    try:
        lookup = PromptLookup()
        lookup.propose([asked])
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 8 * 50_000
    assert most < 16 * 50_000


def test_a_text_that_repeats_is_lookups_own_ground(loaded: LoadedModel) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={42: 100.0})
    plain = run(engine_of(loaded), params, [CIRCLE])
    engine = engine_of(loaded, PromptLookup())
    assert run(engine, params, [CIRCLE])["0"].token_ids == plain["0"].token_ids
    assert engine.stats().accepted_tokens == engine.stats().draft_tokens > 40
    assert engine.stats().steps < 20


# ---- draft model


def draft_of(loaded: LoadedModel, **settings: int) -> DraftModel:
    sizes = {"memory_bytes": 1 << 20, "block_size": 4, "token_budget": 64} | settings
    return DraftModel(loaded.model, **sizes)


def test_a_draft_model_that_agrees_is_always_right(loaded: LoadedModel) -> None:
    for params in (GREEDY, DRAWN):
        plain = run(engine_of(loaded), params)
        engine = engine_of(loaded, draft_of(loaded))
        guessed = run(engine, params)
        assert {name: output.token_ids for name, output in guessed.items()} == {
            name: output.token_ids for name, output in plain.items()
        }
        assert engine.stats().accepted_tokens == engine.stats().draft_tokens > 50


@pytest.mark.parametrize("windows", [(None, 6), (6, 6), ()])
def test_sequences_fork_from_a_prompt_whose_last_token_is_a_step_of_its_own(windows: tuple[int | None, ...]) -> None:
    """With guesses that are right, the first sequence would leave behind what the others attend to."""
    model = tiny_model(windows)
    params, prompt = SamplingParams(max_tokens=12, ignore_eos=True, n=3), PROMPTS[4][:16]
    for proposer in (None, draft_of(model)):
        engine = engine_of(model, proposer, token_budget=5)
        engine.add("r", prompt, params)
        outputs = {}
        while engine.has_work:
            outputs |= {output.index: output.token_ids for output in engine.step()}
        assert len(set(outputs.values())) == 1
    assert engine.stats().accepted_tokens > 0


def test_a_draft_model_that_errs_costs_nothing_but_time(loaded: LoadedModel) -> None:
    other = TinyModel(loaded.config)
    other.head = loaded.model.head + 0.8 * torch.randn(  # type: ignore[attr-defined]
        loaded.model.head.shape, generator=torch.Generator().manual_seed(2)  # type: ignore[attr-defined]
    )  # fmt: skip
    draft = DraftModel(other, 1 << 20, 4, 16)
    for params in (GREEDY, DRAWN):
        plain = run(engine_of(loaded), params)
        engine = engine_of(loaded, draft)
        guessed = run(engine, params)
        assert {name: output.token_ids for name, output in guessed.items()} == {
            name: output.token_ids for name, output in plain.items()
        }
        stats = engine.stats()
        assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert draft._pool.blocks.free_blocks == draft._pool.blocks.num_blocks


def test_a_draft_model_without_room_makes_no_guesses(loaded: LoadedModel) -> None:
    block = loaded.model.layout(4).block_bytes()
    engine = engine_of(loaded, draft_of(loaded, memory_bytes=3 * block))
    run(engine, GREEDY, [PROMPTS[3]])
    assert engine.stats().draft_tokens == 0


def test_a_draft_model_of_nonsense_costs_one_request_its_guesses(loaded: LoadedModel) -> None:
    """Its logits are no numbers wherever a certain token is read; the large one's are."""
    other = TinyModel(loaded.config)
    other.embedding[PROMPTS[2][0]] = float("nan")
    plain = run(engine_of(loaded), GREEDY)
    engine = engine_of(loaded, DraftModel(other, 1 << 20, 4, 64))
    for name, output in run(engine, GREEDY).items():
        assert output.token_ids == plain[name].token_ids
        assert (output.metrics.draft_tokens == 0) == (PROMPTS[2][0] in (PROMPTS[int(name)] + list(output.token_ids)))
    assert engine.stats().draft_errors > 0


def test_a_proposer_that_raises_costs_guesses_alone(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(PromptLookup):
        def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
            raise RuntimeError("out of memory")

    plain = run(engine_of(loaded), GREEDY)
    engine = engine_of(loaded, Broken())
    assert {name: output.token_ids for name, output in run(engine, GREEDY).items()} == {
        name: output.token_ids for name, output in plain.items()
    }
    # Everybody's together, then each one's, and then no more for 64 steps.
    assert len(PROMPTS) < engine.stats().draft_errors <= 2 * len(PROMPTS)
    assert 0 < len(caplog.records) < engine.stats().draft_errors


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="300 tokens"):
        check_vocabulary(200, 300)


# ---- the distribution


class Fixed:
    """Guesses one token for ever."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        return [(self.token,) for _ in wishes]

    def forget(self, request_id: str) -> None:
        pass


def likeliest(loaded: LoadedModel, prompt: list[int], top: int) -> dict[int, float]:
    """By the model's own logits: the token that follows, by its probability among the `top` likeliest; best first."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=top)
    scores = run(engine_of(loaded), params, [prompt])["0"].logprobs
    assert scores is not None
    shares = torch.softmax(torch.tensor([logprob for _, logprob in scores[0].top]).double(), 0).tolist()
    return dict(zip((token for token, _ in scores[0].top), shares, strict=True))


def test_drawn_tokens_keep_their_distribution(loaded: LoadedModel) -> None:
    """Of the second token, behind the likeliest first one: it is the first that a guess may stand for."""
    first = next(iter(likeliest(loaded, CIRCLE, 4)))
    expected = likeliest(loaded, [*CIRCLE, first], 4)
    engine = engine_of(loaded, Fixed(next(iter(expected))), max_running=64, num_blocks=1000, token_budget=2048)
    for number in range(600):
        params = SamplingParams(max_tokens=4, temperature=1.0, top_k=4, ignore_eos=True, seed=number)
        engine.add(str(number), CIRCLE, params)
    found: Counter[int] = Counter()
    while engine.has_work:
        ended = [output.token_ids for output in engine.step() if output.finish_reason]
        found.update(tokens[1] for tokens in ended if tokens[0] == first)
    assert 0 < engine.stats().accepted_tokens < engine.stats().draft_tokens
    assert set(found) <= set(expected)
    wanted = {token: share * found.total() for token, share in expected.items()}
    statistic = sum((found[token] - count) ** 2 / count for token, count in wanted.items())
    assert statistic < 16.3  # three degrees of freedom: by chance once in a thousand


# ---- whether it pays


def test_a_request_that_guesses_badly_is_left_alone_for_longer_and_longer() -> None:
    request = wish([1, 2, 3], 1).request
    request.max_tokens = 500
    speculation = Speculation(PromptLookup(), 8)
    asked = []
    for step in range(60):
        wanted = speculation._wish(request)
        if wanted is not None:
            asked.append(step)
            speculation.learn([(request, wanted.length, 1)], 0.01, decodes_only=True)
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps == [2, 3, 5, 9, 17]


def test_a_request_that_guesses_well_gets_more() -> None:
    request = wish([1, 2, 3], 1).request
    request.max_tokens = 500
    speculation = Speculation(PromptLookup(), 8)
    lengths = []
    for accepted in (2, 4, 8, 3, 4):
        wanted = speculation._wish(request)
        assert wanted is not None
        lengths.append(wanted.length)
        speculation.learn([(request, wanted.length, accepted + 1)], 0.01, decodes_only=True)
    assert lengths == [2, 4, 8, 8, 4]


@pytest.mark.parametrize(("cost", "pays"), [(1.5, True), (3.0, False)])
def test_the_meter_finds_what_pays(cost: float, pays: bool) -> None:
    """Drafts bring two tokens a step in place of one, and make it longer."""
    meter = PayMeter()
    choices = []
    for _ in range(1000):
        drafted = meter.pays(4)
        choices.append(drafted)
        meter.learn(4, 8 if drafted else 4, cost if drafted else 1.0, drafted=drafted)
    assert choices[10:].count(pays) >= 0.98 * len(choices[10:])
    assert not all(choice == pays for choice in choices[10:])


class Clock:
    """Stands for `time` in the engine: a forward takes a second, and half a second for each token of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: TinyModel) -> None:
        self.now, self._forward = 0.0, model.forward
        monkeypatch.setattr(core, "time", self)
        monkeypatch.setattr(model, "forward", self._takes_time)

    def _takes_time(self, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.now += 1.0 + 0.5 * len(tokens)
        return self._forward(tokens, *rest)

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("wrong_at", "pays"), [(0, True), (1, False)])
def test_an_engine_guesses_on_only_where_it_pays(
    loaded: LoadedModel, wrong_at: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(engine_of(loaded), GREEDY, [CIRCLE])["0"].token_ids
    assert isinstance(loaded.model, TinyModel)
    Clock(monkeypatch, loaded.model)
    names = [str(number) for number in range(20)]
    oracle = Oracle(dict.fromkeys(names, plain), wrong_at)
    drafted = []
    for metered in (True, False):
        engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=128), proposer=oracle)
        assert engine._speculation is not None
        if not metered:
            always(engine._speculation)
        for name in names:  # one after the other: each new one has had no bad luck yet
            engine.add(name, CIRCLE, GREEDY)
            while engine.has_work:
                last = engine.step()
            assert last[0].token_ids == plain
        drafted.append(engine.stats().draft_tokens)
    assert drafted[1] > 150
    assert drafted[0] > 0.8 * drafted[1] if pays else drafted[0] < 0.1 * drafted[1]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_is_guessed_than_is_allowed(loaded: LoadedModel, most: int) -> None:
    plain = run(engine_of(loaded), GREEDY, [CIRCLE])
    oracle, asked = Oracle({name: output.token_ids for name, output in plain.items()}), []
    propose = oracle.propose

    def watch(wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
        asked.extend(wish.length for wish in wishes)
        return propose(wishes)

    oracle.propose = watch  # type: ignore[method-assign]
    engine = engine_of(loaded, oracle, draft_tokens=most)
    assert run(engine, GREEDY, [CIRCLE])["0"].token_ids == plain["0"].token_ids
    assert max(asked) == most
