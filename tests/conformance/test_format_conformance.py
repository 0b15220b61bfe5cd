"""FormatSuite on every format that comes with kvtier, with the compiled kernels and with numpy's."""

import numpy as np
import pytest

from kvtier import formats, native
from kvtier.formats import Format
from kvtier.formats.rotation import rotation, span
from kvtier.layout import GroupKind
from kvtier.testing import FormatSuite

Rows = np.ndarray


@pytest.fixture(autouse=True, params=sorted({"reference", native.implementations()[-1]}))
def _implementation(request):
    with native.using(request.param):
        yield


def rotated(rows: Rows, elements: int) -> Rows:
    """The rotation as a matrix product, orthonormal up to the power of two that the format carries in its signs."""
    matrix = np.ones((1, 1))
    while len(matrix) < elements:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    signed = rows * rotation(rows.shape[-1], elements).forward
    return (signed.reshape(len(rows), -1, elements) @ matrix).reshape(rows.shape)


def back(elements: int) -> float:
    """How much the inverse rotation scales the length of an error."""
    bits = elements.bit_length() - 1
    return elements**0.5 * 2.0 ** -(bits - bits // 2)


def groups(rows: Rows, group: int) -> Rows:
    width = rows.shape[-1]
    size = next(size for size in range(min(group, width), 0, -1) if width % size == 0)
    return rows.reshape(len(rows), -1, size)


def total(errors: Rows) -> Rows:
    return np.sqrt((errors**2).sum(axis=-1))


def half_step(spread: Rows, levels: int) -> Rows:
    """Half a step of a float16 scale that is the nearest, or the next above."""
    return spread / levels * (1 + 2.0**-10) / 2 + 2.0**-25


def int8_error(rows: Rows, group: int = 8192) -> Rows:
    cut = groups(rows, group)
    return total(half_step(abs(cut).max(-1), 127) * cut.shape[-1] ** 0.5)


def int8_rotated_error(rows: Rows) -> Rows:
    elements = span(rows.shape[-1])
    return int8_error(rotated(rows, elements)) * back(elements) + 1e-6 * np.linalg.norm(rows, axis=-1)


def int4_rotated_error(rows: Rows) -> Rows:
    elements = span(rows.shape[-1])
    turned = rotated(rows, elements)
    low = abs(turned.min(-1)) * 2.0**-11 + 2.0**-25
    each = half_step(np.ptp(turned, axis=-1) + low, 15) + low
    return each * rows.shape[-1] ** 0.5 * back(elements) + 1e-6 * np.linalg.norm(rows, axis=-1)


def fp8_error(rows: Rows) -> Rows:
    scale = abs(rows).max(-1) / 448 * (1 + 2.0**-10) + 2.0**-24
    return np.linalg.norm(rows, axis=-1) * 2.0**-4 + scale * 2.0**-10 * rows.shape[-1] ** 0.5


def lloyd4_error(rows: Rows) -> Rows:
    """A least-squares gain never does worse than this on rows that are far from Gaussian (constant, one-hot)."""
    return 0.5 * np.linalg.norm(rows, axis=-1) + 2.0**-25 * 3 * rows.shape[-1] ** 0.5


class TestRaw(FormatSuite):
    header_bytes = 0
    dtypes = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
    idempotent = dtypes

    def make_format(self) -> Format:
        return formats.get("raw")


class TestBitsplit(FormatSuite):
    dtypes = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
    idempotent = dtypes

    def make_format(self) -> Format:
        return formats.get("bitsplit")


class TestInt8(FormatSuite):
    idempotent = ("float32",)

    def make_format(self) -> Format:
        return formats.get("int8")

    def row_error(self, rows: Rows, name: str) -> Rows:
        return int8_error(rows)


class TestInt8Rotated(FormatSuite):
    def make_format(self) -> Format:
        return formats.get("int8r")

    def row_error(self, rows: Rows, name: str) -> Rows:
        return int8_rotated_error(rows) if name == "K" else int8_error(rows)


class TestFp8(FormatSuite):
    idempotent = ("float32",)

    def make_format(self) -> Format:
        return formats.get("fp8")

    def row_error(self, rows: Rows, name: str) -> Rows:
        return fp8_error(rows)


class TestFp8OfFp8(FormatSuite):
    dtypes = ("float8_e4m3fn",)
    idempotent = dtypes

    def make_format(self) -> Format:
        return formats.get("fp8")


class TestK8V4(FormatSuite):
    def make_format(self) -> Format:
        return formats.get("k8v4")

    def row_error(self, rows: Rows, name: str) -> Rows:
        return int8_error(rows) if name == "K" else int4_rotated_error(rows)


class TestInt4Rotated(FormatSuite):
    def make_format(self) -> Format:
        return formats.get("int4r")

    def row_error(self, rows: Rows, name: str) -> Rows:
        return int4_rotated_error(rows)


class TestMla8(FormatSuite):
    kind = GroupKind.MLA
    idempotent = ("float32",)

    def make_format(self) -> Format:
        return formats.get("mla8")

    def row_error(self, rows: Rows, name: str) -> Rows:
        return int8_error(rows, 128) if name == "latent" else int8_error(rows)


class TestMla4(FormatSuite):
    kind = GroupKind.MLA

    def make_format(self) -> Format:
        return formats.get("mla4")

    def row_error(self, rows: Rows, name: str) -> Rows:
        return lloyd4_error(rows) if name == "latent" else int8_error(rows)
