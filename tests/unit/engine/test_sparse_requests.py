"""Sparse requests in the engine: what they compute stays theirs."""

from dataclasses import replace

import pytest
import torch
from tiny_model import tiny_model

from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.drafting import PromptLookup
from kvtier.engine.models import LoadedModel
from kvtier.engine.sparse import Sparse
from kvtier.errors import RequestError

PROMPT = [(7 * at) % 200 + 1 for at in range(61)]
DENSE = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


def sparse(kind: str, share: float) -> SamplingParams:
    return SamplingParams(max_tokens=30, ignore_eos=True, sparse=Sparse(kind, share))  # type: ignore[arg-type]


def engine_of(loaded: LoadedModel, **options: int) -> Engine:
    return Engine(loaded, EngineOptions(**{"block_size": 4, "num_blocks": 128} | options), proposer=PromptLookup())


def run(engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, RequestOutput]:
    for name, (prompt, params) in requests.items():
        engine.add(name, prompt, params)
    outputs = {}
    while engine.has_work:
        outputs |= {output.id: output for output in engine.step()}
    assert engine.stats().free_blocks == engine.stats().num_blocks
    return outputs


@pytest.mark.parametrize("kind", ["streaming", "h2o", "quest"])
def test_all_blocks_give_the_plain_output(loaded: LoadedModel, kind: str) -> None:
    plain = run(engine_of(loaded), {"r": (PROMPT, DENSE)})["r"]
    assert run(engine_of(loaded), {"r": (PROMPT, sparse(kind, 1.0))})["r"].token_ids == plain.token_ids


@pytest.mark.parametrize("kind", ["streaming", "h2o", "quest"])
@pytest.mark.parametrize("blocks", [32, 128])
def test_nobody_else_notices(loaded: LoadedModel, kind: str, blocks: int) -> None:
    plain = run(engine_of(loaded), {"r": (PROMPT, DENSE)})["r"].token_ids
    engine = engine_of(loaded, num_blocks=blocks)
    first = run(engine, {"s": (PROMPT, sparse(kind, 0.1)), "r": (PROMPT, DENSE)})
    assert first["s"].token_ids != plain
    assert first["r"].token_ids == plain
    # A later request over the whole sparse conversation finds the prompt's blocks, none of the output's.
    grown = PROMPT + list(first["s"].token_ids)
    before = engine.stats().device_hit_tokens
    after = run(engine, {"t": (grown, DENSE)})["t"].token_ids
    assert engine.stats().device_hit_tokens - before <= len(PROMPT) // 4 * 4
    assert after == run(engine_of(loaded), {"t": (grown, DENSE)})["t"].token_ids


def test_nothing_is_guessed_for_them(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    run(engine, {"s": ([1, 2, 3, 4] * 12, sparse("quest", 0.3))})
    assert engine.stats().draft_tokens == 0


def test_their_state_goes_with_them(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    run(engine, {str(number): (PROMPT[number:], sparse("quest", 0.3)) for number in range(4)})
    assert engine._runner._sparse is not None
    assert not engine._runner._sparse._choices


def test_something_else_is_refused() -> None:
    with pytest.raises(RequestError, match="sparse='quest'"):
        SamplingParams(sparse="quest")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["streaming", "h2o", "quest"])
def test_a_fork_knows_what_its_parent_knows(loaded: LoadedModel, kind: str) -> None:
    prompt = [(7 * at) % 200 + 1 for at in range(120)]
    params = replace(DENSE, max_tokens=40, sparse=Sparse(kind, 0.1, sink=1, recent=1))  # type: ignore[arg-type]
    alone = run(engine_of(loaded), {"r": (prompt, params)})["r"].token_ids
    engine, found = engine_of(loaded), {}
    engine.add("r", prompt, replace(params, n=3))
    while engine.has_work:
        found |= {output.index: output.token_ids for output in engine.step()}
    assert found == dict.fromkeys(range(3), alone)
    assert engine._runner._sparse is not None
    assert not engine._runner._sparse._choices


def test_a_beam_that_forks_knows_it_too(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    engine.add("r", PROMPT, replace(sparse("h2o", 0.1), max_tokens=12, beam_width=4, n=4))
    forked = []
    fork = engine._runner.fork

    def watch(parent: str, child: str) -> None:
        fork(parent, child)
        choices = engine._runner._sparse._choices  # type: ignore[union-attr]
        forked.append(torch.equal(choices[parent]._mass, choices[child]._mass))  # type: ignore[attr-defined]

    engine._runner.fork = watch  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    assert forked
    assert all(forked)
