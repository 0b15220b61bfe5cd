"""Every family against transformers on random weights: logits, and greedy tokens through the engine."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from family_reference import CASES, VOCAB, Case, logits_of, saved
from tiny_model import tiny_tokenizer
from transformers import PreTrainedModel

from kvtier.engine import Engine, EngineOptions, SamplingParams
from kvtier.engine.models import LoadedModel
from kvtier.engine.models.base import DenseAttention
from kvtier.engine.models.decoder import Decoder
from kvtier.engine.models.families import SUPPORTED_ARCHITECTURES
from kvtier.engine.models.registry import MODELS
from kvtier.engine.models.weights import load_weights

CPU = torch.device("cpu")
TOKENS = 32
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
LENGTHS = (70, 3, 33)


def build(source: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(load_weights(source), dtype, CPU)


def dense(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(ids))
    return model.forward(ids, positions, DenseAttention(model.config.windows), positions)


def drawn(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_equal_transformers(tmp_path: Path, case: Case) -> None:
    reference, ids = saved(tmp_path, case), drawn(1, 120)
    torch.testing.assert_close(dense(build(tmp_path), ids), logits_of(reference, ids), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mixtral", "qwen2_moe"])
def test_bfloat16_is_as_close_as_transformers_is(tmp_path: Path, name: str) -> None:
    reference, ids = saved(tmp_path, CASES[name]), drawn(2, 64)
    exact = logits_of(reference, ids)
    theirs = (logits_of(reference.bfloat16(), ids) - exact).abs().median()
    assert (dense(build(tmp_path, torch.bfloat16), ids) - exact).abs().median() < 1.2 * theirs


def tokens_of(engine: Engine, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    finished: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        engine.add(name, prompt, GREEDY)
    while engine.has_work:
        finished |= {out.id: list(out.token_ids) for out in engine.step() if out.finish_reason}
    return finished


def check_greedy(reference: PreTrainedModel, prompt: list[int], output: list[int]) -> None:
    """Each token is the likeliest one after all before it: what greedy decoding without a cache gives."""
    assert len(output) == TOKENS
    logits = logits_of(reference, torch.tensor(prompt + output))
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_engine_gives_the_greedy_tokens_batched_and_alone(tmp_path: Path, case: Case) -> None:
    reference, model = saved(tmp_path, case), build(tmp_path)
    loaded = LoadedModel(model, model.config, tiny_tokenizer(), "random")
    prompts = {str(length): drawn(length, length).tolist() for length in LENGTHS}
    # Prompts are chunked, and blocks and windows end in different places.
    batched = tokens_of(Engine(loaded, EngineOptions(block_size=8, num_blocks=96, token_budget=29)), prompts)
    for name, prompt in prompts.items():
        check_greedy(reference, prompt, batched[name])
    alone = Engine(loaded, EngineOptions(block_size=8, num_blocks=96))
    for name in ("70", "3"):
        assert tokens_of(alone, {name: prompts[name]}) == {name: batched[name]}
    # Once more on cached blocks.
    assert tokens_of(alone, {"again": prompts["70"]}) == {"again": batched["70"]}


@pytest.mark.parametrize(
    ("name", "windows", "groups"),
    [
        ("mistral", (), {None: (0, 1, 2)}),
        ("mistral-window", (17, 17, 17), {17: (0, 1, 2)}),
        ("qwen2-late-windows", (None, 9, 9), {None: (0,), 9: (1, 2)}),
        ("qwen2-listed-windows", (5, None, 5), {None: (1,), 5: (0, 2)}),
        ("qwen2_moe-some-layers", (11, None, 11), {None: (1,), 11: (0, 2)}),
        ("qwen3_moe-window", (14, 14, 14), {14: (0, 1, 2)}),
    ],
)
def test_layers_with_a_window_are_a_group_of_their_own(
    tmp_path: Path, name: str, windows: tuple[int | None, ...], groups: dict[int | None, tuple[int, ...]]
) -> None:
    saved(tmp_path, CASES[name])
    model = build(tmp_path)
    assert model.config.windows == windows
    assert [(group.window, group.layers) for group in model.layout(16).groups] == list(groups.items())


def numerics_of(directory: Path, case: Case) -> str:
    saved(directory, case)
    return build(directory).numerics


def test_numerics_name_what_no_weight_and_no_shape_says(tmp_path: Path) -> None:
    def changed(name: str, **changes: Any) -> str:
        case = CASES[name]
        return numerics_of(tmp_path, Case(case.family, case.changes | changes))

    qwen = [changed("qwen2"), changed("qwen2-late-windows"), changed("qwen2-late-windows", sliding_window=10)]
    qwen.append(changed("qwen2-late-windows", max_window_layers=2))
    assert len(set(qwen)) == 4
    moe = [
        changed("qwen3_moe"),
        changed("qwen3_moe", norm_topk_prob=False),
        changed("qwen3_moe", num_experts_per_tok=3),
    ]
    assert len(set(moe)) == 3
    assert changed("mistral") == "rms_eps=1e-05;rope_theta=10000.0;rope_scaling=None;compute=float32"


def test_weights_that_a_token_passes_through(tmp_path: Path) -> None:
    for name in ("qwen3", "mixtral", "qwen2_moe-some-layers"):
        reference, config = saved(tmp_path / name, CASES[name]), build(tmp_path / name).config
        inner = {key: value.numel() for key, value in reference.model.layers.named_parameters() if value.dim() > 1}
        experts = config.experts
        active = sum(
            count if ".experts." not in key or experts is None else count * experts.choices // experts.count
            for key, count in inner.items()
        )
        assert config.block_params == active, name


def test_every_supported_architecture_has_a_model() -> None:
    assert set(MODELS) == set(SUPPORTED_ARCHITECTURES)


def test_lengths_reach_beyond_every_window() -> None:
    widest = max(case.changes.get("sliding_window") or 0 for case in CASES.values())
    assert max(LENGTHS) > 2 * widest
    assert any(low < widest < high for low, high in pairwise(sorted(LENGTHS)))
