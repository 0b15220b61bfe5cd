"""DeepSeek through the real engine: transformers' greedy output, whatever happens around a request."""

import pytest
import torch
from deepseek_reference import KINDS
from deepseek_runs import GREEDY, TOKENS, Expected, expected
from kvtier_engine import namespace_of, prefill_shape

from kvtier.engine import Engine, EngineOptions, RequestOutput, SamplingParams
from kvtier.engine.models import LoadedModel, load_model
from kvtier.engine.models.deepseek_config import DeepseekConfig
from kvtier.engine.sparse import Sparse
from kvtier.errors import RequestError


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return expected(tmp_path_factory.mktemp("deepseek") / "model", request.param)


@pytest.fixture(scope="module")
def loaded(reference: Expected) -> LoadedModel:
    return load_model(reference.directory, torch.float32)


def engine_of(loaded: LoadedModel, **options: int) -> Engine:
    return Engine(loaded, EngineOptions(**{"block_size": 4, "num_blocks": 128} | options))


def run(engine: Engine, prompts: list[list[int]]) -> list[RequestOutput]:
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, GREEDY)
    finished: dict[str, RequestOutput] = {}
    while engine.has_work:
        finished |= {output.id: output for output in engine.step() if output.finish_reason}
    assert engine.stats().free_blocks == engine.stats().num_blocks
    return [finished[str(number)] for number in range(len(prompts))]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def test_alone(loaded: LoadedModel, reference: Expected) -> None:
    outputs = [run(engine_of(loaded), [prompt])[0] for prompt in reference.prompts]
    assert tokens(outputs) == reference.continuations


@pytest.mark.parametrize("budget", [7, 512])
def test_in_one_batch_and_in_chunks(loaded: LoadedModel, reference: Expected, budget: int) -> None:
    assert tokens(run(engine_of(loaded, token_budget=budget), reference.prompts)) == reference.continuations


def test_with_a_cached_prefix(loaded: LoadedModel, reference: Expected) -> None:
    engine = engine_of(loaded)
    run(engine, reference.prompts)
    again = run(engine, [*reference.prompts, [*reference.prompts[-1][:50], 7, 8]])
    assert tokens(again)[:-1] == reference.continuations
    cached = [(len(prompt) - 1) // 4 * 4 for prompt in reference.prompts]
    assert [output.metrics.cached_tokens for output in again] == [*cached, 48]


def test_preempted_again_and_again(loaded: LoadedModel, reference: Expected) -> None:
    blocks = (len(reference.prompts[-1]) + TOKENS) // 4 + 2
    engine = engine_of(loaded, num_blocks=blocks)
    assert tokens(run(engine, reference.prompts)) == reference.continuations
    assert engine.stats().preemptions > 0


def test_what_adapters_say_of_it(loaded: LoadedModel, reference: Expected) -> None:
    config, layout = loaded.config, loaded.model.layout(4)
    assert isinstance(config, DeepseekConfig)
    per_token = (config.latent.kv_rank + config.latent.rope) * config.layers * 4
    assert layout.block_bytes() == 4 * per_token
    # Scores and weighted sums of latents, per head and layer, over the matrices of two tokens.
    pair = config.layers * config.heads * (2 * config.latent.kv_rank + config.latent.rope)
    assert prefill_shape(loaded).curvature == pytest.approx(pair / (2 * config.block_params))
    half = load_model(reference.directory, torch.bfloat16)
    names = {namespace_of(model, model.model.layout(4)).digest for model in (loaded, half)}
    assert len(names) == 2


def test_sparse_attention_over_latents_is_refused(loaded: LoadedModel) -> None:
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=64))
    with pytest.raises(RequestError, match="sparse='h2o': not with this model"):
        engine.add("r", [1, 2, 3], SamplingParams(sparse=Sparse("h2o")))
    assert not engine.has_work
