"""The 64 bytes in front of a block: what they say, and that each error names the field."""

import dataclasses
import struct
import zlib

import numpy as np
import pytest

from kvtier.errors import FormatMismatch
from kvtier.formats.header import HEADER_BYTES, BlockHeader, describe, payload_bytes
from kvtier.layout import GroupKind, LayerGroup, Layout

GROUP = LayerGroup(GroupKind.GQA, tuple(range(30)), 2, 3, 64, dtype="bfloat16")
LAYOUT = Layout(16, (GROUP, LayerGroup(GroupKind.MLA, (0,), 1, 1, 512, rope_dim=64, dtype="float16")))


def block(payload=10, **changes):
    head = describe("int8r", LAYOUT, 0, payload, scale_group=64, rotation=64, seed=1)._replace(**changes)
    return memoryview(head.pack() + bytes(payload))


def test_the_bytes_are_as_documented():
    head = bytes(block()[:HEADER_BYTES])
    assert head[:22] == b"KVTF\x01\x00" + b"int8r".ljust(16, b"\0")
    assert struct.unpack_from("<BBIIIII", head, 22) == (1, 1, 30, 3, 16, 64, 0)
    assert struct.unpack_from("<IHHIII", head, 44) == (zlib.crc32(b"lphtd"), 64, 64, 1, 10, zlib.crc32(head[:60]))
    latent = describe("mla8", LAYOUT, 1, 0, scale_group=128)
    assert (latent.dtype, latent.kind, latent.layers, latent.head_dim, latent.rope_dim) == (2, 2, 1, 512, 64)
    assert len(latent.pack()) == HEADER_BYTES


def test_a_whole_block_gives_its_payload():
    assert payload_bytes("int8r", block(), describe("int8r", LAYOUT, 0, 0, scale_group=64, rotation=64, seed=1)) == 10


@pytest.mark.parametrize("field", [name for name in BlockHeader._fields if name != "payload"])
def test_a_field_that_differs_is_named(field):
    expected = describe("int8r", LAYOUT, 0, 10, scale_group=64, rotation=64, seed=1)
    value = {"magic": b"KVTG", "format": b"int9".ljust(16, b"\0")}.get(field, 2)
    with pytest.raises(
        FormatMismatch, match=rf"int8r: the block's header says {field} .*, expected .*; drop the block"
    ):
        payload_bytes("int8r", block(**{field: value}), expected)


@pytest.mark.parametrize("change", [1, -1])
def test_a_length_that_differs_is_named(change):
    expected = describe("int8r", LAYOUT, 0, 10, scale_group=64, rotation=64, seed=1)
    whole = bytes(block()) + b"\0"
    with pytest.raises(FormatMismatch, match="its header says 74; drop the block"):
        payload_bytes("int8r", memoryview(whole[: 74 + change]), expected)


def test_bytes_that_are_no_block_at_all():
    expected = describe("int8r", LAYOUT, 0, 10)
    for junk in (b"", b"K", bytes(63), bytes(64), np.random.default_rng(0).bytes(200)):
        with pytest.raises(FormatMismatch, match=r"int8r: .*drop"):
            payload_bytes("int8r", memoryview(junk), expected)


def test_layouts_that_differ_in_any_way_have_headers_that_differ():
    changes = [{"layers": (0,)}, {"kv_heads": 4}, {"head_dim": 32}, {"dtype": "float16"}, {"order": "plhtd"}]
    others = [Layout(16, (dataclasses.replace(GROUP, **change),)) for change in changes]
    heads = {describe("int8", layout, 0, 0).pack() for layout in [*others, LAYOUT, Layout(8, (GROUP,))]}
    assert len(heads) == len(others) + 2
