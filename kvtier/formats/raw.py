"""`raw`: the bytes as they are. Every tier's default."""

import numpy as np

from kvtier.errors import FormatMismatch
from kvtier.layout import Layout

__all__ = ["RawFormat"]


class RawFormat:
    """Identity, without a header. Implements `kvtier.formats.Format`."""

    id = "raw"
    exact = True
    fidelity = 100
    sink = "raw"

    def size(self, layout: Layout, group: int = 0) -> int:
        """Bytes of one block, the layout's own."""
        return layout.block_bytes(group)

    def bound(self, layout: Layout, group: int = 0) -> int:
        """Bytes of one block, the layout's own."""
        return layout.block_bytes(group)

    def exact_for(self, layout: Layout, group: int = 0) -> bool:
        """Always."""
        return True

    def encode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> int:
        """Copy a block. Raises `FormatMismatch` on a wrong length."""
        self._copy(src, layout, out, group)
        return src.nbytes

    def decode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> None:
        """Copy a block back. Raises `FormatMismatch` on a wrong length."""
        self._copy(src, layout, out, group)

    def _copy(self, src: memoryview, layout: Layout, out: memoryview, group: int) -> None:
        expected = layout.block_bytes(group)
        if src.nbytes != expected or out.nbytes < expected:
            raise FormatMismatch(
                f"raw block of {src.nbytes} bytes into {out.nbytes}: this layout's blocks have {expected} bytes"
            )
        # numpy releases the GIL while it copies; memoryview slice assignment does not.
        np.copyto(np.frombuffer(out, np.uint8, expected), np.frombuffer(src, np.uint8))
