"""The lossy formats against slow readers of their documented bytes, and the sizes and errors that they promise."""

import dataclasses
import struct

import numpy as np
import pytest
import torch

from kvtier import formats, native
from kvtier.errors import FormatMismatch
from kvtier.formats.header import HEADER_BYTES
from kvtier.formats.rotation import rotation, span
from kvtier.layout import GroupKind, LayerGroup, Layout
from kvtier.native.rows import LLOYD_LEVELS, LLOYD_THRESHOLDS
from kvtier.testing.formats import bytes_of, kv_values, rows_of, values_of

SMALL = Layout(16, (LayerGroup(GroupKind.GQA, tuple(range(30)), 2, 3, 64, dtype="bfloat16"),))
LARGE = Layout(16, (LayerGroup(GroupKind.GQA, tuple(range(4)), 2, 8, 128, dtype="bfloat16"),))
LATENT = Layout(16, (LayerGroup(GroupKind.MLA, tuple(range(61)), 1, 1, 512, rope_dim=64, dtype="bfloat16"),))


@pytest.fixture(autouse=True, params=sorted({"reference", native.implementations()[-1]}))
def _implementation(request):
    with native.using(request.param):
        yield


def encoded(name, values, layout):
    out = np.zeros(formats.get(name).bound(layout), np.uint8)
    return out[: formats.get(name).encode(bytes_of(values, layout).data, layout, out.data)]


def decoded(name, block, layout):
    out = np.zeros(layout.block_bytes(), np.uint8)
    formats.get(name).decode(block.data, layout, out.data)
    return values_of(out, layout)


class Reader:
    """Reads records one number at a time, in float64."""

    def __init__(self, block):
        self.bytes, self.at = bytes(block), HEADER_BYTES

    def half(self):
        self.at += 2
        return struct.unpack_from("<e", self.bytes, self.at - 2)[0]

    def codes(self, count):
        self.at += count
        return self.bytes[self.at - count : self.at]

    def int8(self, width, group):
        scales = [self.half() for _ in range(width // group)]
        codes = struct.unpack(f"{width}b", self.codes(width))
        return [code * scales[at // group] for at, code in enumerate(codes)]

    def fp8(self, width, group):
        scale = self.half()
        codes = torch.tensor(list(self.codes(width)), dtype=torch.uint8)
        return (codes.view(torch.float8_e4m3fn).double() * scale).tolist()

    def nibbles(self, width):
        half = (width + 1) // 2
        packed = self.codes(half)
        return [packed[at] & 15 if at < half else packed[at - half] >> 4 for at in range(width)]

    def int4(self, width, group):
        meta = [(self.half(), self.half()) for _ in range(width // group)]
        return [meta[at // group][1] + meta[at // group][0] * code for at, code in enumerate(self.nibbles(width))]

    def lloyd4(self, width, group):
        gains = [self.half() for _ in range(width // group)]
        levels = [float(level) for level in LLOYD_LEVELS]
        return [gains[at // group] * levels[code] for at, code in enumerate(self.nibbles(width))]


def unrotated(row, elements):
    """The inverse of H S, by solving the linear system; odd widths have nothing to rotate."""
    if elements == 1:
        return row
    matrix = np.ones((1, 1))
    while len(matrix) < elements:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    signs = rotation(len(row), elements).forward.astype(np.float64)
    pieces = [np.linalg.solve(matrix, piece) for piece in np.reshape(row, (-1, elements))]
    return np.concatenate(pieces) / signs


# name -> how the two kinds of rows are read: method, wanted group, whether rotated.
READERS = {
    "int8": (("int8", 0, False), ("int8", 0, False)),
    "int8r": (("int8", 0, True), ("int8", 0, False)),
    "fp8": (("fp8", 0, False), ("fp8", 0, False)),
    "k8v4": (("int8", 0, False), ("int4", 0, True)),
    "int4r": (("int4", 0, True), ("int4", 0, True)),
    "mla8": (("int8", 128, False), ("int8", 0, False)),
    "mla4": (("lloyd4", 64, True), ("int8", 0, False)),
}


def read_gqa(name, block, layout):
    group, reader = layout.groups[0], Reader(block)
    width = group.head_dim
    rows = {"K": [], "V": []}
    for _ in group.layers:
        for plane, (method, _, turned) in zip(rows, READERS[name], strict=True):
            for _ in range(group.kv_heads * layout.block_size):
                row = getattr(reader, method)(width, width)
                rows[plane].append(unrotated(row, span(width)) if turned else row)
    assert reader.at == len(reader.bytes)
    return {plane: np.array(found) for plane, found in rows.items()}


def read_mla(name, block, layout):
    group, reader = layout.groups[0], Reader(block)
    rows = {"latent": [], "rope": []}
    for _ in range(len(group.layers) * layout.block_size):
        for kind, width, (method, wanted, turned) in zip(
            rows, (group.head_dim, group.rope_dim), READERS[name], strict=True
        ):
            row = getattr(reader, method)(width, wanted or width)
            rows[kind].append(unrotated(row, min(64, span(width))) if turned else row)
    assert reader.at == len(reader.bytes)
    return {kind: np.array(found) for kind, found in rows.items()}


@pytest.mark.parametrize("width", [64, 80, 7])
@pytest.mark.parametrize("name", ["int8", "int8r", "fp8", "k8v4", "int4r"])
def test_decoding_is_what_the_documented_bytes_say(name, width):
    layout = Layout(3, (LayerGroup(GroupKind.GQA, (0, 1), 2, 2, width, dtype="float32"),))
    block = encoded(name, kv_values(layout)["outliers"], layout)
    found = rows_of(decoded(name, block, layout), layout)
    for plane, rows in read_gqa(name, block, layout).items():
        np.testing.assert_allclose(found[plane], rows, rtol=2e-6, atol=2e-6 * abs(rows).max())


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (128, 16)])
@pytest.mark.parametrize("name", ["mla8", "mla4"])
def test_decoding_of_latents_is_what_the_documented_bytes_say(name, latent, rope):
    layout = Layout(3, (LayerGroup(GroupKind.MLA, (0, 1), 1, 1, latent, rope_dim=rope, dtype="float32"),))
    block = encoded(name, kv_values(layout)["outliers"], layout)
    found = rows_of(decoded(name, block, layout), layout)
    for kind, rows in read_mla(name, block, layout).items():
        np.testing.assert_allclose(found[kind], rows, rtol=2e-6, atol=2e-6 * abs(rows).max())


def test_fp8_codes_are_torchs():
    layout = Layout(16, (LayerGroup(GroupKind.GQA, (0,), 2, 2, 64, dtype="float32"),))
    values = kv_values(layout)["uneven rows"]
    block = encoded("fp8", values, layout)
    records = block[HEADER_BYTES:].reshape(-1, 66)
    scales = torch.from_numpy(records[:, :2].copy().view("<f2").astype(np.float32))
    inverse = torch.where(scales > 0, 1 / scales, 0)
    wanted = (torch.from_numpy(values.astype(np.float32).reshape(-1, 64)) * inverse).to(torch.float8_e4m3fn)
    assert torch.equal(torch.from_numpy(records[:, 2:].copy()), wanted.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "layout", "per_token"),
    [
        ("int8", SMALL, 11880),
        ("int8r", SMALL, 11880),
        ("fp8", SMALL, 11880),
        ("k8v4", SMALL, 9180),
        ("int4r", SMALL, 6480),
        ("int8", LARGE, 4 * 2 * 8 * 130),
        ("k8v4", LARGE, 4 * 8 * (130 + 68)),
        ("int4r", LARGE, 4 * 2 * 8 * 68),
        ("mla8", LATENT, 61 * 586),
        ("mla4", LATENT, 61 * 338),
    ],
)
def test_sizes(name, layout, per_token):
    assert formats.get(name).size(layout) == HEADER_BYTES + 16 * per_token


def relative_errors(name, layout, values):
    before = rows_of(values_of(bytes_of(values, layout), layout), layout)
    after = rows_of(decoded(name, encoded(name, values, layout), layout), layout)
    return [float(np.linalg.norm(after[kind] - before[kind]) / np.linalg.norm(before[kind])) for kind in before]


def test_errors_on_gaussian_rows_are_those_of_the_theory():
    # Uniform steps err by step / sqrt(12). E|max| of 64 Gaussians is 2.59 (of their spread 4.75); bf16 adds 0.2 %.
    layout = Layout(16, (LayerGroup(GroupKind.GQA, (0, 1), 2, 3, 64, dtype="float32"),))
    values = kv_values(layout)["gaussian"]
    assert relative_errors("int8", layout, values) == pytest.approx([2.59 / 127 / 12**0.5] * 2, rel=0.1)
    assert relative_errors("int4r", layout, values) == pytest.approx([4.75 / 15 / 12**0.5] * 2, rel=0.1)
    assert relative_errors("k8v4", layout, values) == pytest.approx(
        [2.59 / 127 / 12**0.5, 4.75 / 15 / 12**0.5], rel=0.1
    )
    assert relative_errors("fp8", layout, values) == pytest.approx([0.026, 0.026], rel=0.1)
    latent = Layout(16, (LayerGroup(GroupKind.MLA, (0, 1), 1, 1, 512, rope_dim=64, dtype="float32"),))
    # Lloyd-Max with 16 levels: distortion 0.009497 of the variance (Max 1960).
    assert relative_errors("mla4", latent, kv_values(latent)["gaussian"])[0] == pytest.approx(0.009497**0.5, rel=0.05)


def test_rotation_tames_outlier_channels():
    layout = Layout(16, (LayerGroup(GroupKind.GQA, (0, 1), 2, 3, 64, dtype="bfloat16"),))
    values = kv_values(layout)["gaussian"] * np.where(np.arange(64) % 31 == 5, 25.0, 1.0)
    plain, turned = relative_errors("int8", layout, values), relative_errors("int8r", layout, values)
    assert turned[0] < 0.75 * plain[0]
    assert turned[1] == plain[1]


def test_lloyd_levels_are_the_fixed_point_of_lloyds_iteration():
    x = np.linspace(-9, 9, 400_001)
    weight = np.exp(-x * x / 2)
    levels = LLOYD_LEVELS.astype(np.float64)
    nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, x)
    centroids = np.bincount(nearest, weight * x, 16) / np.bincount(nearest, weight, 16)
    np.testing.assert_allclose(centroids, levels, atol=2e-5)
    np.testing.assert_allclose(LLOYD_THRESHOLDS, (levels[1:] + levels[:-1]) / 2, rtol=1e-6, atol=1e-7)


def test_fp8_bytes_of_the_engine_pass_through():
    layout = Layout(4, (LayerGroup(GroupKind.GQA, (0, 1), 2, 2, 8, dtype="float8_e4m3fn"),))
    fmt = formats.get("fp8")
    raw = np.random.default_rng(0).integers(0, 256, layout.block_bytes(), np.uint8)
    out, back = np.zeros(fmt.bound(layout), np.uint8), np.zeros_like(raw)
    assert fmt.exact_for(layout)
    assert fmt.encode(raw.data, layout, out.data) == HEADER_BYTES + raw.size
    assert out[HEADER_BYTES:].tobytes() == raw.tobytes()
    fmt.decode(out.data, layout, back.data)
    assert back.tobytes() == raw.tobytes()
    assert not fmt.exact_for(SMALL)


def changed(**changes):
    return Layout(16, (dataclasses.replace(SMALL.groups[0], **changes),))


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("int8", LATENT, "layer group of kind mla, expected gqa"),
        ("mla4", SMALL, "layer group of kind gqa, expected mla"),
        ("int4r", changed(dtype="float8_e4m3fn"), "dtype float8_e4m3fn, expected float32, bfloat16, float16"),
        ("fp8", changed(dtype="int8"), "dtype int8, expected float32"),
        ("k8v4", changed(order="opaque:engine/1"), "axis order 'opaque:engine/1', expected an order of 'lphtd'"),
        ("int8r", changed(order="lphdt"), "axis order 'lphdt'"),
        ("int8", changed(head_dim=9000), "rows of 9000 elements, expected at most 8192"),
    ],
)
def test_what_a_format_cannot_code_is_refused(name, layout, words):
    fmt = formats.get(name)
    raw, out = np.zeros(layout.block_bytes(), np.uint8), np.zeros(layout.block_bytes() * 2, np.uint8)
    for verb in (
        lambda: fmt.size(layout),
        lambda: fmt.bound(layout),
        lambda: fmt.encode(raw.data, layout, out.data),
        lambda: fmt.decode(raw.data, layout, out.data),
    ):
        with pytest.raises(FormatMismatch) as caught:
            verb()
        assert words in str(caught.value)
        assert str(caught.value).startswith(f"{name}: ")
    assert not out.any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e38])
@pytest.mark.parametrize("name", ["int8", "int8r", "fp8", "k8v4", "int4r"])
def test_a_value_without_an_encoding_is_refused_by_row(name, value):
    layout = Layout(4, (LayerGroup(GroupKind.GQA, (0, 1), 2, 2, 64, dtype="bfloat16"),))
    values = kv_values(layout)["gaussian"]
    values[1, 0, 1, 2, 7] = value
    with pytest.raises(FormatMismatch, match=rf"{name}: row {8 + 4 + 2} of the block's K holds .*; store this block"):
        encoded(name, values, layout)


def test_the_same_values_in_another_axis_order_decode_alike():
    plain = Layout(4, (LayerGroup(GroupKind.GQA, (0, 1), 2, 3, 64, dtype="bfloat16"),))
    values = kv_values(plain)["outliers"]
    for order in ("plhtd", "tlphd", "lhtpd", "ltphd"):
        other = Layout(4, (dataclasses.replace(plain.groups[0], order=order),))
        axes = ["lphtd".index(axis) for axis in order]
        moved = decoded("k8v4", encoded("k8v4", values.transpose(axes), other), other)
        assert np.array_equal(moved, decoded("k8v4", encoded("k8v4", values, plain), plain).transpose(axes))


def test_float16_saturates_instead_of_overflowing():
    layout = Layout(4, (LayerGroup(GroupKind.GQA, (0,), 2, 1, 64, dtype="float16"),))
    values = np.full((1, 2, 1, 4, 64), 65504.0)
    values[..., 1::2] = -65504.0
    for name in ("int8", "fp8"):
        found = decoded(name, encoded(name, values, layout), layout)
        np.testing.assert_allclose(found, values, rtol=2e-3)
