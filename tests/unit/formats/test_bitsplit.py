"""bitsplit: standard frames, what it saves, and damaged blocks."""

import struct
import zlib

import numpy as np
import pytest
import torch
import zstandard

from kvtier import formats, native
from kvtier.errors import FormatMismatch
from kvtier.formats import bitsplit
from kvtier.formats.header import HEADER_BYTES
from kvtier.layout import GroupKind, LayerGroup, Layout

FMT = formats.get("bitsplit")


def layout_of(dtype, order="lphtd"):
    return Layout(16, (LayerGroup(GroupKind.GQA, (0, 1, 2), 2, 3, 64, dtype=dtype, order=order),))


def gaussian(dtype, layout):
    torch.manual_seed(0)
    count = layout.block_bytes() // torch.empty(0, dtype=dtype).element_size()
    scales = torch.exp(torch.randn(64)).repeat(count // 64)
    return (torch.randn(count) * scales).to(dtype).view(torch.uint8).numpy()


def encoded(raw, layout):
    out = np.zeros(FMT.bound(layout), np.uint8)
    return out[: FMT.encode(raw.data, layout, out.data)].copy()


def decoded(block, layout):
    out = np.full(layout.block_bytes(), 0xA5, np.uint8)
    FMT.decode(block.data, layout, out.data)
    return out


def sealed(block):
    """The block with lengths and checksum of its header made right: damage beyond the header."""
    fixed = block.copy()
    fixed[56:60] = np.frombuffer(struct.pack("<I", block.size - HEADER_BYTES), np.uint8)
    fixed[60:64] = np.frombuffer(struct.pack("<I", zlib.crc32(fixed[:60].tobytes())), np.uint8)
    return fixed


@pytest.mark.parametrize(
    ("name", "dtype", "least"),
    [
        ("bfloat16", torch.bfloat16, 1.40),
        ("float16", torch.float16, 1.12),
        ("float32", torch.float32, 1.17),
        ("float8_e4m3fn", torch.float8_e4m3fn, 1.10),
    ],
)
def test_what_it_saves_on_gaussian_channels(name, dtype, least):
    layout = layout_of(name)
    raw = gaussian(dtype, layout)
    block = encoded(raw, layout)
    assert raw.size / block.size > least
    assert decoded(block, layout).tobytes() == raw.tobytes()


def test_the_payload_is_what_the_module_says():
    layout = layout_of("bfloat16")
    raw = gaussian(torch.bfloat16, layout)
    body = encoded(raw, layout)[HEADER_BYTES:].tobytes()
    count = raw.size // 2
    packed, stored = struct.unpack_from("<2I", body)
    assert stored == count
    assert len(body) == 8 + stored + packed
    low = np.frombuffer(body, np.uint8, count, 8)
    high = np.frombuffer(zstandard.ZstdDecompressor().decompress(body[8 + stored :]), np.uint8)
    words = raw.view("<u2")
    assert np.array_equal(high, (words >> 7) & 255), "the first plane is the exponent"
    assert np.array_equal(low, ((words & 127) << 1) | (words >> 15)), "the second is mantissa and sign"


def test_noise_is_kept_raw():
    layout = layout_of("bfloat16")
    raw = np.random.default_rng(0).integers(0, 256, layout.block_bytes(), np.uint8)
    block = encoded(raw, layout)
    assert block.size == FMT.bound(layout)
    assert block[HEADER_BYTES:].tobytes() == raw.tobytes()
    assert decoded(block, layout).tobytes() == raw.tobytes()


def test_float32_that_was_bfloat16_shrinks_by_more_than_half():
    layout = layout_of("float32")
    torch.manual_seed(0)
    raw = torch.randn(layout.block_bytes() // 4).bfloat16().float().view(torch.uint8).numpy()
    block = encoded(raw, layout)
    assert raw.size / block.size > 2.4
    assert decoded(block, layout).tobytes() == raw.tobytes()


def test_planes_between_noise_and_order():
    """Blocks of which a part is noise: some planes are packed, some stored, whatever pays."""
    dice = np.random.default_rng(1)
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        layout = layout_of(dtype)
        for share in (0.0, 0.02, 0.5, 0.9, 0.99, 1.0):
            raw = dice.integers(0, 256, layout.block_bytes(), np.uint8)
            raw[: int(raw.size * share)] = 7
            block = encoded(raw, layout)
            assert block.size <= FMT.bound(layout)
            assert decoded(block, layout).tobytes() == raw.tobytes()


def test_every_implementation_writes_the_same_bytes():
    for dtype, kind in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        layout = layout_of(dtype)
        raw = gaussian(kind, layout)
        found = set()
        for name in native.implementations():
            with native.using(name):
                found.add(encoded(raw, layout).tobytes())
        assert len(found) == 1


def refused(block, layout):
    out = np.full(layout.block_bytes(), 0xA5, np.uint8)
    with pytest.raises(FormatMismatch, match=r"bitsplit: .*drop the block"):
        FMT.decode(block.data, layout, out.data)
    assert (out == 0xA5).all(), "wrote before it had checked"


def test_damage_beyond_the_header_is_refused_or_changes_nothing_else():
    layout = layout_of("bfloat16")
    block = encoded(gaussian(torch.bfloat16, layout), layout)
    count = layout.block_bytes() // 2
    for table in ((0, 0), (count, count), (2**32 - 1, count), (5, count)):
        damaged = block.copy()
        damaged[HEADER_BYTES : HEADER_BYTES + 8] = np.frombuffer(struct.pack("<2I", *table), np.uint8)
        refused(sealed(damaged), layout)
    frame = HEADER_BYTES + 8 + count
    for at in range(4):
        damaged = block.copy()
        damaged[frame + at] ^= 0xFF
        refused(sealed(damaged), layout)
    for length in (HEADER_BYTES, HEADER_BYTES + 7, frame, block.size - 1):
        refused(sealed(block[:length]), layout)


def test_a_frame_that_states_another_size_is_refused_before_it_is_unpacked():
    layout = layout_of("bfloat16")
    count = layout.block_bytes() // 2
    low = np.zeros(count, np.uint8)
    # Its header promises 2**50 bytes: making room for them would fail.
    huge = bytes.fromhex("28b52ffde0") + struct.pack("<Q", 1 << 50) + bytes.fromhex("010000")
    for frame in (
        huge,
        zstandard.ZstdCompressor().compress(bytes(1 << 28)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(count)),
        zstandard.ZstdCompressor().compress(bytes(count)) + b"more",
    ):
        table = struct.pack("<2I", len(frame), count)
        body = table + low.tobytes() + frame
        head = encoded(gaussian(torch.bfloat16, layout), layout)[:HEADER_BYTES]
        refused(sealed(np.concatenate([head, np.frombuffer(body, np.uint8)])), layout)


def test_opaque_pages_and_latents():
    mla = Layout(16, (LayerGroup(GroupKind.MLA, (0, 1), 1, 1, 96, rope_dim=16, dtype="bfloat16"),))
    for layout in (layout_of("bfloat16", "opaque:engine/1"), mla):
        raw = gaussian(torch.bfloat16, layout)
        block = encoded(raw, layout)
        assert block.size < raw.size
        assert decoded(block, layout).tobytes() == raw.tobytes()


def test_a_frame_as_long_as_its_plane_is_not_taken_for_a_stored_plane(monkeypatch):
    layout = layout_of("float32")
    raw = np.zeros(layout.block_bytes(), np.uint8)
    assert encoded(raw, layout).size < raw.size / 100
    monkeypatch.setattr(bitsplit, "_compress", lambda plane: bytes(plane.size))
    block = encoded(raw, layout)
    assert block.size == FMT.bound(layout)
    assert decoded(block, layout).tobytes() == raw.tobytes()


def test_noise_in_one_plane_does_not_hide_the_others():
    layout = layout_of("float32")
    dice = np.random.default_rng(0)
    for place in range(4):
        words = dice.integers(0, 256, layout.block_bytes() // 4).astype("<u4") << np.uint32(8 * place)
        raw = ((words >> np.uint32(1)) | (words << np.uint32(31))).view(np.uint8)
        block = encoded(raw, layout)
        assert raw.size / block.size > 3.8
        assert decoded(block, layout).tobytes() == raw.tobytes()
