"""YarnScaling against transformers' own computation."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from kvtier.engine.models.base import DenseAttention
from kvtier.engine.models.config import Fields, ModelConfig
from kvtier.engine.models.decoder import Decoder
from kvtier.engine.models.families import plain_decoder
from kvtier.engine.models.rope import inverse_frequencies
from kvtier.engine.models.weights import load_weights
from kvtier.engine.models.yarn import YarnScaling
from kvtier.errors import ModelError

PUBLISHED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mscale": 0.707, "mscale_all_dim": 0.707},
        {"mscale": 0.5, "mscale_all_dim": 1.0},
        {"mscale": None, "mscale_all_dim": None},
        {"mscale": None},
        {"attention_factor": 1.25},
        {"factor": 1.0},
        {"truncate": False, "factor": 7.5, "beta_fast": 24, "beta_slow": 2},
        {"rope_theta": 500000.0, "original_max_position_embeddings": 64},
    ],
    ids=["v3", "v2", "rotation", "paper", "scores only", "explicit", "factor 1", "not truncated", "theta"],
)
def test_frequencies_and_scales_equal_transformers(width: int, changes: dict[str, Any]) -> None:
    rope = PUBLISHED | changes
    reference = DeepseekV3Config(qk_rope_head_dim=width, max_position_embeddings=1 << 20, rope_parameters=dict(rope))
    frequencies, rotation_scale = ROPE_INIT_FUNCTIONS["yarn"](reference)
    config = read(rope, width)
    assert isinstance(config.rope_scaling, YarnScaling)
    torch.testing.assert_close(inverse_frequencies(config), frequencies, rtol=1e-6, atol=0)
    assert config.rotation_scale == pytest.approx(rotation_scale)
    assert config.rope_scaling.score_scale == pytest.approx(yarn_apply_mscale(reference.rope_parameters, 1.0))


def read(rope: dict[str, Any], width: int = 64) -> ModelConfig:
    """The config of a small decoder whose file has these rope parameters."""
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"), 1)
    entries = {"architectures": ["LlamaForCausalLM"], "hidden_size": width, "rope_parameters": rope}
    return plain_decoder(Fields(sizes | entries, "config.json"))


def test_short_wavelengths_stay_and_long_ones_are_stretched() -> None:
    divisors = YarnScaling(40.0, 4096).divisors(64, 10000.0)
    assert divisors[0] == 1.0
    assert divisors[-1] == pytest.approx(40.0)
    assert list(divisors) == sorted(divisors)
    assert YarnScaling(40.0, 4096).rotation_scale == pytest.approx(0.1 * math.log(40) + 1)


@pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings"])
def test_an_entry_that_is_missing_or_no_positive_number_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: {name} = None"):
        read({key: value for key, value in PUBLISHED.items() if key != name})
    with pytest.raises(ModelError, match="expected a positive number"):
        read(PUBLISHED | {name: 0})


def test_models_of_keys_and_values_take_it_too(tmp_path: Path) -> None:
    torch.manual_seed(3)
    rope = PUBLISHED | {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": None, "mscale_all_dim": None}
    config = Qwen2Config(
        vocab_size=257,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters=rope,
        initializer_range=0.2,
    )
    reference = Qwen2ForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    ids = torch.randint(0, 257, (180,), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    model = Decoder(load_weights(tmp_path), torch.float32, torch.device("cpu"))
    positions = torch.arange(180)
    torch.testing.assert_close(model.forward(ids, positions, DenseAttention(), positions), expected, atol=2e-4, rtol=0)
