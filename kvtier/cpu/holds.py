"""What the host tier's bookkeeping is made of: extents, nodes and handles.

extent   one version of a record's bytes in the slab; a replaced or removed one lives on until its last hold ends
node     a ready key: its place in the prefix tree and in the eviction policy
handle   a reservation or a lease, which is one hold on an extent
"""

from typing import TypeAlias

from kvtier.hints import NO_HINT, Hint
from kvtier.tiers import BlockRef, Handle, Owner

__all__ = ["GONE", "Extent", "Fidelity", "HostHandle", "Node"]

GONE = -1
"""Slot of a node that is not ready any more."""

Fidelity: TypeAlias = tuple[bool, int]
"""Orders the versions of a record: exact before lossy, then by format."""


class Extent:
    """Bytes of one record. `memory` has whole pages; `checksum` is empty until they are written."""

    __slots__ = ("checksum", "fidelity", "fmt", "holds", "leases", "memory", "nbytes", "node", "offset", "ref")

    def __init__(
        self, ref: BlockRef, nbytes: int, fmt: str, fidelity: Fidelity, offset: int, memory: memoryview
    ) -> None:
        self.ref = ref
        self.nbytes = nbytes
        self.fmt = fmt
        self.fidelity = fidelity
        self.offset = offset
        self.memory = memory
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
        # Most nodes have one child or none: a set for each would be most of their memory.
        self.children: set[Node] | tuple[Node, ...] = ()

    def add(self, child: "Node") -> None:
        """A child came."""
        if isinstance(self.children, set):
            self.children.add(child)
        else:
            self.children = {*self.children, child} if self.children else (child,)

    def discard(self, child: "Node") -> None:
        """A child is gone."""
        if isinstance(self.children, set):
            self.children.discard(child)
        elif self.children == (child,):
            self.children = ()


class HostHandle(Handle):
    """A hold in the host tier. `anchor`: the parent that a reservation keeps from being evicted. `holder`: whose
    hold it is, None once it ended.
    """

    __slots__ = ("anchor", "extent", "hint", "holder", "leased")

    def __init__(
        self, extent: Extent, owner: Owner, *, leased: bool, anchor: Node | None = None, hint: Hint = NO_HINT
    ) -> None:
        # Not through the parent's constructor: one is made for every block that is written or read.
        self.ref = extent.ref
        self.nbytes = extent.nbytes
        self.fmt = extent.fmt
        self.owner = owner
        self.checksum = extent.checksum
        self.holder: object = None
        self.extent = extent
        self.leased = leased
        self.anchor = anchor
        self.hint = hint
