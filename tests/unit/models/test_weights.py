"""Opening checkpoints: fingerprints, and errors that say what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from llama_reference import saved_llama
from safetensors.torch import load_file, save_file
from tiny_model import tiny_tokenizer

from kvtier.engine import Engine, EngineOptions, SamplingParams
from kvtier.engine.models.registry import load_model
from kvtier.engine.models.weights import load_weights
from kvtier.errors import ModelError, RequestError

CPU = torch.device("cpu")


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    saved_llama(tmp_path / "hf")
    return tmp_path / "hf"


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_mapping_holds_what_was_saved(hf: Path) -> None:
    saved, weights = load_file(hf / "model.safetensors"), load_weights(hf)
    assert set(weights) == set(saved)
    assert len(weights) == len(saved)
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())


def test_a_taken_tensor_is_a_copy(hf: Path) -> None:
    weights = load_weights(hf)
    weights.take("model.norm.weight", (48,), torch.float32, CPU).fill_(9)
    assert not (weights["model.norm.weight"] == 9).any()


def test_fingerprint_depends_on_every_weight_and_on_nothing_else(tmp_path: Path, hf: Path) -> None:
    original = load_weights(hf).fingerprint
    saved_llama(tmp_path / "sharded", max_shard_size="40KB")
    assert load_weights(tmp_path / "sharded").fingerprint == original
    tensors = load_file(hf / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[name].view(-1)[tensors[name].numel() // 2] += 1e-3
        save_file(changed, hf / "model.safetensors")
        assert load_weights(hf).fingerprint != original, name
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, hf / "model.safetensors")
    assert load_weights(hf).fingerprint != original


def test_missing_source(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such file or directory: expected a HF model directory"):
        load_weights(tmp_path / "nowhere")


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json"):
        load_weights(tmp_path)


def test_config_that_is_no_json(hf: Path) -> None:
    (hf / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: not JSON"):
        load_weights(hf)
    (hf / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"list, expected a JSON object"):
        load_weights(hf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["OPTForCausalLM"]}, "OPTForCausalLM: supported are LlamaForCausalLM, Mistral"),
        ({"architectures": None}, r"\(none\): supported are"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu.*supported is silu"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "longrope'.*supported are default, llama3"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "factor = None, expected a number"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide', expected a number"),
        ({"num_hidden_layers": 0}, "layers = 0, expected at least 1"),
        ({"num_hidden_layers": 2.5}, "2.5, expected an integer"),
        ({"num_key_value_heads": 4}, "6 query heads are no multiple of 4"),
        ({"head_dim": 7}, "head_dim = 7, expected an even"),
        ({"dtype": "int8"}, "dtype 'int8', expected one of"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
    ],
)
def test_unsupported_or_damaged_config(hf: Path, changes: dict[str, object], message: str) -> None:
    (hf / "generation_config.json").unlink()
    edit_config(hf, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_weights(hf)
    assert "\n" not in str(caught.value)


def test_legacy_rope_entries_are_read(hf: Path) -> None:
    path = hf / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("rope_parameters")
    llama3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raw |= {"rope_theta": 12345.0, "rope_scaling": llama3 | {"original_max_position_embeddings": 64}}
    path.write_text(json.dumps(raw))
    config = load_weights(hf).config
    assert config.rope_theta == 12345.0
    assert config.rope_scaling is not None
    path.write_text(json.dumps(raw | {"rope_scaling": None}))
    assert load_weights(hf).config.rope_scaling is None


def test_end_tokens_prefer_the_generation_config(hf: Path) -> None:
    edit_config(hf, eos_token_id=5)
    (hf / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_weights(hf).config.eos_ids == {7, 9}
    (hf / "generation_config.json").write_text("{}")
    assert load_weights(hf).config.eos_ids == {5}


def test_no_weights_at_all(hf: Path) -> None:
    (hf / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor"):
        load_weights(hf)


@pytest.mark.parametrize("keep", [0, 5, 400, -1])
def test_truncated_safetensors(hf: Path, keep: int) -> None:
    data = (hf / "model.safetensors").read_bytes()
    (hf / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(ModelError, match="truncated or damaged"):
        load_weights(hf)


def test_missing_shard(tmp_path: Path) -> None:
    saved_llama(tmp_path / "hf", max_shard_size="40KB")
    gone = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"missing: {gone.name}"):
        load_weights(tmp_path / "hf")


def copy_tokenizer_into(directory: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"a": 0}, [])).save(str(directory / "tokenizer.json"))


def test_missing_tensor_and_wrong_shape(hf: Path, tmp_path: Path) -> None:
    copy_tokenizer_into(hf)
    tensors = load_file(hf / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    less = {key: tensor for key, tensor in tensors.items() if key != name}
    save_file(less, hf / "model.safetensors")
    with pytest.raises(ModelError, match=f"no tensor {name}"):
        load_model(hf)
    save_file(less | {name: torch.zeros(3, 4)}, hf / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} has shape \(3, 4\), its config asks for \(48, 112\)"):
        load_model(hf)


def test_load_model_joins_the_parts_and_checks_dtype(hf: Path) -> None:
    copy_tokenizer_into(hf)
    loaded = load_model(str(hf), torch.bfloat16)
    assert loaded.model.dtype is torch.bfloat16
    assert loaded.fingerprint == load_weights(hf).fingerprint
    assert loaded.tokenizer.encode("a") == [0]
    assert load_model(hf).model.dtype is torch.float32
    with pytest.raises(ModelError, match=r"dtype torch.int8: expected one of"):
        load_model(hf, torch.int8)


def test_directory_without_tokenizer(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer.json"):
        load_model(hf)
    (hf / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json: .*damaged"):
        load_model(hf)


def test_ends_that_the_model_cannot_choose_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_llama(tmp_path)
    tiny_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 319, 320, 10**30, -1]}))
    loaded = load_model(tmp_path, torch.float32)
    assert loaded.tokenizer.eos_ids == {0, 319}
    assert "end-of-sequence tokens [-1, 320, 1000000000000000000000000000000] are ignored" in caplog.text
    engine = Engine(loaded, EngineOptions(block_size=4, num_blocks=60))
    engine.add("r", [1, 2, 3], SamplingParams(max_tokens=5, min_tokens=5))
    while engine.has_work:
        outputs = engine.step()
    assert len(outputs[0].token_ids) == 5
    assert not {0, 319} & set(outputs[0].token_ids[:4])
    with pytest.raises(RequestError, match=r"stop_token_ids with token id 320: expected 0\.\.319"):
        engine.add("s", [1], SamplingParams(stop_token_ids=frozenset({320})))
