"""The Format protocol."""

from typing import Protocol

from kvtier.errors import FormatMismatch
from kvtier.layout import Layout

__all__ = ["Format", "check_encoded", "check_room"]


class Format(Protocol):
    """Encodes raw block bytes for a tier and decodes them again. Stateless, thus thread-safe.

    id: at most 16 ASCII characters; stored with every record and bound into its checksum.
    exact: decoding returns the very bytes that were encoded, whatever the layout.
    fidelity: orders formats; a record is replaced only by one of higher fidelity.
    sink: id of the format for the first block of a chain, which every later token attends to: this one's
        own where it keeps at least 8 bits an element.
    """

    id: str
    exact: bool
    fidelity: int
    sink: str

    def size(self, layout: Layout, group: int = 0) -> int | None:
        """Encoded bytes of one block, or None where they depend on the data (extent tiers only).

        Raises:
            FormatMismatch: this format has no encoding for blocks of this layout.
        """
        ...

    def bound(self, layout: Layout, group: int = 0) -> int:
        """The most bytes that `encode` writes: what `out` must have. Equals `size` where that is known."""
        ...

    def exact_for(self, layout: Layout, group: int = 0) -> bool:
        """Whether decoding returns the very bytes that were encoded, for blocks of this layout."""
        ...

    def encode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> int:
        """Encode a raw block into `out`; returns the bytes used.

        Raises:
            FormatMismatch: `src` is not a raw block of this layout or holds a value that this format cannot
                express, or `out` is too small.
        """
        ...

    def decode(self, src: memoryview, layout: Layout, out: memoryview, group: int = 0) -> None:
        """Decode into a raw block. Validates before it writes.

        Raises:
            FormatMismatch: `src` is not an encoding of a block of this layout.
        """
        ...


def check_encoded(fmt: str, src: memoryview, layout: Layout, out: memoryview, bound: int, group: int) -> None:
    """Refuse buffers that `encode` cannot work with: `src` one raw block, `out` of at least `bound` bytes.

    Raises:
        FormatMismatch: names the lengths.
    """
    raw = layout.block_bytes(group)
    if src.nbytes != raw:
        raise FormatMismatch(f"{fmt}: raw block of {src.nbytes} bytes, this layout's blocks have {raw} bytes")
    check_room(fmt, out, bound)


def check_room(fmt: str, out: memoryview, needed: int) -> None:
    """Refuse an output buffer that is too small or cannot be written.

    Raises:
        FormatMismatch: names the lengths.
    """
    if out.readonly or out.nbytes < needed:
        kind = "read-only buffer" if out.readonly else "buffer"
        raise FormatMismatch(f"{fmt}: {kind} of {out.nbytes} bytes for output, expected {needed} writable bytes")
