"""Products on AMX tiles against float64, and beside torch's own."""

import pytest
import torch
from torch.nn import functional

from kvtier.engine.models.linear import linear
from kvtier.engine.models.tile_linear import TileLinear
from kvtier.native.products import products

pytestmark = pytest.mark.skipif(products() is None, reason="no AMX here, or the extension was not built")


def _draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _check(result, x, weight):
    exact = x.double() @ weight.double().T
    # Half a unit in the last place of a bfloat16, and the noise of a sum in float32.
    bound = exact.abs() * 2**-8 + 1e-5 * (x.double().abs() @ weight.double().abs().T)
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65, 150])
@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_rows(rows, threads):
    x, weight = _draw(rows, 96), _draw(160, 96, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = TileLinear(weight)(x)
    finally:
        torch.set_num_threads(before)
    _check(result, x, weight)


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (32, 640), (1056, 32), (960, 576)])
def test_any_shape_of_whole_tiles(outputs, inputs):
    x, weight = _draw(5, inputs), _draw(outputs, inputs, seed=1)
    _check(TileLinear(weight)(x), x, weight)


def test_no_rows():
    assert TileLinear(_draw(64, 32))(_draw(0, 32)).shape == (0, 64)


def test_rows_of_a_wider_buffer_and_columns():
    buffer, weight = _draw(40, 224), _draw(64, 96, seed=1)
    product = TileLinear(weight)
    assert torch.equal(product(buffer[:, 64:160]), product(buffer[:, 64:160].contiguous()))
    assert torch.equal(product(_draw(96, 40).T), product(_draw(96, 40).T.contiguous()))


def test_a_row_gets_the_same_result_in_any_company():
    x, product = _draw(70, 576), TileLinear(_draw(64, 576, seed=1))
    together = product(x)
    for rows in (1, 16, 33):
        assert torch.equal(product(x[-rows:]), together[-rows:])


def test_tiles_of_others_are_as_they_were():
    """oneDNN keeps a thread's tile configuration from call to call."""
    x, weight = _draw(64, 64), _draw(64, 64, seed=1)
    expected, product = functional.linear(x, weight), TileLinear(weight)
    for rows in (64, 3, 40):
        product(x[:rows])
        assert torch.equal(functional.linear(x, weight), expected)


def test_other_rows_are_refused():
    product = TileLinear(_draw(64, 32))
    for wrong in (_draw(2, 64), _draw(2, 32).float(), _draw(2, 1, 32)):
        with pytest.raises(ValueError, match=r"expected bfloat16 \[T, 32\]"):
            product(wrong)


def test_linear_takes_it_where_it_fits():
    assert isinstance(linear(_draw(64, 32)), TileLinear)
    assert not isinstance(linear(_draw(48, 32)), TileLinear)
    assert not isinstance(linear(_draw(64, 32).float()), TileLinear)
    assert not isinstance(linear(_draw(64, 32), bias=_draw(64)), TileLinear)
