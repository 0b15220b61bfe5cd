"""Layout: sizes from first principles, a fingerprint that tells any two apart."""

import dataclasses

import numpy as np
import pytest

from kvtier.errors import FormatMismatch
from kvtier.layout import GroupKind, LayerGroup, Layout

GROUP = LayerGroup(GroupKind.GQA, (0, 1, 2), 2, 4, 64, dtype="bfloat16")
LATENT = LayerGroup(GroupKind.MLA, (0, 1), 1, 1, 512, rope_dim=64, dtype="float16")


def test_block_bytes() -> None:
    layout = Layout(16, (GROUP, LATENT), shards=2)
    assert layout.block_bytes(0) == np.empty((3, 2, 4, 16, 64), np.float16).nbytes
    assert layout.block_bytes(1) == np.empty((2, 16, 576), np.float16).nbytes
    assert layout.parts == 4


def test_any_field_changes_the_fingerprint() -> None:
    other = {
        "kind": LATENT,
        "layers": dataclasses.replace(GROUP, layers=(0, 2, 1)),
        "kv_heads": dataclasses.replace(GROUP, kv_heads=8),
        "head_dim": dataclasses.replace(GROUP, head_dim=128),
        "rope_dim": dataclasses.replace(LATENT, rope_dim=32),
        "dtype": dataclasses.replace(GROUP, dtype="float16"),
        "window": dataclasses.replace(GROUP, window=4096),
        "order": dataclasses.replace(GROUP, order="opaque:engine/1"),
    }
    # planes follows from kind.
    assert {field.name for field in dataclasses.fields(LayerGroup)} == other.keys() | {"planes"}
    layouts = [Layout(16, (GROUP,)), Layout(32, (GROUP,)), Layout(16, (GROUP,), 2), Layout(16, (GROUP, GROUP))]
    layouts += [Layout(16, (group,)) for group in other.values()]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    assert Layout(16, (dataclasses.replace(GROUP),)).fingerprint == layouts[0].fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planes": 1}, "planes=1"),
        ({"dtype": "int7"}, "int7"),
        ({"layers": ()}, "at least 1"),
        ({"kv_heads": 0}, "at least 1"),
        ({"rope_dim": -1}, "at least 1"),
    ],
)
def test_impossible_groups_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(FormatMismatch, match=message):
        dataclasses.replace(GROUP, **change)


@pytest.mark.parametrize("layout", [(0, (GROUP,), 1), (16, (), 1), (16, (GROUP,), 0)])
def test_impossible_layouts_are_refused(layout: tuple[int, tuple[LayerGroup, ...], int]) -> None:
    with pytest.raises(FormatMismatch, match="at least 1"):
        Layout(*layout)
