"""Products with int8 weights: the product itself in float64, models against transformers with the same rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_reference import CASES, CLASSES, VOCAB, logits_of, saved
from safetensors.torch import load_file, save_file

from kvtier.engine.models import int8_linear
from kvtier.engine.models.base import DenseAttention
from kvtier.engine.models.decoder import Decoder
from kvtier.engine.models.int8_linear import Int8Linear
from kvtier.engine.models.linear import linear
from kvtier.engine.models.weights import load_weights

CPU = torch.device("cpu")
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What int8 with a scale per row makes of a matrix, in float64; scales are numbers of its own dtype."""
    scales = (weight.float().abs().amax(-1, keepdim=True) / 127).to(weight.dtype).float()
    scales[scales == 0] = 1
    # In float32, where a weight half-way between two steps goes to the same one as ours.
    return (weight.float() / scales).round().clamp(-127, 127).double() * scales.double()


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("rows", [0, 1, 3, 20, 21, 64])
@pytest.mark.parametrize("shape", [(33, 40), (1, 7), (33, 64), (2000, 300)])
def test_product_of_the_rounded_weights(dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(count, shape[1], generator=generator).to(dtype) for count in (shape[0], rows))
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    expected = x.double() @ rounded(weight).T
    scale = shape[1] ** 0.5
    product = linear(weight, quantize="int8")(x)
    assert product.dtype is dtype
    torch.testing.assert_close(product.double() / scale, expected / scale, atol=ERRORS[dtype], rtol=ERRORS[dtype])
    shifted = linear(weight, bias, quantize="int8")(x)
    torch.testing.assert_close(
        shifted.double() / scale, (expected + bias.double()) / scale, atol=ERRORS[dtype], rtol=ERRORS[dtype]
    )


def test_rounding_is_within_half_a_step_and_zeros_stay() -> None:
    weight = torch.randn(20, 50) * torch.logspace(-6, 3, 20)[:, None]
    weight[4] = 0
    out = Int8Linear(weight)(torch.eye(50)).T
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((out - weight).abs() <= 0.501 * step).all()
    assert (out[4] == 0).all()
    assert not torch.equal(out, weight)


def test_a_torch_without_the_kernel_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(30, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    expected = Int8Linear(weight)(x)

    def refuse(*_: Any) -> None:
        raise RuntimeError("not implemented")

    int8_linear._kernel_works.cache_clear()
    monkeypatch.setattr(torch, "_weight_int8pack_mm", refuse)
    try:
        torch.testing.assert_close(Int8Linear(weight)(x), expected, atol=0.1, rtol=0.02)
    finally:
        int8_linear._kernel_works.cache_clear()


def round_matrices(directory: Path, target: Path) -> None:
    """The same checkpoint with every matrix rounded that a product quantises."""
    kept = ("embed_tokens", "norm.weight", ".bias", ".gate.weight", "shared_expert_gate")
    tensors = load_file(directory / "model.safetensors")
    changed = {
        name: tensor if any(part in name for part in kept) else rounded(tensor).float()
        for name, tensor in tensors.items()
    }
    target.mkdir()
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())


@pytest.mark.parametrize("name", ["llama-biased", "qwen3_moe", "qwen2_moe", "mixtral"])
def test_model_equals_transformers_with_rounded_matrices(tmp_path: Path, name: str) -> None:
    exact = saved(tmp_path / "hf", CASES[name])
    round_matrices(tmp_path / "hf", tmp_path / "rounded")
    reference = CLASSES[CASES[name].family][1].from_pretrained(tmp_path / "rounded", dtype=torch.float32).eval()
    ids = torch.randint(0, VOCAB, (80,), generator=torch.Generator().manual_seed(1))
    model = Decoder(load_weights(tmp_path / "hf"), torch.float32, CPU, "int8")
    positions = torch.arange(len(ids))
    ours = model.forward(ids, positions, DenseAttention(), positions)
    torch.testing.assert_close(ours, logits_of(reference, ids), atol=1e-3, rtol=1e-4)
    assert (ours - logits_of(exact, ids)).abs().max() > 0.01, "nothing was rounded"
    assert model.numerics.endswith(";compute=float32;weights=int8")
