"""The compiled steps between matrix products against their twins in torch, at every CPU level."""

import pytest
import torch
from torch.nn import functional

from kvtier.gpu import cpu_kernels
from kvtier.native import attention as native

LEVELS = native.implementations()[1:]
DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(not LEVELS, reason="the extension was not built")


@pytest.fixture(params=LEVELS or ["none"], autouse=True)
def level(request):
    with native.using(request.param):
        yield request.param


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _norm(x, weight, eps):
    return functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def _same(result, expected):
    """Bit for bit in bfloat16 but for one rounding in a thousand; to a few units in the last place in float32."""
    if result.dtype is torch.bfloat16:
        assert (result != expected).sum() <= 1 + expected.numel() // 1000
        torch.testing.assert_close(result, expected, rtol=2**-7, atol=0)
    else:
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 32), (1, 576), (3, 64), (300, 96)])
def test_rms_norm(threads, dtype, rows, width):
    x, weight = _draw(rows, width, dtype=dtype), _draw(width, dtype=dtype, seed=1)
    _same(cpu_kernels.rms_norm(x, weight, 1e-5), _norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_inside_a_wider_buffer(dtype):
    buffer, weight = _draw(5, 7, 64, dtype=dtype), _draw(64, dtype=dtype, seed=1)
    heads = buffer[:, 2:5]
    _same(cpu_kernels.rms_norm(heads, weight, 1e-6), _norm(heads, weight, 1e-6))


def test_rms_norm_is_exact_to_float64():
    x, weight = _draw(4, 1024) * 100, _draw(1024, seed=1)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    torch.testing.assert_close(cpu_kernels.rms_norm(x, weight, 1e-5).double(), exact, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17, 200])
def test_add_rms_norm(threads, dtype, rows):
    hidden, change = _draw(rows, 576, dtype=dtype), _draw(rows, 576, dtype=dtype, seed=1)
    weight, total = _draw(576, dtype=dtype, seed=2), hidden + change
    normed = cpu_kernels.add_rms_norm(hidden, change, weight, 1e-5)
    assert torch.equal(hidden, total)
    _same(normed, _norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 12, 64), (3, 1, 32), (90, 5, 128), (2, 2, 96)])
def test_rotate_is_torch_bit_for_bit_and_leaves_the_rest_alone(threads, dtype, rows, heads, width):
    buffer, angles = _draw(rows, heads + 2, width, dtype=dtype), _draw(rows, 1, width // 2, seed=1) * 9
    before = buffer.clone()
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    turned = before[:, :heads]
    cpu_kernels.rotate(buffer[:, :heads], cos, sin)
    assert torch.equal(buffer[:, :heads], turned * cos + turned.roll(width // 2, -1) * sin)
    assert torch.equal(buffer[:, heads:], before[:, heads:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (5, 16), (120, 304)])
def test_silu_times(threads, dtype, rows, width):
    gate_up = _draw(rows, 2 * width, dtype=dtype) * 5
    gate, up = gate_up.chunk(2, dim=-1)
    _same(cpu_kernels.silu_times(gate_up), functional.silu(gate) * up)


def test_silu_of_extreme_values():
    gate = torch.tensor([0.0, -0.0, 1e-38, 90.0, 3e38, float("inf"), -20.0, -80.0, -87.0, -95.0, -3e38, float("nan")])
    gate = torch.cat((gate, torch.zeros(4)))
    result = cpu_kernels.silu_times(torch.cat((gate, torch.ones(16)))[None])[0]
    torch.testing.assert_close(result[:11], functional.silu(gate)[:11], rtol=2e-6, atol=2e-35)
    assert result[11].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_not_lost(dtype):
    x = _draw(2, 64, dtype=dtype)
    x[1, 40] = float("nan")
    assert cpu_kernels.rms_norm(x, torch.ones(64, dtype=dtype), 1e-5).isnan().any(-1).tolist() == [False, True]
    assert cpu_kernels.silu_times(x).isnan().sum() == 1


def test_results_are_the_same_at_every_level(level):
    x, weight = _draw(9, 576), _draw(576, seed=1)
    result = cpu_kernels.rms_norm(x, weight, 1e-5)
    with native.using("baseline"):
        assert torch.equal(result, cpu_kernels.rms_norm(x, weight, 1e-5))


def test_what_the_kernels_take():
    x = torch.zeros(4, 3, 64)
    assert cpu_kernels.takes(x, x[:, 1:], x[0])
    assert cpu_kernels.takes(x.bfloat16())
    assert not cpu_kernels.takes(x, x.bfloat16())
    assert not cpu_kernels.takes(x.half())
    assert not cpu_kernels.takes(torch.zeros(4, 48))
    assert not cpu_kernels.takes(x[..., :32])
    assert not cpu_kernels.takes(x.transpose(0, 1))
    assert not cpu_kernels.takes(x.to("meta"))
    with native.using("reference"):
        assert not cpu_kernels.takes(x)
