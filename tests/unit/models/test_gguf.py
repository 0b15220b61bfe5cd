"""GGUF files: logits equal those of the HF checkpoint they were made from; damaged ones are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_writer import write_gguf
from llama_reference import LLAMA3_ROPE, reference_logits, saved_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from kvtier.engine.models.base import DenseAttention
from kvtier.engine.models.convert import convert_gguf
from kvtier.engine.models.decoder import Decoder
from kvtier.engine.models.weights import load_weights
from kvtier.errors import ModelError

IDS = torch.randint(0, 320, (120,), generator=torch.Generator().manual_seed(1))


def logits(source: Path) -> torch.Tensor:
    model = Decoder(load_weights(source), torch.float32, torch.device("cpu"))
    positions = torch.arange(len(IDS))
    return model.forward(IDS, positions, DenseAttention(), positions)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 16}, {"rope_parameters": LLAMA3_ROPE}]
)
def test_logits_equal_the_original(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = saved_llama(tmp_path / "hf", **changes)
    write_gguf(tmp_path / "model.gguf", reference)
    torch.testing.assert_close(logits(tmp_path / "model.gguf"), reference_logits(reference, IDS), atol=1e-4, rtol=0)


def test_unpermuted_weights_are_the_original_ones(tmp_path: Path) -> None:
    reference = saved_llama(tmp_path / "hf").state_dict()
    write_gguf(tmp_path / "model.gguf", LlamaForCausalLM.from_pretrained(tmp_path / "hf"))
    weights = load_weights(tmp_path / "model.gguf")
    assert set(weights) == set(reference)
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference.items())
    original, ours = load_weights(tmp_path / "hf").config, weights.config
    assert (ours.rms_eps, ours.rope_theta, ours.dtype) == (original.rms_eps, original.rope_theta, "float32")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_files_load_as_their_dequantised_values(tmp_path: Path, kind: str) -> None:
    # Block formats need rows of a multiple of 32.
    reference = saved_llama(tmp_path / "hf", hidden_size=64, num_attention_heads=4, intermediate_size=96)
    quantised = gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "model.gguf", reference, quantised)
    for module in reference.modules():
        if isinstance(module, torch.nn.Linear):
            packed = gguf.quantize(module.weight.detach().numpy(), quantised)
            module.weight.data = torch.from_numpy(np.array(gguf.dequantize(packed, quantised), np.float32))
    torch.testing.assert_close(logits(tmp_path / "model.gguf"), reference_logits(reference, IDS), atol=1e-4, rtol=0)


def test_conversion_is_read_by_transformers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", saved_llama(tmp_path / "hf", tie_word_embeddings=True))
    (tmp_path / "out").mkdir()
    fractions: list[float] = []
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out", fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(tmp_path / "out"), reference_logits(theirs, IDS), atol=1e-4, rtol=0)
    original = LlamaForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(original[name].bfloat16().float(), tensor) for name, tensor in theirs.state_dict().items())
    tokenizer = load_weights(tmp_path / "out").tokenizer()
    assert tokenizer.encode("ab 1") == AutoTokenizer.from_pretrained(tmp_path / "out")("ab 1").input_ids
    assert tokenizer.eos_ids == load_weights(tmp_path / "model.gguf").tokenizer().eos_ids


def test_conversion_refuses_what_a_hf_config_cannot_say(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", saved_llama(tmp_path / "hf", rope_parameters=LLAMA3_ROPE))
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="RoPE factors have no HF config"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out", lambda fraction: None)
    assert not list((tmp_path / "out").iterdir())


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, saved_llama(tmp_path / "hf"))
    data = path.read_bytes()
    for keep in (0, 3, 8, 20, 30, 300, 2000, len(data) // 2, len(data) - 40):
        path.write_bytes(data[:keep])
        with pytest.raises(ModelError, match=r"no GGUF file, or a truncated one") as caught:
            load_weights(path)
        assert "\n" not in str(caught.value)


def test_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text(json.dumps({"no": "gguf"}) * 100)
    with pytest.raises(ModelError, match="no GGUF file"):
        load_weights(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "RoPE scaling 'yarn'"),
        (lambda writer: writer.add_rope_dimension_count(4), "RoPE over a part of the 8 elements"),
        (lambda writer: writer.add_expert_count(8), "llama.expert_count = 8: .* load other models from their HF"),
        (lambda writer: writer.add_sliding_window(64), "llama.attention.sliding_window = 64: supported are files wi"),
    ],
)
def test_unsupported_models(tmp_path: Path, edit: Callable[[gguf.GGUFWriter], None], message: str) -> None:
    write_gguf(tmp_path / "model.gguf", saved_llama(tmp_path / "hf"), edit=edit)
    with pytest.raises(ModelError, match=message):
        load_weights(tmp_path / "model.gguf")


def test_foreign_architecture_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", saved_llama(tmp_path / "hf"), architecture="gemma")
    with pytest.raises(ModelError, match="GGUF architecture 'gemma': supported is llama"):
        load_weights(tmp_path / "model.gguf")


def test_fingerprint_follows_the_bytes(tmp_path: Path) -> None:
    reference = saved_llama(tmp_path / "hf")
    write_gguf(tmp_path / "a.gguf", reference)
    write_gguf(tmp_path / "b.gguf", reference)
    reference.model.layers[1].mlp.up_proj.weight.data[3, 4] += 1e-3
    write_gguf(tmp_path / "c.gguf", reference)
    a, b, c = (load_weights(tmp_path / f"{name}.gguf").fingerprint for name in "abc")
    assert a == b != c
