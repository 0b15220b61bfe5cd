"""What the host tier's bookkeeping is made of: extents, nodes and handles.

extent   one version of a record's bytes in the slab; a replaced or removed one lives on until its last hold ends
node     a ready key: its place in the prefix tree and in the eviction policy
handle   a reservation or a lease, which is one hold on an extent
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.formats import fidelity
from kvtier.hints import NO_HINT, Hint
from kvtier.tiers import BlockRef, Handle, Owner

__all__ = ["GONE", "Extent", "Fidelity", "HostHandle", "Node", "fidelity_of"]

GONE = -1
"""Slot of a node that is not ready any more."""

Fidelity: TypeAlias = tuple[bool, int]
"""Orders the versions of a record: exact before lossy, then by format."""


def fidelity_of(ref: BlockRef, fmt: str) -> Fidelity:
    """The fidelity of a record."""
    return ref.exact, fidelity(fmt)


class Extent:
    """Bytes of one record. `array` is uint8 [padded bytes]; `checksum` is empty until they are written."""

    __slots__ = ("array", "checksum", "fidelity", "fmt", "holds", "leases", "nbytes", "node", "offset", "ref")

    def __init__(
        self, ref: BlockRef, nbytes: int, fmt: str, fidelity: Fidelity, offset: int, array: NDArray[np.uint8]
    ) -> None:
        self.ref = ref
        self.nbytes = nbytes
        self.fmt = fmt
        self.fidelity = fidelity
        self.offset = offset
        self.array = array
        self.checksum = b""
        self.holds = 1
        self.leases = 0
        self.node: Node | None = None


class Node:
    """A ready key. `slot` is its number in the eviction policy, `GONE` once it is not ready any more."""

    __slots__ = ("children", "extent", "parent", "slot")

    def __init__(self, slot: int, extent: Extent, parent: "Node | None") -> None:
        self.slot = slot
        self.extent = extent
        self.parent = parent
        self.children: set[Node] = set()


class HostHandle(Handle):
    """A hold in the host tier. `anchor`: the parent that a reservation keeps from being evicted."""

    __slots__ = ("anchor", "extent", "hint", "leased")

    def __init__(
        self, extent: Extent, owner: Owner, *, leased: bool, anchor: Node | None = None, hint: Hint = NO_HINT
    ) -> None:
        super().__init__(extent.ref, extent.nbytes, extent.fmt, owner)
        self.extent = extent
        self.leased = leased
        self.anchor = anchor
        self.hint = hint
