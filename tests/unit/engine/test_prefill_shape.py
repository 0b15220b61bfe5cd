"""What the adapter says about the cost of a prefill."""

import pytest
from kvtier_engine import prefill_shape
from tiny_model import tiny_model

from kvtier.engine.models import ModelConfig


def test_weights_that_every_token_passes_through() -> None:
    # SmolLM2-135M as published: 134,515,008 weights, of which embedding (tied) and norms are not in the layers.
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        vocab=49152,
        rms_eps=1e-5,
        rope_theta=100_000.0,
        rope_scaling=None,
        tied=True,
        max_positions=8192,
        eos_ids=frozenset({2}),
        dtype="bfloat16",
    )
    assert config.block_params == 134_515_008 - 49152 * 576 - 61 * 576


def test_curvature_is_attention_over_weights() -> None:
    model = tiny_model()
    config = model.config
    # FLOP of the scores and of the weighted sum for one pair of tokens, over those of the matrices for two tokens.
    pair = config.layers * config.heads * (2 * config.head_dim + 2 * config.head_dim)
    assert prefill_shape(model).curvature == pytest.approx(pair / 2 / (2 * config.block_params))
