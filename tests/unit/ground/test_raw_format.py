"""The raw format: identity, and nothing written on a mismatch."""

import numpy as np
import pytest

from kvtier.errors import FormatMismatch
from kvtier.formats import RawFormat
from kvtier.layout import GroupKind, LayerGroup, Layout

LAYOUT = Layout(
    4,
    (
        LayerGroup(GroupKind.GQA, (0,), 2, 2, 8, dtype="float16"),
        LayerGroup(GroupKind.MLA, (0,), 1, 1, 16, rope_dim=8, dtype="float32"),
    ),
)


@pytest.mark.parametrize("group", [0, 1])
def test_identity(group: int) -> None:
    raw = RawFormat()
    size = raw.size(LAYOUT, group)
    block = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    out, back = memoryview(bytearray(size + 7)), memoryview(bytearray(size))
    assert raw.encode(block.data, LAYOUT, out, group) == size
    raw.decode(out[:size], LAYOUT, back, group)
    assert back == block.data
    assert bytes(out[size:]) == bytes(7)
    assert raw.exact


@pytest.mark.parametrize(("src", "out"), [(-1, 0), (1, 0), (0, -1)])
def test_wrong_lengths_write_nothing(src: int, out: int) -> None:
    raw = RawFormat()
    size = raw.size(LAYOUT)
    source, target = memoryview(b"\x01" * (size + src)), memoryview(bytearray(size + out))
    for verb in (raw.encode, raw.decode):
        with pytest.raises(FormatMismatch, match=f"blocks have {size} bytes"):
            verb(source, LAYOUT, target)
    assert bytes(target) == bytes(target.nbytes)
