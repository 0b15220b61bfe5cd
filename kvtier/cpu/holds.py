"""What the host tier's bookkeeping is made of: extents, nodes and leases.

extent   one version of a record's bytes in the slab, and its writer's reservation; a replaced or removed one lives on
         until its last hold ends
node     a ready key: its place in the prefix tree and in the eviction policy
lease    a reader's hold on an extent
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from kvtier.cpu.region import round_up
from kvtier.hints import Hint
from kvtier.tiers import BlockRef, Handle, Owner

__all__ = ["GONE", "Extent", "Fidelity", "HostHandle", "Lease", "Node", "Orphans", "leave_as_much", "usage"]

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

    def rename(self, ref: BlockRef, fidelity: Fidelity, hint: Hint, owner: Owner) -> None:
        """Become the extent of another record; its bytes are to be written again, or to be said whole."""
        self.ref = ref
        self.fidelity = fidelity
        self.hint = hint
        self.owner = owner
        self.checksum = b""

    @property
    def extent(self) -> "Extent":
        """Itself: what reservations and leases have in common."""
        return self


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

    @property
    def root(self) -> "Node":
        """The ancestor without a parent; itself, where it has none."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

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


class Orphans:
    """Nodes whose parent is not here, by its key: `of`."""

    __slots__ = ("of",)

    def __init__(self) -> None:
        self.of: dict[bytes, set[Node]] = {}

    def add(self, node: Node, parent: bytes) -> None:
        """It waits for this parent."""
        self.of.setdefault(parent, set()).add(node)

    def discard(self, node: Node, parent: bytes) -> None:
        """It waits no more."""
        siblings = self.of[parent]
        siblings.discard(node)
        if not siblings:
            del self.of[parent]


def leave_as_much(victims: Sequence[Node], nbytes: int) -> bool:
    """Whether each victim, which nobody leases, makes room for `nbytes`, and none leaves a child behind."""
    doomed: set[Node] = set()
    for node in victims:
        extent = node.extent
        fits = extent.nbytes == nbytes or round_up(extent.nbytes) == round_up(nbytes)
        if extent.holds > 1 or not fits or not doomed.issuperset(node.children):
            return False
        doomed.add(node)
    return len(doomed) == len(victims)


def usage(extents: Iterable[Extent]) -> dict[int, list[int]]:
    """How many extents there are, and bytes, by namespace."""
    rows: dict[int, list[int]] = {}
    for extent in extents:
        row = rows.setdefault(extent.ref.ns, [0, 0])
        row[0] += 1
        row[1] += extent.nbytes
    return rows
