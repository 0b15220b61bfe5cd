"""Products with int8 weights against float64: ragged tiles, splits, views of rows, and what is refused."""

import pytest
import torch
from kernel_world import draw

from kvtier.engine.models import int8_linear
from kvtier.engine.models.int8_linear import Int8Linear
from kvtier.errors import FormatMismatch
from kvtier.gpu.kernels.int8_product import int8_product, product_launches


def operands(rows, columns, inner, dtype=torch.float32):
    """Rows are a view between NaNs, so that a read beyond them shows."""
    wide = torch.full((rows + 1, inner + 7), float("nan"), dtype=dtype)
    wide[:rows, :inner] = draw(rows, inner, dtype=dtype)
    weight = torch.randint(-127, 128, (columns, inner), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    return wide[:rows, :inner], weight, draw(columns, seed=2, dtype=dtype), draw(columns, seed=3, dtype=dtype)


def check(x, weight, scales, bias, tolerance, **options):
    expected = (x.double() @ weight.double().T) * scales.double()
    if bias is not None:
        expected += bias.double()
    got = int8_product(x, weight, scales, bias, **options)
    assert got.dtype == x.dtype
    assert got.shape == expected.shape
    if expected.numel():
        assert (got.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("rows", [0, 1, 2, 16, 17, 64, 65, 130])
@pytest.mark.parametrize(("columns", "inner"), [(1, 7), (33, 40), (64, 128), (130, 300)])
def test_ragged_shapes(rows, columns, inner):
    x, weight, scales, bias = operands(rows, columns, inner)
    check(x, weight, scales, bias, 2e-6)
    check(x, weight, scales, None, 2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("rows", [1, 33, 129])
def test_types_that_tensor_cores_take(dtype, tolerance, rows):
    check(*operands(rows, 70, 270, dtype), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [2, 3, 5, 50])
def test_splits_of_the_inner_dimension(dtype, splits):
    operand = operands(5, 300, 530, dtype)
    launches = product_launches(*operand, torch.empty(5, 300, dtype=dtype), splits)
    assert len(launches) == 2
    assert 1 < launches[0].grid[2] <= splits
    check(*operand, 2e-6 if dtype is torch.float32 else 8e-3, splits=splits)


def test_sums_are_rounded_once():
    # In float16: the interpreter cuts bfloat16 off instead of rounding it.
    x, weight, scales, _ = operands(3, 20, 400, torch.float16)
    exact = ((x.double() @ weight.double().T) * scales.double()).half()
    got = int8_product(x, weight, scales)
    assert (got != exact).float().mean() < 0.1  # float32 sums beside a rounding boundary


def test_int8_linear_multiplies_by_it_on_cuda(monkeypatch):
    assert int8_linear._product_on(torch.device("cuda")) is int8_product
    assert int8_linear._product_on(torch.device("cpu")) is None
    weight, bias, x = draw(40, 96), draw(40, seed=1), draw(2, 5, 96, seed=2)[1]
    expected = Int8Linear(weight, bias)(x)
    monkeypatch.setattr(int8_linear, "_product_on", lambda _: int8_product)
    torch.testing.assert_close(Int8Linear(weight, bias)(x), expected, atol=1e-4, rtol=1e-5)
    turned = x.T.contiguous().T
    torch.testing.assert_close(Int8Linear(weight, bias)(turned), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": draw(3, 39)}, "expected \\[T, in\\] and int8"),
        ({"weight": torch.zeros(33, 40)}, "torch.float32"),
        ({"x": draw(40, 3).T}, "expected 1 over in"),
        ({"scales": draw(32)}, "scales \\[32\\]"),
        ({"bias": draw(33, dtype=torch.float16)}, "bias .* the rows' dtype"),
    ],
)
def test_what_does_not_belong_together_is_refused(change, says):
    given = dict(zip(("x", "weight", "scales", "bias"), operands(3, 33, 40), strict=True)) | change
    with pytest.raises(FormatMismatch, match=says):
        int8_product(**given)
