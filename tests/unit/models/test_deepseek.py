"""DeepseekModel against transformers on random weights, with attention by the definition."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_reference import KINDS, PLAIN, YARN, DenseLatentAttention, reference_logits, saved_deepseek

from kvtier.engine.models.deepseek import DeepseekModel
from kvtier.engine.models.deepseek_config import DeepseekConfig
from kvtier.engine.models.weights import load_weights
from kvtier.errors import ModelError
from kvtier.layout import GroupKind

CPU = torch.device("cpu")


def build(source: Path, dtype: torch.dtype = torch.float32) -> DeepseekModel:
    return DeepseekModel(load_weights(source), dtype, CPU)


def dense(model: DeepseekModel, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(ids))
    attention = DenseLatentAttention(model.config.latent.kv_rank, model.config.softmax_scale)
    return model.forward(ids, positions, attention, positions)


def drawn(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 257, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": PLAIN},
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "tie_word_embeddings": True},
        {"first_k_dense_replace": 3, "rms_norm_eps": 1e-3},
    ],
    ids=["yarn", "plain-rope", "tied", "dense"],
)
def test_logits_equal_transformers(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    reference = saved_deepseek(tmp_path, kind, **changes)
    ids = drawn(150)
    torch.testing.assert_close(dense(build(tmp_path), ids), reference_logits(reference, ids), atol=2e-4, rtol=0)


def test_rope_pairs_may_be_halves(tmp_path: Path) -> None:
    reference, ids = saved_deepseek(tmp_path, "v3", rope_interleave=False), drawn(60)
    logits = dense(build(tmp_path), ids)
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=2e-4, rtol=0)
    saved_deepseek(tmp_path, "v3")
    assert (dense(build(tmp_path), ids) - logits).abs().max() > 0.1


def test_half_precision_is_about_as_close_as_transformers_is(tmp_path: Path) -> None:
    reference, ids = saved_deepseek(tmp_path, "v3", first_k_dense_replace=3), drawn(64)
    exact = reference_logits(reference, ids)
    theirs = (reference_logits(reference.to(torch.bfloat16), ids) - exact).abs().mean()
    assert (dense(build(tmp_path, torch.bfloat16), ids) - exact).abs().mean() < 1.5 * theirs


def test_int8_weights_are_close_and_another_model(tmp_path: Path) -> None:
    reference, ids = saved_deepseek(tmp_path, "v2", first_k_dense_replace=3), drawn(64)
    exact, plain = reference_logits(reference, ids), build(tmp_path)
    quantised = DeepseekModel(load_weights(tmp_path), torch.float32, CPU, "int8")
    error = (dense(quantised, ids) - exact).abs().mean()
    assert 0 < error < 0.05 * exact.std()
    assert quantised.numerics != plain.numerics


def test_what_is_cached_is_one_row_of_latent_and_rope_key_per_layer(tmp_path: Path) -> None:
    reference, ids = saved_deepseek(tmp_path, "v3"), drawn(40)
    model, rows = build(tmp_path), {}
    inner = DenseLatentAttention(24, model.config.softmax_scale)

    def attention(layer: int, q: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        rows[layer] = row
        return inner(layer, q, row)

    positions = torch.arange(40)
    assert model.forward(ids, positions, attention, positions[:0]).shape == (0, 257)
    with torch.inference_mode():
        cache = reference(ids[None], use_cache=True).past_key_values
    assert sorted(rows) == [0, 1, 2]
    for layer, row in rows.items():
        latent, rope_key = cache.layers[layer].keys[0, 0], cache.layers[layer].values[0, 0]
        torch.testing.assert_close(row, torch.cat((latent, rope_key), -1), atol=2e-5, rtol=0)


def test_only_the_requested_rows_come_back(tmp_path: Path) -> None:
    saved_deepseek(tmp_path, "v2")
    model, ids, rows = build(tmp_path), drawn(40, 3), torch.tensor([39, 0, 17])
    attention = DenseLatentAttention(24, model.config.softmax_scale)
    some = model.forward(ids, torch.arange(40), attention, rows)
    torch.testing.assert_close(some, dense(model, ids)[rows], atol=1e-5, rtol=0)


def test_layout_and_numerics_follow_config_and_dtype(tmp_path: Path) -> None:
    saved_deepseek(tmp_path, "v3")
    full, half = build(tmp_path), build(tmp_path, torch.bfloat16)
    (group,) = full.layout(16).groups
    assert (group.kind, group.layers, group.head_dim, group.rope_dim) == (GroupKind.MLA, (0, 1, 2), 24, 8)
    for model, item in ((full, 4), (half, 2)):
        assert model.layout(16).block_bytes() == 16 * (24 + 8) * 3 * item
    names = {full.numerics, half.numerics}
    for changes in ({"rope_parameters": PLAIN}, {"routed_scaling_factor": 2.0}, {"topk_group": 3}):
        saved_deepseek(tmp_path, "v3", **changes)
        names.add(build(tmp_path).numerics)
    assert len(names) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_every_token_passes_through(tmp_path: Path, kind: str) -> None:
    reference = saved_deepseek(tmp_path, kind)
    config = load_weights(tmp_path).config
    assert isinstance(config, DeepseekConfig)
    matrices = {name: value.numel() for name, value in reference.named_parameters() if value.dim() > 1}
    total = sum(count for name, count in matrices.items() if "embed" not in name and "lm_head" not in name)
    # Of 8 experts, 3 are used.
    assert config.mixture is not None
    unused = (config.layers - config.mixture.first) * 5 * 3 * config.hidden * config.mixture.intermediate
    assert config.block_params == total - unused
    assert config.pair_work == 3 * 6 * (24 + 8 + 24)


def written(directory: Path, **changes: Any) -> Path:
    saved_deepseek(directory, changes.pop("kind", "v3"))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def test_published_files_are_read_as_their_authors_mean_them(tmp_path: Path) -> None:
    # The names of DeepSeek-V3's own config.json: no rope_parameters, scoring and method spelled out.
    scaling = {name: value for name, value in YARN.items() if name not in ("rope_type", "rope_theta")}
    old = written(
        tmp_path / "old",
        rope_parameters=None,
        rope_theta=10000,
        rope_scaling={"type": "yarn", **scaling},
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        torch_dtype="float32",
    )
    saved_deepseek(tmp_path / "new", "v3")
    assert load_weights(old).config == load_weights(tmp_path / "new").config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank = None"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0"),
        ({"q_lora_rank": 0}, "q_lora_rank = 0"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta = 1.0"),
        ({"topk_method": ["best"]}, "topk_method"),
        ({"topk_method": "best"}, "topk_method 'best'.*noaux_tc"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"n_group": 3}, "8 experts in 3 groups"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear'.*default, llama3 and yarn"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"kind": "v2", "norm_topk_prob": True}, "norm_topk_prob"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_weights(written(tmp_path, **changes))


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.3\."):
        build(written(tmp_path / "layers", num_hidden_layers=4))
    with pytest.raises(ModelError, match=r"gate\.weight has shape \(8, 48\)"):
        build(written(tmp_path / "experts", n_routed_experts=12))
