"""What the host tier's bookkeeping is made of: extents, nodes and leases.

extent   one version of a record's bytes in the slab, and its writer's reservation; a replaced or removed one lives on
         until its last hold ends
node     a ready key: its place in the prefix tree and in the eviction policy
lease    a reader's hold on an extent
"""

from collections.abc import Sequence
from typing import TypeAlias

from kvtier.errors import FormatMismatch
from kvtier.hints import Hint
from kvtier.tiers import BlockRef, Handle, Owner

__all__ = ["GONE", "Extent", "Fidelity", "HostHandle", "Lease", "Node", "exchange"]

GONE = -1
"""Slot of a node that is not ready any more."""

Fidelity: TypeAlias = tuple[bool, int]
"""Orders the versions of a record: exact before lossy, then by format."""


class Extent(Handle):
    """Bytes of one record, whole pages from `offset` on; `checksum` is empty until they are written.

    It is its writer's reservation, too: one object less for every block that is put. `holder`: whose reservation it
    is, None once that ended. `anchor`: the parent that the reservation keeps from being evicted.
    """

    __slots__ = ("anchor", "fidelity", "hint", "holder", "holds", "leases", "node", "offset")

    leased = False

    def __init__(
        self, ref: BlockRef, nbytes: int, fmt: str, fidelity: Fidelity, offset: int, hint: Hint, owner: Owner
    ) -> None:
        # Not through the parent's constructor: one is made for every block that is written.
        self.ref = ref
        self.nbytes = nbytes
        self.fmt = fmt
        self.owner = owner
        self.checksum = b""
        self.fidelity = fidelity
        self.offset = offset
        self.hint = hint
        self.holder: object = None
        self.anchor: Node | None = None
        self.holds = 1
        self.leases = 0
        self.node: Node | None = None

    @property
    def extent(self) -> "Extent":
        """Itself: what reservations and leases have in common."""
        return self


def exchange(extents: Sequence[Extent]) -> None:
    """Swap the memory of the first with that of the second, and so on: of reservations of one size each."""
    for one, other in zip(extents[::2], extents[1::2], strict=True):
        if one.nbytes != other.nbytes:
            raise FormatMismatch(f"memory of {one.nbytes} for {other.nbytes} bytes: expected as many")
    for one, other in zip(extents[::2], extents[1::2], strict=True):
        one.offset, other.offset = other.offset, one.offset


class Lease(Handle):
    """A reader's hold on an extent. `holder`: whose lease it is, None once it ended."""

    __slots__ = ("extent", "holder")

    leased = True

    def __init__(self, extent: Extent, owner: Owner, holder: object) -> None:
        # Not through the parent's constructor: one is made for every block that is read.
        self.ref = extent.ref
        self.nbytes = extent.nbytes
        self.fmt = extent.fmt
        self.owner = owner
        self.checksum = extent.checksum
        self.extent = extent
        self.holder = holder


HostHandle: TypeAlias = Extent | Lease
"""A reservation or a lease."""


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
