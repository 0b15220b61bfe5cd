"""Decoder against transformers on random weights, over every way to lay out the files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from llama_reference import LLAMA3_ROPE, reference_logits, saved_llama

from kvtier.engine.models import linear as linear_module
from kvtier.engine.models.base import DenseAttention
from kvtier.engine.models.decoder import Decoder
from kvtier.engine.models.weights import load_weights

CPU = torch.device("cpu")


def build(source: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(load_weights(source), dtype, CPU)


def dense(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(ids))
    return model.forward(ids, positions, DenseAttention(), positions)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": LLAMA3_ROPE},
        {"max_shard_size": "40KB", "rms_norm_eps": 1e-3},
    ],
    ids=["gqa", "tied", "mha", "mqa-head16", "theta", "llama3-rope", "sharded"],
)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = saved_llama(tmp_path / "hf", **changes)
    ids = torch.randint(0, 320, (200,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(dense(build(tmp_path / "hf"), ids), reference_logits(reference, ids), atol=1e-4, rtol=0)


def test_sharded_checkpoint_is_really_sharded(tmp_path: Path) -> None:
    saved_llama(tmp_path / "hf", max_shard_size="40KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_transformers_is(tmp_path: Path, dtype: torch.dtype) -> None:
    reference = saved_llama(tmp_path / "hf")
    ids = torch.randint(0, 320, (64,), generator=torch.Generator().manual_seed(2))
    exact = reference_logits(reference, ids)
    theirs = (reference_logits(reference.to(dtype), ids) - exact).abs().mean()
    assert (dense(build(tmp_path / "hf", dtype), ids) - exact).abs().mean() < 1.2 * theirs


def test_only_the_requested_rows_come_back(tmp_path: Path) -> None:
    saved_llama(tmp_path / "hf")
    model = build(tmp_path / "hf")
    ids = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(3))
    rows = torch.tensor([39, 0, 17])
    some = model.forward(ids, torch.arange(40), DenseAttention(), rows)
    torch.testing.assert_close(some, dense(model, ids)[rows], atol=1e-5, rtol=0)


def test_no_rows_still_write_every_layer(tmp_path: Path) -> None:
    saved_llama(tmp_path / "hf")
    model, written = build(tmp_path / "hf"), []

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        written.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return q

    ids = torch.arange(5)
    logits = model.forward(ids, ids, attention, torch.empty(0, dtype=torch.int64))
    assert logits.shape == (0, 320)
    assert logits.dtype == torch.float32
    assert written == [(layer, (5, 6, 8), (5, 2, 8), (5, 2, 8)) for layer in range(3)]


def test_a_ragged_batch_equals_its_sequences(tmp_path: Path) -> None:
    saved_llama(tmp_path / "hf")
    model, lengths = build(tmp_path / "hf"), (7, 1, 20)
    ids = torch.randint(0, 320, (28,), generator=torch.Generator().manual_seed(4))
    parts = ids.split(lengths)
    alone = torch.cat([dense(model, part) for part in parts])

    def per_sequence(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        split = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([DenseAttention()(layer, *three) for three in split])

    positions = torch.cat([torch.arange(length) for length in lengths])
    together = model.forward(ids, positions, per_sequence, torch.arange(28))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_packed_and_plain_products_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_llama(tmp_path / "hf", tie_word_embeddings=True)
    ids = torch.randint(0, 320, (96,), generator=torch.Generator().manual_seed(5))
    fastest = dense(build(tmp_path / "hf"), ids)
    monkeypatch.setattr(linear_module, "packing_works", lambda dtype: False)
    torch.testing.assert_close(fastest, dense(build(tmp_path / "hf"), ids), atol=1e-4, rtol=0)


def test_a_torch_without_the_packed_operators_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutOperators:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    linear_module.packing_works.cache_clear()
    monkeypatch.setattr(torch.ops, "mkldnn", WithoutOperators())
    try:
        assert not linear_module.packing_works(torch.float32)
        weight, rows = torch.randn(5, 3), torch.randn(2, 3)
        torch.testing.assert_close(linear_module.linear(weight)(rows), rows @ weight.T)
    finally:
        linear_module.packing_works.cache_clear()


@pytest.mark.parametrize("rows", [0, 1, 3, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_equals_a_matrix_product(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(33, 40).to(dtype), torch.randn(rows, 40).to(dtype)
    expected = x.double() @ weight.double().T
    error = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.02}[dtype]
    torch.testing.assert_close(linear_module.linear(weight)(x).double(), expected, atol=error, rtol=0)


def test_layout_and_numerics_follow_config_and_dtype(tmp_path: Path) -> None:
    saved_llama(tmp_path / "hf", rope_parameters=LLAMA3_ROPE)
    full, half = build(tmp_path / "hf"), build(tmp_path / "hf", torch.bfloat16)
    assert full.layout(16).block_bytes() == 3 * 2 * 2 * 16 * 8 * 4
    assert half.layout(16).block_bytes() * 2 == full.layout(16).block_bytes()
    assert full.layout(16).fingerprint != half.layout(16).fingerprint
    scaled = full.numerics
    saved_llama(tmp_path / "hf")
    assert len({scaled, half.numerics, build(tmp_path / "hf").numerics}) == 3
