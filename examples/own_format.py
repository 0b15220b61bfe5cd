"""A KV format of one's own: lossless, the bytes of each significance together, then deflate."""

import zlib

import numpy as np

from kvtier.errors import FormatMismatch
from kvtier.formats.base import check_encoded, check_room
from kvtier.formats.header import HEADER_BYTES, describe, payload_bytes
from kvtier.layout import DTYPE_BYTES, Layout


class DeflateFormat:
    """Implements `kvtier.formats.Format`. Its blocks differ in size: for NVMe, not for host."""

    id = sink = "deflate"
    exact = True
    fidelity = 100

    def size(self, layout: Layout, group: int = 0) -> None:
        return None  # known only after encoding

    def bound(self, layout: Layout, group: int = 0) -> int:
        raw = layout.block_bytes(group)
        return HEADER_BYTES + raw + raw // 1000 + 64

    def exact_for(self, layout: Layout, group: int = 0) -> bool:
        return True

    def encode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> int:
        check_encoded(self.id, src, layout, out, self.bound(layout, group), group)
        planes = np.frombuffer(src, np.uint8).reshape(-1, _itemsize(layout, group)).T
        packed = zlib.compress(planes.tobytes(), level=1)
        header = describe(self.id, layout, group, len(packed)).pack()
        used = len(header) + len(packed)
        np.frombuffer(out, np.uint8)[:used] = np.frombuffer(header + packed, np.uint8)
        return used

    def decode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> None:
        raw = layout.block_bytes(group)
        payload_bytes(self.id, src, describe(self.id, layout, group, 0))
        check_room(self.id, out, raw)
        unpacker = zlib.decompressobj()
        try:
            planes = unpacker.decompress(src[HEADER_BYTES:], raw + 1)
        except zlib.error as error:
            raise FormatMismatch(f"{self.id}: {error}; drop the block") from error
        if len(planes) != raw or not unpacker.eof or unpacker.unused_data:
            raise FormatMismatch(f"{self.id}: {len(planes)} bytes unpacked, expected {raw}; drop the block")
        whole = np.frombuffer(planes, np.uint8).reshape(_itemsize(layout, group), -1).T
        np.frombuffer(out, np.uint8)[:raw].reshape(whole.shape)[:] = whole


def _itemsize(layout: Layout, group: int) -> int:
    return DTYPE_BYTES[layout.groups[group].dtype]
