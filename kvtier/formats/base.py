"""The Format protocol."""

from typing import Protocol

from kvtier.layout import Layout

__all__ = ["Format"]


class Format(Protocol):
    """Encodes raw block bytes for a tier and decodes them again.

    id: at most 16 ASCII characters; stored with every record and bound into its checksum.
    exact: decoding returns the very bytes that were encoded.
    fidelity: orders formats; a record is replaced only by one of higher fidelity.
    """

    id: str
    exact: bool
    fidelity: int

    def size(self, layout: Layout, group: int = 0) -> int | None:
        """Encoded bytes of one block, or None where they depend on the data (extent tiers only)."""
        ...

    def encode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> int:
        """Encode a raw block into `out`; returns the bytes used.

        Raises:
            FormatMismatch: `src` is not a raw block of this layout, or `out` is too small.
        """
        ...

    def decode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> None:
        """Decode into a raw block. Validates before it writes.

        Raises:
            FormatMismatch: `src` is not an encoding of a block of this layout.
        """
        ...
