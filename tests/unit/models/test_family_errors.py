"""What the readers of config.json refuse, and checkpoints that are not what their config says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_reference import CASES, Case, saved
from safetensors.torch import load_file, save_file

from kvtier.engine.models.decoder import Decoder
from kvtier.engine.models.families import config_from_hf
from kvtier.engine.models.weights import load_weights
from kvtier.errors import ModelError

CPU = torch.device("cpu")


def edited(directory: Path, name: str, **changes: Any) -> Path:
    """A model whose config.json was changed after it was saved; None removes an entry."""
    saved(directory, CASES[name])
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return directory


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5: supported is 1.0"),
        ("qwen2", {"rope_scaling": {"type": "dynamic"}, "rope_parameters": ...}, "'dynamic': supported are default"),
        ("qwen2", {"hidden_act": "relu"}, "hidden_act 'relu': supported is silu"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias = true: supported are MLPs without"),
        ("mistral", {"quantization_config": {"bits": 4}}, "quantised weights: supported are .* with int8 weights"),
        ("mistral", {"sliding_window": "wide"}, "sliding_window = 'wide', expected a number"),
        ("mistral", {"sliding_window": -1}, "a sliding window of -1 tokens, expected at least 1"),
        ("mistral", {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no', expected true or false"),
        ("qwen2-late-windows", {"sliding_window": None}, "sliding_window = None, expected a number"),
        ("qwen2-late-windows", {"layer_types": ["chunked_attention"] * 3}, "has chunked_attention: supported"),
        ("qwen2-late-windows", {"layer_types": ["full_attention"] * 2}, "2 windows, expected one for each of 3 layers"),
        ("qwen2-late-windows", {"layer_types": "full"}, "layer_types = 'full', expected a list"),
        ("mixtral", {"num_experts_per_tok": 5}, "5 experts per token of 4, expected 1 to as many"),
        ("mixtral", {"num_local_experts": ...}, "num_local_experts = None, expected a number"),
        ("qwen2_moe", {"moe_intermediate_size": 0}, "experts of width 0"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0, expected at least 1"),
        ("qwen3_moe", {"architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM: supported are LlamaForCa"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_weights(edited(tmp_path, name, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen2",
            {"architectures": ["LlamaForCausalLM"]},
            "9 biases that its config does not announce, model.layers.0",
        ),
        ("llama-biased", {"attention_bias": False}, "12 biases that its config does not announce"),
        ("llama-biased", {"architectures": ["Qwen2ForCausalLM"]}, "3 biases .* model.layers.0.self_attn.o_proj.bias"),
        ("mistral", {"architectures": ["Qwen2ForCausalLM"]}, "no tensor model.layers.0.self_attn.q_proj.bias"),
        ("qwen2", {"architectures": ["Qwen3ForCausalLM"]}, "no tensor model.layers.0.self_attn.q_norm.weight"),
        (
            "mixtral",
            {"num_local_experts": 5},
            "no tensor model.layers.0.block_sparse_moe.experts.4.w1.weight|has shape",
        ),
        ("qwen2_moe", {"shared_expert_intermediate_size": 41}, r"shared_expert.gate_proj.weight has shape \(40, 48\)"),
    ],
)
def test_weights_of_another_model(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    weights = load_weights(edited(tmp_path, name, **changes))
    with pytest.raises(ModelError, match=message):
        Decoder(weights, torch.float32, CPU)


def test_what_a_file_leaves_out_is_what_its_family_means(tmp_path: Path) -> None:
    silent = {"sliding_window": ..., "rope_parameters": ..., "rms_norm_eps": ...}
    mistral = config_from_hf(edited(tmp_path / "mistral", "mistral", **silent))
    assert (mistral.windows, mistral.rope_theta, mistral.rms_eps) == ((4096,) * 3, 10_000.0, 1e-6)
    mixtral = config_from_hf(edited(tmp_path / "mixtral", "mixtral", **silent))
    assert (mixtral.windows, mixtral.rope_theta, mixtral.rms_eps) == ((), 1e6, 1e-5)
    published = edited(tmp_path / "moe", "qwen3_moe", num_local_experts=..., num_experts=5)
    assert config_from_hf(published).experts == config_from_hf(edited(tmp_path / "saved", "qwen3_moe")).experts
    older = edited(tmp_path / "older", "qwen2-late-windows", layer_types=...)
    assert config_from_hf(older).windows == (None, 9, 9)


def test_fingerprint_covers_every_expert_and_bias(tmp_path: Path) -> None:
    saved(tmp_path, Case("qwen2_moe", CASES["qwen2_moe"].changes))
    original, path = load_weights(tmp_path).fingerprint, tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ("mlp.experts.3.down_proj.weight", "mlp.gate.weight", "mlp.shared_expert_gate.weight"):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[f"model.layers.1.{name}"].view(-1)[0] += 1e-3
        save_file(changed, path, metadata={"format": "pt"})
        assert load_weights(tmp_path).fingerprint != original, name
    changed = tensors | {"model.layers.2.self_attn.k_proj.bias": tensors["model.layers.2.self_attn.k_proj.bias"] + 1e-3}
    save_file(changed, path, metadata={"format": "pt"})
    assert load_weights(tmp_path).fingerprint != original
